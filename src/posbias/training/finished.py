"""A study that a directory holds finished, read back from its record and models, so that nothing is trained twice.

What decides is what was trained: the members and the options. Which version of the code trained them is no reason to
do it again; the record says which it was, and whoever wants it anew leaves `resume` out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.models.reference.saving import ITEMS, config_from, load_parameters
from posbias.parts import below
from posbias.records import Record, load_record, plain
from posbias.tasks.synthetic import SYNTHETIC_TASKS
from posbias.training.members import STATUSES, Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS
from posbias.training.options import TrainingOptions
from posbias.training.stopping import STOPPING
from posbias.training.trainer import Trained


def finished_training(
    members: Sequence[Member], options: TrainingOptions, directory: Path
) -> tuple[Trained, Record] | None:
    """These members as they were trained before, and the record that says so.

    Args:
        members: What is wanted.
        options: Likewise.
        directory: Of a run of verb "train".

    Returns:
        Results to the last bit; None where there is no whole record of just these members and options, where no member
        ended well, or where a model is missing or damaged.
    """
    try:
        record = load_record(directory)
        if record.verb != "train" or record.status != "done" or not _same(members, options, record):
            return None
        found = tuple(
            _member(member, index, record=record, directory=directory) for index, member in enumerate(members)
        )
    except (UsageError, RunError, LookupError, ValueError, TypeError, AttributeError):
        return None  # another format, or damaged: trained again
    stacks = int(record.resolved["stacks"])
    return Trained(found, options, stacks, resumed=stacks), record


def _same(members: Sequence[Member], options: TrainingOptions, record: Record) -> bool:
    """Whether the record is of these members and options; what older records do not say has its default."""
    told = dict(record.resolved["options"])
    told["stopping"] = STOPPING.parse(told["stopping"])
    recorded = record.resolved["members"]
    if TrainingOptions(**told) != options or len(recorded) != len(members):
        return False
    return all(_described(member) == _described(_retold(each)) for member, each in zip(members, recorded, strict=True))


def _retold(told: Mapping[str, Any]) -> Member:
    """The member that a record describes."""
    task, optimiser = SYNTHETIC_TASKS.parse(told["task"]), OPTIMISERS.parse(told["optimiser"])
    return Member(told["name"], config_from(told["model"]), task, told["seed"], optimiser, told["coordinates"])


def _described(member: Member) -> Any:
    return plain(member.describe())


def _member(member: Member, index: int, *, record: Record, directory: Path) -> TrainedMember:
    entry = record.scalars["members"][index]
    if entry["status"] not in STATUSES:
        raise UsageError(f"member {member.name!r} has status {entry['status']!r}; known: {', '.join(STATUSES)}")
    windows = -(-entry["steps"] // record.resolved["options"]["window"])
    steps, losses = record.arrays["evaluation_steps"][index], record.arrays["losses"][index]
    if len(losses) < windows:
        raise UsageError(f"member {member.name!r} has {len(losses)} losses, and {windows} windows of training")
    return TrainedMember(
        member=member,
        status=entry["status"],
        reason=entry["reason"],
        steps=entry["steps"],
        losses=losses[:windows],
        parameters=_parameters(member, entry, directory),
        evaluation_steps=steps[steps >= 0],
        evaluations=_evaluations(record.arrays, index),
    )


def _parameters(member: Member, entry: Mapping[str, Any], directory: Path) -> dict[str, Tensor] | None:
    """The weights of a member that ended well; None for one that did not.

    Raises:
        UsageError: there are none, or those of another model.
    """
    if entry["status"] in ("diverged", "failed"):
        return None
    if entry["model"] is None:
        raise UsageError(f"member {member.name!r} was not saved")
    tensors = load_parameters(directory / entry["model"], member.config)
    tensors.pop(ITEMS, None)
    return tensors


def _evaluations(arrays: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """A member's evaluations by quantity, without the rows that fill up shorter ones."""
    count = int((arrays["evaluation_steps"][index] >= 0).sum())
    if not count:
        return {}
    found = {}
    for name, values in below(arrays, "evaluations/").items():
        quantity, _, owner = name.partition("/")
        if not owner:
            found[quantity] = values[index, :count]
        elif owner == f"{index:04d}":
            found[quantity] = values
    return found
