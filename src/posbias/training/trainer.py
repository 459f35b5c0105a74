"""`train`: many members, one program per shape, anywhere an engine reaches; each as if it had been trained alone."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posbias.checks import checked
from posbias.engines import collect
from posbias.errors import UsageError
from posbias.models.placement import check_device
from posbias.parts import PartStore, below, made_by_sources
from posbias.training.course import train_stack
from posbias.training.members import Member, TrainedMember
from posbias.training.options import TrainingOptions, TrainingRun
from posbias.training.watching import Watcher, watching

Arrays = dict[str, np.ndarray]

DECIDING = ("posbias.architecture", "posbias.models.reference", "posbias.tasks.synthetic", "posbias.training")
"""Packages whose code decides the result of a training: checkpoints are taken up while it is the same."""


@dataclass(frozen=True, eq=False)
class Trained:
    """All members of a training, in the order they were given."""

    members: tuple[TrainedMember, ...]
    options: TrainingOptions
    n_stacks: int
    """Programs they were trained in."""
    resumed: int
    """Stacks that were found finished."""

    def counts(self) -> dict[str, int]:
        """How many members ended in which way."""
        return dict(Counter(member.status for member in self.members))


@checked
def train(members: Sequence[Member], options: TrainingOptions, *, run: TrainingRun | None = None) -> Trained:
    """Train all members.

    Members of one shape, task shape and kind of optimiser are stacked; each member's result is that of training it
    alone, whatever the engine and its threads: on a CPU to the last bit where width, batch and examples are even, and
    to about 1e-7 relative per step where kernels round by the place of a matrix in memory.

    Args:
        members: At least one, names distinct.
        options: Steps, batch, evaluation, ends.
        run: Engine, device, directory, resume; by default in this process, on the CPU, nothing kept.

    Returns:
        One result per member; one that diverged or failed says so and stops no other.

    Raises:
        UsageError: before anything is trained: no members, a name twice, a model that does not fit its task.
        RunError: a checkpoint cannot be written, or a stack lost its worker time and again.
    """
    run = TrainingRun() if run is None else run
    check_members(members)
    check_device(run.device)
    stacks = group(members, stack_size=run.stack_size)
    work = StackWork(tuple(members), stacks, options, run)
    store = work.store(resume=run.resume)
    names = [f"stack-{unit:04d}" for unit in range(len(stacks))]
    with watching(len(members), options.steps) as watcher:
        prepared = watcher if run.engine.in_process else None
        pieces = collect(work, names, engine=run.engine, store=store, prepared=prepared)
    found: dict[int, TrainedMember] = {}
    for stack, piece in zip(stacks, pieces, strict=True):
        found |= dict(zip(stack, _unpacked([members[index] for index in stack], piece), strict=True))
    return Trained(tuple(found[index] for index in range(len(members))), options, len(stacks), store.reused)


def check_members(members: Sequence[Member]) -> None:
    """Refuse what cannot be trained, before anything is.

    Raises:
        UsageError: no members, a name twice, a model that does not fit its task.
    """
    if not members:
        raise UsageError("there is nothing to train: 0 members given, at least 1 is needed")
    name, times = Counter(member.name for member in members).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{times} members are named {name!r}; names must be distinct")
    for member in members:
        member.check()


def group(members: Sequence[Member], *, stack_size: int) -> tuple[tuple[int, ...], ...]:
    """Indices of the members of each stack: equal keys together, in order, at most `stack_size` each."""
    keys: dict[Any, list[int]] = {}
    for index, member in enumerate(members):
        keys.setdefault(member.stack_key, []).append(index)
    return tuple(
        tuple(indices[start : start + stack_size])
        for indices in keys.values()
        for start in range(0, len(indices), stack_size)
    )


@dataclass(frozen=True, eq=False)
class StackWork:
    """The stacks of a training as units of work."""

    members: tuple[Member, ...]
    stacks: tuple[tuple[int, ...], ...]
    options: TrainingOptions
    run: TrainingRun
    description: str = "training stacks"

    def store(self, *, resume: bool) -> PartStore:
        """Where checkpoints and finished stacks are kept."""
        settings = {
            "members": [member.describe() for member in self.members],
            "stacks": [list(stack) for stack in self.stacks],
            "options": self.options.describe(),
            "device": self.run.device,
            "made_by": made_by_sources(DECIDING),
        }
        return PartStore(self.run.directory, settings, resume=resume)

    def prepare(self) -> Watcher:
        """Nobody watches a worker."""
        return Watcher()

    def compute(self, prepared: Watcher, unit: int) -> Arrays:
        """One stack, trained from its latest checkpoint where there is one."""
        members = [self.members[index] for index in self.stacks[unit]]
        place = (self.store(resume=True), f"stack-{unit:04d}-checkpoint")
        return _packed(train_stack(members, self.options, run=self.run, watcher=prepared, place=place))


def _packed(trained: Sequence[TrainedMember]) -> Arrays:
    """Results as arrays, which any engine can hand over and any file can hold."""
    arrays: Arrays = {}
    for index, each in enumerate(trained):
        arrays[f"{index}/losses"] = each.losses
        arrays[f"{index}/evaluation_steps"] = each.evaluation_steps
        arrays |= {f"{index}/evaluations/{name}": values for name, values in each.evaluations.items()}
        arrays |= {f"{index}/parameters/{name}": values.numpy() for name, values in (each.parameters or {}).items()}
    text = json.dumps([[each.status, each.reason, each.steps] for each in trained])
    arrays["members"] = np.frombuffer(text.encode(), dtype=np.uint8)
    return arrays


def _unpacked(members: Sequence[Member], arrays: Arrays) -> list[TrainedMember]:
    """The inverse of `_packed`."""
    found = []
    for index, (member, plain) in enumerate(zip(members, json.loads(arrays["members"].tobytes()), strict=True)):
        status, reason, steps = plain
        parameters = below(arrays, f"{index}/parameters/")
        found.append(
            TrainedMember(
                member=member,
                status=status,
                reason=reason,
                steps=steps,
                losses=arrays[f"{index}/losses"],
                parameters={name: torch.from_numpy(values) for name, values in parameters.items()} or None,
                evaluation_steps=arrays[f"{index}/evaluation_steps"],
                evaluations=below(arrays, f"{index}/evaluations/"),
            )
        )
    return found
