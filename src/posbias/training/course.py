"""`Course`: members of one shape trained from the first step to the last, window by window, each leaving as it ends.

On a CPU the members are split into small stacks, which the threads share out between them: every matrix product has
one thread, so that no bit depends on how many threads or members there are (at even sizes, see
`posbias.training.stack`), and small products lose no time to being split. Elsewhere they are one stack. What a course
knows goes into a checkpoint at the end of a window and comes back bit for bit: parameters, moments, curves,
evaluations; batches are a function of the step.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from posbias.engines.engine import pinned
from posbias.errors import RunError
from posbias.memory import keep_freed_memory
from posbias.parts import PartStore, below
from posbias.training.members import Member, MemberStatus, TrainedMember
from posbias.training.options import TrainingOptions, TrainingRun
from posbias.training.stack import Stack
from posbias.training.watching import Watcher

CPU_VALUES = 1_120_000
"""Values of the stream (sequences * positions * features) of a stack on a CPU, unless told otherwise: what is computed
stays in the caches, and there is enough of it to be worth a call (benchmarks/train)."""

Arrays = dict[str, np.ndarray]


@dataclass
class _Diary:
    """What is known of one member so far."""

    status: MemberStatus | None = None
    """None while it is in training."""
    reason: str = ""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    evaluation_steps: list[int] = field(default_factory=list)
    evaluations: list[Arrays] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] | None = None

    @property
    def curve(self) -> Float32[np.ndarray, "window"]:
        return np.array(self.losses, dtype=np.float32)


class Course:
    """The training of one stack.

    Args:
        members: Of one stack key.
        options: What decides the result.
        run: Where it happens.
        watcher: Told of every window.
    """

    def __init__(
        self, members: Sequence[Member], options: TrainingOptions, *, run: TrainingRun, watcher: Watcher
    ) -> None:
        self.members = tuple(members)
        self.options = options
        self._device = torch.device(run.device)
        self._chunk = run.chunk or default_chunk(self.members, options.batch, self._device)
        self._diaries = [_Diary() for _ in self.members]
        self._step = 0
        self._checkpoint_seconds = run.checkpoint_seconds
        self._watcher = watcher
        self._place(range(len(self.members)))

    def _place(self, indices: Sequence[int]) -> None:
        """Stacks of these members, as they are before the first step."""
        self._groups = [list(indices[start : start + self._chunk]) for start in range(0, len(indices), self._chunk)]
        self._stacks = [Stack([self.members[index] for index in group], device=self._device) for group in self._groups]

    def train(self, store: PartStore, name: str) -> list[TrainedMember]:
        """All members, trained on from the checkpoint of that name where there is one.

        Raises:
            RunError: a checkpoint cannot be written (a full disk).
        """
        with crew_for(self._device) as crew:
            found = store.find(name)
            if found is not None:
                self._restore(found)
            elif self.options.evaluate_every:
                self._evaluate(self._groups, crew)
            saved = time.monotonic()
            while self._stacks and self._step < self.options.steps:
                self._window(crew)
                if time.monotonic() - saved >= self._checkpoint_seconds:
                    store.keep(name, self._checkpoint())
                    saved = time.monotonic()
        return [self._trained(index) for index in range(len(self.members))]

    def _window(self, crew: "Crew") -> None:
        """Steps up to the next entry of the loss curve, and what follows from it."""
        start, stop = self._step, min(self._step + self.options.window, self.options.steps)
        losses = crew(lambda stack: stack.steps(start, stop, batch=self.options.batch).double().cpu(), self._stacks)
        self._step = stop
        ends: dict[int, MemberStatus] = {}
        for group, stack, found in zip(self._groups, self._stacks, losses, strict=True):
            # Summed one after another: the order of a vectorised sum may depend on how many members there are.
            mean = np.add.accumulate(found.numpy(), axis=0)[-1] / (stop - start)
            for index, loss in zip(group, mean, strict=True):
                self._diaries[index].losses.append(float(np.float32(loss)))
                self._diaries[index].steps = stop
            self._watcher.window([self.members[index] for index in group], stop, mean.tolist())
            sound = zip(group, stack.finite(), strict=True)
            ends |= {index: end for index, whole in sound if (end := self._end(index, start, finite=whole)) is not None}
        last = stop == self.options.steps
        due = last or bool(self.options.evaluate_every and stop % self.options.evaluate_every == 0)
        looked_at = [
            [index for index in group if ends.get(index) != "diverged" and (due or index in ends)]
            for group in self._groups
        ]
        self._evaluate(looked_at, crew)
        self._leave(ends)

    def _end(self, index: int, start: int, *, finite: bool) -> MemberStatus | None:
        """Whether and how a member ends after its latest window, which began with step `start`.

        A loss is that before its update: the last update of a window may be what drives parameters to infinity.
        """
        diary = self._diaries[index]
        if not diary.losses[-1] <= self.options.diverged_above:
            diary.reason = f"the mean loss over steps {start} ... {self._step - 1} was {diary.losses[-1]:g}"
            return "diverged"
        if not finite:
            diary.reason = f"its parameters are not finite after step {self._step - 1}"
            return "diverged"
        if self._step == self.options.steps:
            return "done"
        if self.options.stopping.stops(diary.curve):
            diary.reason = str(self.options.stopping)
            return "stopped_early"
        return None

    def _evaluate(self, groups: Sequence[Sequence[int]], crew: "Crew") -> None:
        """The task's evaluation of some members of every stack."""
        if not self.options.examples:
            return
        wanted, stacks = [], []
        for group, whole, stack in zip(groups, self._groups, self._stacks, strict=True):
            if group:
                wanted.append(group)
                stacks.append(stack if len(group) == len(whole) else stack.select([whole.index(i) for i in group]))
        for group, found in zip(wanted, crew(lambda stack: stack.evaluate(self.options.examples), stacks), strict=True):
            for place, index in enumerate(group):
                self._diaries[index].evaluation_steps.append(self._step)
                self._diaries[index].evaluations.append(
                    {name: np.array(values[place]) for name, values in found.items()}
                )

    def _leave(self, ends: Mapping[int, MemberStatus]) -> None:
        """Take members out of their stacks."""
        groups, stacks = [], []
        for group, stack in zip(self._groups, self._stacks, strict=True):
            for place, index in enumerate(group):
                if index in ends:
                    self._diaries[index].status = ends[index]
                    gone = ends[index] == "diverged"
                    self._diaries[index].parameters = None if gone else stack.parameters(place)
            stay = [place for place, index in enumerate(group) if index not in ends]
            if stay:
                groups.append([group[place] for place in stay])
                stacks.append(stack if len(stay) == len(group) else stack.select(stay))
        self._groups, self._stacks = groups, stacks

    def _trained(self, index: int) -> TrainedMember:
        diary = self._diaries[index]
        assert diary.status is not None
        names = list(diary.evaluations[0]) if diary.evaluations else []
        return TrainedMember(
            member=self.members[index],
            status=diary.status,
            reason=diary.reason,
            steps=diary.steps,
            losses=diary.curve,
            parameters=diary.parameters,
            evaluation_steps=np.array(diary.evaluation_steps, dtype=np.int64),
            evaluations={name: np.stack([found[name] for found in diary.evaluations]) for name in names},
        )

    def _checkpoint(self) -> Arrays:
        """Everything that the rest of the course depends on, and what has come out so far."""
        arrays: Arrays = {}
        if self._stacks:
            arrays["values"] = torch.cat([stack.values for stack in self._stacks]).cpu().numpy()
            for name in self._stacks[0].state:
                arrays[f"state/{name}"] = torch.cat([stack.state[name] for stack in self._stacks]).cpu().numpy()
        for index, diary in enumerate(self._diaries):
            arrays[f"{index}/losses"] = diary.curve
            for number, found in enumerate(diary.evaluations):
                arrays |= {f"{index}/evaluations/{number}/{name}": values for name, values in found.items()}
            for name, values in (diary.parameters or {}).items():
                arrays[f"{index}/parameters/{name}"] = values.numpy()
        plain = [[diary.status, diary.reason, diary.steps, diary.evaluation_steps] for diary in self._diaries]
        text = json.dumps({"step": self._step, "active": list(itertools.chain(*self._groups)), "members": plain})
        arrays["course"] = np.frombuffer(text.encode(), dtype=np.uint8)
        return arrays

    def _restore(self, arrays: Arrays) -> None:
        """Stand where the checkpoint was written."""
        course = json.loads(arrays["course"].tobytes())
        self._step = course["step"]
        self._place(course["active"])
        for index, (diary, plain) in enumerate(zip(self._diaries, course["members"], strict=True)):
            diary.status, diary.reason, diary.steps, diary.evaluation_steps = plain
            diary.losses = arrays[f"{index}/losses"].tolist()
            diary.evaluations = [
                below(arrays, f"{index}/evaluations/{number}/") for number in range(len(diary.evaluation_steps))
            ]
            kept = below(arrays, f"{index}/parameters/")
            diary.parameters = {name: torch.from_numpy(values) for name, values in kept.items()} or None
        row = 0
        for stack in self._stacks:
            rows = slice(row, row + len(stack.members))
            stack.load(arrays["values"][rows], {name: each[rows] for name, each in below(arrays, "state/").items()})
            row = rows.stop


Crew = Callable[[Callable[[Stack], Any], Sequence[Stack]], list[Any]]
"""Applies a function to stacks, several at a time."""


@contextmanager
def crew_for(device: torch.device) -> Iterator[Crew]:
    """On a CPU as many threads as PyTorch would use, each with one to itself; elsewhere this thread."""
    if device.type != "cpu":
        yield lambda apply, stacks: [apply(stack) for stack in stacks]
        return
    keep_freed_memory()
    threads = torch.get_num_threads()
    with pinned(1), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda apply, stacks: list(pool.map(apply, stacks))


def default_chunk(members: Sequence[Member], batch: int, device: torch.device) -> int:
    """Members of each small stack: on a CPU what the caches hold, with some for every thread; elsewhere all."""
    if device.type != "cpu":
        return len(members)
    first = members[0]
    held = CPU_VALUES // (batch * first.task.n_positions * first.config.width)
    return max(1, min(held, -(-len(members) // torch.get_num_threads())))


def train_stack(
    members: Sequence[Member],
    options: TrainingOptions,
    *,
    run: TrainingRun,
    watcher: Watcher,
    place: tuple[PartStore, str],
) -> list[TrainedMember]:
    """The members of one stack; where the stack as a whole fails, each alone, so that one cannot stop the others.

    Args:
        members: Of one stack key.
        options: What decides the result.
        run: Where it happens.
        watcher: Told of every window.
        place: Where checkpoints are kept, and the stack's name there.

    Raises:
        RunError: a checkpoint cannot be written.
    """
    store, name = place
    try:
        return Course(members, options, run=run, watcher=watcher).train(store, name)
    except RunError:
        raise
    except Exception as error:  # whatever a member's parts may raise: recorded with the member
        if len(members) == 1:
            return [_failed(members[0], error)]
    return [
        trained
        for index, member in enumerate(members)
        for trained in train_stack([member], options, run=run, watcher=watcher, place=(store, f"{name}-{index}"))
    ]


def _failed(member: Member, error: Exception) -> TrainedMember:
    message = " ".join(str(error).split())
    return TrainedMember(
        member=member,
        status="failed",
        reason=f"{type(error).__name__}: {message}" if message else type(error).__name__,
        steps=0,
        losses=np.empty(0, dtype=np.float32),
        parameters=None,
        evaluation_steps=np.empty(0, dtype=np.int64),
        evaluations={},
    )
