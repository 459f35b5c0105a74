"""`StudyRun`, a trained study: its members, their losses and models, and the record that holds all but the parameters.

The layout is told in `posbias.training.running`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posbias.display.showing import FILES, Series, Shown
from posbias.errors import UsageError
from posbias.models.reference.network import config_from
from posbias.runs.parts import below
from posbias.runs.records import Record, plain
from posbias.runs.results import RESULTS, Result
from posbias.statistics import mean_ends
from posbias.tasks.synthetic import SYNTHETIC_TASKS
from posbias.training.members import STATUSES, Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS
from posbias.training.options import STOPPING, TrainingSchedule
from posbias.training.study import Study
from posbias.training.trainer import Trained

MODELS = "models"
"""Folder of a run that holds its members' models."""
ENDED_WELL = ("done", "stopped_early")
DRAWN = 10
"""Most curves in the picture of a run."""


@RESULTS.register("train")
@dataclass(frozen=True, eq=False, repr=False)
class StudyRun(Result):
    """A trained study: its members, their loss curves and their saved models."""

    record: Record
    """Of the run that trained it; "failed" if no member ended well."""
    trained: Trained
    """Members, schedule and stacks; of a stored run without parameters, which are in the models."""
    models: tuple[Path | None, ...]
    """Every member's directory, for `load_model`; None if nothing was saved."""
    directory: Path | None = None
    """The run directory, in which `models` lie."""

    @classmethod
    def from_record(cls, record: Record) -> "StudyRun":
        """The members that a record holds, those of a run in which none ended well too."""
        stored, resolved = record.resolved["options"], record.resolved
        schedule = TrainingSchedule(**{**stored, "stopping": STOPPING.parse(stored["stopping"])})
        described = zip(resolved["members"], record.scalars["members"], strict=True)
        members = tuple(
            _outcome(_member(settings), index, entry, record, schedule.window)
            for index, (settings, entry) in enumerate(described)
        )
        stacks = int(resolved["stacks"])
        trained = Trained(members, schedule, stacks, resumed=stacks, device=str(resolved.get("device", "cpu")))
        models = (entry["model"] for entry in record.scalars["members"])
        return cls(record, trained, tuple(None if model is None else Path(model) for model in models))

    @property
    def title(self) -> str:
        """Name of the study."""
        return str(self.record.resolved["title"])

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """Values of every axis of the grid."""
        axes: Mapping[str, Sequence[Any]] = self.record.resolved["axes"]
        return axes

    def in_directory(self, directory: Path) -> "StudyRun":
        """The run with the models of the directory from which it was read."""
        models = tuple(None if model is None else directory / MODELS / model.name for model in self.models)
        return replace(self, models=models, directory=directory)

    def shown(self) -> Shown:
        """Training loss by step of every point of the grid, the mean over the seeds that ended well."""
        longest = max(len(outcome.losses) for outcome in self.trained.members)
        curves: dict[str, list[np.ndarray]] = {}
        for outcome in self.trained.members:
            if outcome.status in ENDED_WELL:  # a member that stopped early keeps its last loss
                losses = np.pad(outcome.losses.astype(np.float64), (0, longest - len(outcome.losses)), mode="edge")
                coordinates = outcome.member.coordinates.items()
                point = ", ".join(f"{axis.rpartition('.')[2]}={value}" for axis, value in coordinates)
                curves.setdefault(point or "all seeds", []).append(losses)
        series = tuple(
            Series(point, np.mean(rows, axis=0), *mean_ends(np.stack(rows), least=0.0), drawn=index < DRAWN)
            for index, (point, rows) in enumerate(curves.items())
        )
        facts = {
            outcome.member.name: f"{outcome.status} after {outcome.steps} steps: {outcome.reason}"
            for outcome in self.trained.members
            if outcome.status not in ENDED_WELL
        }
        counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in self.trained.counts().items())
        title = f"{self.title}, {len(self.trained.members)} members: {counts}"
        steps = self.trained.schedule.window * np.arange(1, longest + 1)
        return Shown(title, series, "training loss", "step", steps, unit="nats", facts=facts)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write to a file by its ending, or complete the run directory with its record; see `Showing.save`.

        Raises:
            UsageError: another directory than that of the saved models, which the record refers to.
        """
        saved = None if self.directory is None else self.directory.absolute()
        if Path(path).suffix.lower() not in FILES and any(self.models) and Path(path).absolute() != saved:
            raise UsageError(f"the models of this run lie in {str(saved)!r}; its record can be saved there alone")
        return super().save(path, overwrite=overwrite)


def _member(settings: Mapping[str, Any]) -> Member:
    """A member before training; settings that older records lack have their defaults."""
    return Member(
        settings["name"],
        config_from(settings["model"]),
        SYNTHETIC_TASKS.parse(settings["task"]),
        settings["seed"],
        OPTIMISERS.parse(settings["optimiser"]),
        settings["coordinates"],
    )


def _outcome(member: Member, index: int, entry: Mapping[str, Any], record: Record, window: int) -> TrainedMember:
    """A member after training, without its parameters."""
    status, steps = entry["status"], entry["steps"]
    if status not in STATUSES:
        raise UsageError(f"member {member.name!r} has status {status!r}; known: {', '.join(STATUSES)}")
    windows = -(-steps // window)
    losses = record.arrays["losses"][index]
    if len(losses) < windows:
        raise UsageError(f"member {member.name!r} has {len(losses)} losses, and {windows} windows of training")
    padded_steps = record.arrays["evaluation_steps"][index]
    evaluation_steps = padded_steps[padded_steps >= 0]
    evaluations: dict[str, np.ndarray] = {}
    for name, values in below(record.arrays, "evaluations/").items() if len(evaluation_steps) else ():
        quantity, _, owner = name.partition("/")
        if not owner:
            evaluations[quantity] = values[index, : len(evaluation_steps)]
        elif owner == f"{index:04d}":
            evaluations[quantity] = values
    return TrainedMember(member, status, entry["reason"], steps, losses[:windows], None, evaluation_steps, evaluations)


def record_of(study: Study, trained: Trained, models: Sequence[Path | None]) -> Record:
    """The record of a study that was trained now."""
    record = Record(
        verb="train",
        arguments={},
        resolved={
            "title": study.name,
            "command": "",
            "options": trained.schedule.describe(),
            "task": plain(study.task),
            "model": plain(study.model),
            "optimiser": plain(study.optimiser),
            "axes": {axis: plain([value for value, _ in points]) for axis, points in study.axes.items()},
            "stacks": trained.n_stacks,
            "device": trained.device,
            "members": [plain(member.member.describe()) for member in trained.members],
        },
        seeds={f"member_{seed}": seed for seed in study.seeds},
        arrays=_arrays(trained.members),
    )
    entries = [
        {
            "name": outcome.member.name,
            "coordinates": plain(dict(outcome.member.coordinates)),
            "seed": outcome.member.seed,
            "status": outcome.status,
            "reason": outcome.reason,
            "steps": outcome.steps,
            "loss": plain(outcome.losses[-1]) if len(outcome.losses) else None,
            "model": None if model is None else f"{MODELS}/{model.name}",
        }
        for outcome, model in zip(trained.members, models, strict=True)
    ]
    record.scalars = {"counts": trained.counts(), "members": entries}
    if not any(member.status in ENDED_WELL for member in trained.members):
        first = trained.members[0]
        record.status = "failed"
        record.error = f"none of {len(trained.members)} members ended well; the first {first.status}: {first.reason}"
    return record


def _arrays(members: Sequence[TrainedMember]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {
        "losses": _padded([member.losses for member in members], np.nan),
        "evaluation_steps": _padded([member.evaluation_steps for member in members], -1),
    }
    for name in dict.fromkeys(name for member in members for name in member.evaluations):
        rows = {index: member.evaluations[name] for index, member in enumerate(members) if name in member.evaluations}
        shapes = {values.shape[1:] for values in rows.values()}
        if len(shapes) == 1:
            empty = np.empty((0, *shapes.pop()))
            arrays[f"evaluations/{name}"] = _padded([rows.get(index, empty) for index in range(len(members))], np.nan)
        else:
            arrays |= {f"evaluations/{name}/{index:04d}": values for index, values in rows.items()}
    return arrays


def _padded(rows: list[np.ndarray], missing: float) -> np.ndarray:
    """Rows of different lengths as one array, the missing ends filled."""
    longest = max(len(row) for row in rows)
    padded = np.full((len(rows), longest, *rows[0].shape[1:]), missing, dtype=np.result_type(*rows))
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
