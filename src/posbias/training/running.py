"""`train`: every member of a study trained, its model saved, and all of it kept in one record of verb "train".

Scalars: `counts` {status: members}, `members` [{name, coordinates, seed, status, reason, steps, loss, model}] with
`model` the member's directory within the run (None if there is none). Arrays, members first, NaN if a member has no
value: `losses` [member window], `evaluation_steps` [member evaluation] (-1 if there was none),
`evaluations/NAME` [member evaluation ...]; a quantity whose shape differs between members is stored for each as
`evaluations/NAME/MEMBER` [evaluation ...].

A study that a directory holds finished is read back from its record, so that nothing is trained twice. It is recognised
by what was trained, the members and the schedule. The version of the code is no reason to train again: the record names
it, and whoever wants the study anew leaves `resume` out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.checks import checked
from posbias.models.reference.network import config_from, save_reference
from posbias.results.figures import NEXT, Curve
from posbias.results.records import Record, plain, remove_record
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.runs.parts import below, fingerprint, finished_run
from posbias.runs.running import run_directory
from posbias.statistics import mean_ends
from posbias.tasks.synthetic import SYNTHETIC_TASKS, stack_tasks
from posbias.training.members import OPTIMISERS, Member, TrainedMember, TrainingSchedule, stopping_rule
from posbias.training.options import TrainOptions
from posbias.training.study import Study, load_study
from posbias.training.trainer import Trained, train_members

MODELS = "models"
"""Folder of a run that holds its members' models."""
ENDED_WELL = ("done", "stopped_early")


@RESULTS.register("train")
@dataclass(frozen=True, eq=False, repr=False)
class StudyRun(Result):
    """A trained study: its members, their loss curves and their saved models."""

    drawn_by: ClassVar = "posbias.training.page:training_report"
    record: Record
    """Of the run that trained it; "failed" if no member ended well."""
    trained: Trained
    """Members, schedule and stacks; of a stored run without parameters, which are in the models."""
    models: tuple[Path | None, ...]
    """Every member's directory, for `load_model`; None if nothing was saved."""

    @classmethod
    def from_record(cls, record: Record) -> "StudyRun":
        """The members that a record holds, those of a run in which none ended well too."""
        stored, resolved = record.resolved["options"], record.resolved
        schedule = TrainingSchedule(**{**stored, "stopping": stopping_rule(stored["stopping"])})
        members = []
        for index, told in enumerate(resolved["members"]):
            task, optimiser = SYNTHETIC_TASKS.parse(told["task"]), OPTIMISERS.parse(told["optimiser"])
            config = config_from(told["model"])
            member = Member(told["name"], config, task, told["seed"], optimiser, told["coordinates"])
            members.append(_outcome(member, index, record, schedule.window))
        stacks, device = int(resolved["stacks"]), str(resolved.get("device", "cpu"))
        trained = Trained(tuple(members), schedule, stacks, resumed=stacks, device=device)
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
        return replace(self, models=models)

    def shown(self) -> Shown:
        """Training loss by step of every point of the grid, the mean over the seeds that ended well."""
        curves = self.loss_curves()
        drawn = tuple(
            Curve(point, self.steps, rows.mean(axis=0), NEXT, *mean_ends(rows, least=0.0), drawn=index < 10)
            for index, (point, rows) in enumerate(curves.items())
        )
        facts = {
            outcome.member.name: f"{outcome.status} after {outcome.steps} steps: {outcome.reason}"
            for outcome in self.trained.members
            if outcome.status not in ENDED_WELL
        }
        counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in self.trained.counts().items())
        title = f"{self.title}, {len(self.trained.members)} members: {counts}"
        return Shown(title, drawn, "training loss", "step", unit="nats", facts=facts)

    @property
    def steps(self) -> Float64[np.ndarray, "window"]:
        """Updates at the end of every window of the loss curves."""
        longest = max(len(outcome.losses) for outcome in self.trained.members)
        return self.trained.schedule.window * np.arange(1.0, longest + 1)

    def loss_curves(self) -> dict[str, Float64[np.ndarray, "seed window"]]:
        """Losses (nats) of the seeds that ended well by point of the grid; one that stopped early keeps its last."""
        longest, curves = len(self.steps), dict[str, list[np.ndarray]]()
        for outcome in self.trained.members:
            if outcome.status in ENDED_WELL:
                losses = np.pad(outcome.losses.astype(np.float64), (0, longest - len(outcome.losses)), mode="edge")
                coordinates = outcome.member.coordinates.items()
                point = ", ".join(f"{axis.rpartition('.')[2]}={value}" for axis, value in coordinates)
                curves.setdefault(point or "all seeds", []).append(losses)
        return {point: np.stack(rows) for point, rows in curves.items()}


def _outcome(member: Member, index: int, record: Record, window: int) -> TrainedMember:
    """A member after training, without its parameters."""
    entry = record.scalars["members"][index]
    steps = entry["steps"]
    losses = record.arrays["losses"][index, : -(-steps // window)]
    padded_steps = record.arrays["evaluation_steps"][index]
    evaluation_steps = padded_steps[padded_steps >= 0]
    evaluations: dict[str, np.ndarray] = {}
    for name, values in below(record.arrays, "evaluations/").items() if len(evaluation_steps) else ():
        quantity, _, owner = name.partition("/")
        if not owner:
            evaluations[quantity] = values[index, : len(evaluation_steps)]
        elif owner == f"{index:04d}":
            evaluations[quantity] = values
    ended = entry["status"], entry["reason"], steps
    return TrainedMember(member, *ended, losses, None, evaluation_steps, evaluations)


def record_of(study: Study, trained: Trained, models: Sequence[Path | None]) -> Record:
    """The record of a study that was trained now."""
    record = Record(
        verb="train",
        arguments={},
        resolved={
            "title": study.name,
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
    longest, rest = max(map(len, rows)), [(0, 0)] * (rows[0].ndim - 1)
    return np.stack([np.pad(row, [(0, longest - len(row)), *rest], constant_values=missing) for row in rows])


@checked
def train(study: Study | str | Path, *, options: TrainOptions | None = None) -> StudyRun:
    """Train all members of a study and save each that ended well as a model directory.

    Args:
        study: What to train, or a study file.
        options: Engine, device and directory; by default this process, its first accelerator or the CPU, and nothing
            is kept.

    Raises:
        UsageError: before anything is trained: too many members, a point that makes no model.
        RunError: a checkpoint or a model cannot be written, or a stack repeatedly lost its worker.
    """
    study = study if isinstance(study, Study) else load_study(study)
    options = TrainOptions() if options is None else options
    with run_directory(
        options.directory,
        verb="train",
        arguments={"study": study.name},
        resume=options.resume,
        overwrite=options.overwrite,
    ) as run:
        members, directory = study.members(), options.directory
        described = [plain(member.describe()) for member in members]
        settings = {"verb": "train", "members": described, "options": study.schedule.describe()}
        record = finished_run(directory, lambda: settings, resume=options.resume)
        if record is not None and directory is not None:
            result = StudyRun.from_record(record).in_directory(directory)
        else:
            trained = train_members(members, study.schedule, options=options)
            if directory is not None:
                remove_record(directory)  # of an earlier study, whose models are about to be replaced
            models = tuple(_saved(index, member, directory) for index, member in enumerate(trained.members))
            record = record_of(study, trained, models)
            record.resolved["fingerprint"] = fingerprint(settings)
            result = StudyRun(record, trained, models)
        run.finish(record)
    return result


def _saved(index: int, trained: TrainedMember, directory: Path | None) -> Path | None:
    """Save a member's model, if it has one, and return its directory."""
    if directory is None or trained.parameters is None:
        return None
    place, member, items = directory / MODELS / f"{index:04d}", trained.member, None
    if member.task.vocabulary_size is None:  # token ids of its saved model name the vectors of its task
        items = stack_tasks([member.task], [member.seed]).item_vectors()
        assert items is not None  # every task of vector inputs has them
    save_reference(
        place,
        member.config,
        parameters=trained.parameters,
        provenance={**plain(member.describe()), "status": trained.status, "steps": trained.steps},
        items=None if items is None else items[0],
    )
    return place
