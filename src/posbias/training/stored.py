"""A trained study as its record holds it, with the fields of `StudyRun`, as far as they are stored: all but parameters.

The layout is told in `posbias.training.running`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import InstanceOf

from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.models.reference.network import config_from
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import mean_ends
from posbias.tasks.synthetic import SYNTHETIC_TASKS
from posbias.training.members import STATUSES, Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS
from posbias.training.options import STOPPING, TrainingSchedule
from posbias.training.trainer import Trained

ENDED_WELL = ("done", "stopped_early")
DRAWN = 10
"""Most curves in the picture of a run."""


@RESULTS.register("train")
@dataclass(frozen=True, eq=False, repr=False)
class StoredStudyRun(Result):
    """A trained study as stored; the parameters of its members are in their models."""

    record: InstanceOf[Record]
    name: str = ""
    """Name of the study."""
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of every axis of the grid."""
    trained: InstanceOf[Trained] | None = None
    """Members, schedule and stacks; None if the run failed before anything was trained."""
    models: tuple[str | None, ...] = ()
    """Every member's directory within the run; None if it has none."""

    @classmethod
    def from_record(cls, record: Record) -> "StoredStudyRun":
        """The members that a record holds, those of a run in which none ended well too."""
        if record.status != "done" and not record.scalars:
            return cls(record)
        stored, resolved = record.resolved["options"], record.resolved
        schedule = TrainingSchedule(**{**stored, "stopping": STOPPING.parse(stored["stopping"])})
        described = zip(resolved["members"], record.scalars["members"], strict=True)
        members = tuple(
            _outcome(_member(settings), index, entry, record, schedule.window)
            for index, (settings, entry) in enumerate(described)
        )
        stacks = int(resolved["stacks"])
        read = {
            "record": record,
            "name": resolved["title"],
            "axes": resolved["axes"],
            "trained": Trained(members, schedule, stacks, resumed=stacks, device=str(resolved.get("device", "cpu"))),
            "models": [entry["model"] for entry in record.scalars["members"]],
        }
        return from_stored(cls, read)

    def shown(self) -> Shown:
        """Training loss by step; see `shown_losses`."""
        return Shown(self.record.line) if self.trained is None else shown_losses(self.name, self.trained)


def shown_losses(name: str, trained: Trained) -> Shown:
    """Training loss by step of every point of the grid, the mean over the seeds that ended well."""
    longest = max(len(outcome.losses) for outcome in trained.members)
    curves: dict[str, list[np.ndarray]] = {}
    for outcome in trained.members:
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
        for outcome in trained.members
        if outcome.status not in ENDED_WELL
    }
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in trained.counts().items())
    title = f"{name}, {len(trained.members)} members: {counts}"
    steps = trained.schedule.window * np.arange(1, longest + 1)
    return Shown(title, series, "training loss", "step", steps, unit="nats", facts=facts)


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
