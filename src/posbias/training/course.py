"""`Course`: one stack trained from its first step to its last, window by window, members leaving as they end.

What a course knows goes into a checkpoint at the end of a window and comes back bit for bit: parameters, moments, loss
curves, evaluations, and who is still in training. Batches are a function of the step, so nothing else is needed.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float32

from posbias.errors import RunError
from posbias.parts import PartStore
from posbias.training.members import Member, MemberStatus, TrainedMember
from posbias.training.options import TrainingOptions, TrainingRun
from posbias.training.stack import Stack
from posbias.training.watching import Watcher

CPU_CHUNK = 4
"""Members that go forward and backward together on a CPU, unless told otherwise (benchmarks/train)."""

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
        device = torch.device(run.device)
        chunk = run.chunk or (CPU_CHUNK if device.type == "cpu" else len(self.members))
        self._stack: Stack | None = Stack(self.members, device=device, chunk=chunk)
        self._active = list(range(len(self.members)))
        self._diaries = [_Diary() for _ in self.members]
        self._step = 0
        self._checkpoint_seconds = run.checkpoint_seconds
        self._watcher = watcher

    def train(self, store: PartStore, name: str) -> list[TrainedMember]:
        """All members, trained on from the checkpoint of that name where there is one.

        Raises:
            RunError: a checkpoint cannot be written (a full disk).
        """
        found = store.find(name)
        if found is not None:
            self._restore(found)
        elif self.options.evaluate_every:
            self._evaluate(self._active)
        saved = time.monotonic()
        while self._active and self._step < self.options.steps:
            self._window()
            if time.monotonic() - saved >= self._checkpoint_seconds:
                store.keep(name, self._checkpoint())
                saved = time.monotonic()
        return [self._trained(index) for index in range(len(self.members))]

    def _window(self) -> None:
        """Steps up to the next entry of the loss curve, and what follows from it."""
        assert self._stack is not None
        stop = min(self._step + self.options.window, self.options.steps)
        losses = torch.stack([self._stack.step(step, self.options.batch) for step in range(self._step, stop)])
        # Summed one after another: the order of a vectorised sum may depend on how many members there are.
        mean = np.add.accumulate(losses.double().cpu().numpy(), axis=0)[-1] / len(losses)
        self._step = stop
        for index, loss in zip(self._active, mean, strict=True):
            self._diaries[index].losses.append(float(np.float32(loss)))
            self._diaries[index].steps = stop
        self._watcher.window([self.members[index] for index in self._active], stop, mean.tolist())
        last = stop == self.options.steps
        ends = {place: end for place in range(len(self._active)) if (end := self._end(self._active[place], last))}
        due = self.options.evaluate_every and stop % self.options.evaluate_every == 0
        if due or last:
            self._evaluate([index for place, index in enumerate(self._active) if ends.get(place) != "diverged"])
        else:
            self._evaluate([self._active[place] for place, end in ends.items() if end == "stopped_early"])
        self._leave(ends)

    def _end(self, index: int, last: bool) -> MemberStatus | None:
        """Whether and how a member ends after its latest window."""
        diary = self._diaries[index]
        loss = diary.losses[-1]
        if not loss <= self.options.diverged_above:
            diary.reason = f"the mean loss over steps {diary.steps - self._length()} ... {diary.steps - 1} was {loss:g}"
            return "diverged"
        if last:
            return "done"
        if self.options.stopping.stops(diary.curve):
            diary.reason = str(self.options.stopping)
            return "stopped_early"
        return None

    def _length(self) -> int:
        """Steps of the latest window."""
        return (self._step - 1) % self.options.window + 1

    def _evaluate(self, indices: Sequence[int]) -> None:
        """The task's evaluation of some of the members in training."""
        if not indices or not self.options.examples:
            return
        assert self._stack is not None
        chosen = [self._active.index(index) for index in indices]
        stack = self._stack if len(chosen) == len(self._active) else self._stack.select(chosen)
        found = stack.evaluate(self.options.examples)
        for place, index in enumerate(indices):
            diary = self._diaries[index]
            diary.evaluation_steps.append(self._step)
            diary.evaluations.append({name: np.array(values[place]) for name, values in found.items()})

    def _leave(self, ends: dict[int, MemberStatus]) -> None:
        """Take the members at these places of the stack out of it."""
        if not ends:
            return
        assert self._stack is not None
        for place, status in ends.items():
            diary = self._diaries[self._active[place]]
            diary.status = status
            diary.parameters = None if status == "diverged" else self._stack.parameters(place)
        stay = [place for place in range(len(self._active)) if place not in ends]
        self._active = [self._active[place] for place in stay]
        self._stack = self._stack.select(stay) if stay else None

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
        if self._stack is not None:
            arrays["values"] = self._stack.values.cpu().numpy()
            arrays |= {f"state/{name}": values.cpu().numpy() for name, values in self._stack.state.items()}
        for index, diary in enumerate(self._diaries):
            arrays[f"{index}/losses"] = diary.curve
            for number, found in enumerate(diary.evaluations):
                arrays |= {f"{index}/evaluations/{number}/{name}": values for name, values in found.items()}
            for name, values in (diary.parameters or {}).items():
                arrays[f"{index}/parameters/{name}"] = values.numpy()
        plain = [[diary.status, diary.reason, diary.steps, diary.evaluation_steps] for diary in self._diaries]
        text = json.dumps({"step": self._step, "active": self._active, "members": plain})
        arrays["course"] = np.frombuffer(text.encode(), dtype=np.uint8)
        return arrays

    def _restore(self, arrays: Arrays) -> None:
        """Stand where the checkpoint was written."""
        course = json.loads(arrays["course"].tobytes())
        self._step, self._active = course["step"], course["active"]
        for index, (diary, plain) in enumerate(zip(self._diaries, course["members"], strict=True)):
            diary.status, diary.reason, diary.steps, diary.evaluation_steps = plain
            diary.losses = arrays[f"{index}/losses"].tolist()
            diary.evaluations = [
                _below(arrays, f"{index}/evaluations/{number}/") for number in range(len(diary.evaluation_steps))
            ]
            kept = _below(arrays, f"{index}/parameters/")
            diary.parameters = {name: torch.from_numpy(values) for name, values in kept.items()} or None
        assert self._stack is not None
        self._stack = self._stack.select(self._active) if self._active else None
        if self._stack is not None:
            self._stack.load(arrays["values"], _below(arrays, "state/"))


def _below(arrays: Arrays, stem: str) -> Arrays:
    """The arrays whose names begin with the stem, by the rest of their names."""
    return {name.removeprefix(stem): values for name, values in arrays.items() if name.startswith(stem)}


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
