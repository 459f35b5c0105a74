"""`train_members`: many members, one program per shape, anywhere an engine reaches; each as if trained alone.

A `Stack` is a few members of one shape as one program: parameters, constants and data with a leading member axis. One
step draws a batch for every member, goes forward and backward through stacked matrix products, and updates one flat
buffer. Members never mix, and with one thread to a product a member's numbers are those it would get alone: to the last
bit where every matrix begins at a multiple of 16 bytes (even widths, batches and numbers of examples), to rounding
elsewhere, because kernels choose their order of summation by that.

On a CPU the members are split into small stacks, which the threads share out between them: every matrix product has one
thread, so that no bit depends on how many threads or members there are, and small products lose no time to being split.
Elsewhere they are one stack. The state of a trainer goes into a checkpoint at the end of a window and comes back bit
for bit: parameters, moments, curves, evaluations; batches are a function of the step.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.memory import keep_freed_memory
from posbias.models.devices import check_precision, float64_device, training_device
from posbias.models.reference.config import constants_of, draw_parameters, draws, stacked
from posbias.models.reference.forward import forward
from posbias.progress import announce, report
from posbias.runs.engines import Arrays, collect, pinned
from posbias.runs.parts import PartStore, made_by, packed, unpacked
from posbias.tasks.synthetic import cross_entropy, stack_tasks
from posbias.training.members import (
    Member,
    MemberStatus,
    TrainedMember,
    TrainingSchedule,
    optimiser_of,
)
from posbias.training.options import TrainOptions

ALIGNMENT = 64
"""A member's vector is padded to a multiple of this many values: every member's begins where a cache line does, and
vector instructions find no remainder at its end, whose rounding could differ."""


def views(flat: Float[Tensor, "member value"], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Named parameters [member, ...] as views into the members' vectors, which hold them side by side."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = torch.split(flat[:, : sum(sizes)], sizes, dim=1)
    return {name: part.view(len(flat), *shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


class Stack:
    """Members of one `stack_key` in training: a vector of parameters and moments for each."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        device: torch.device,
        standing: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Members with the `values` and moments that they have now; None: as they are drawn."""
        self.members, self.device, first = tuple(members), device, members[0]
        self._config, self._rows = first.config, first.task.rows
        self._shapes = {name: torch.Size(shape) for name, _, shape, _ in draws(first.config)}
        if standing is None:
            size = -(-sum(shape.numel() for shape in self._shapes.values()) // ALIGNMENT) * ALIGNMENT
            drawn = [draw_parameters(member.config, member.generator()).values() for member in self.members]
            vectors = [torch.cat([values.flatten() for values in parameters]) for parameters in drawn]
            flat = torch.stack([nn.functional.pad(vector, (0, size - len(vector))) for vector in vectors]).to(device)
            moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
            standing = {"values": flat, **moments, "step": torch.zeros(len(flat), device=device)}
        self.state, self.values = dict(standing), standing["values"]
        self._gradients = torch.zeros_like(self.values)
        constants = [constants_of(member.config, member.task.n_positions) for member in self.members]
        self._constants = {name: values.to(device) for name, values in stacked(constants).items()}
        moments = {name: values for name, values in self.state.items() if name != "values"}
        optimisers = [member.optimiser for member in self.members]
        self._optimiser = optimiser_of(optimisers, self.values, self._gradients, moments)
        tasks, seeds = [member.task for member in self.members], [member.seed for member in self.members]
        self._data = stack_tasks(tasks, seeds, float64_device(device))

    def select(self, indices: Sequence[int]) -> "Stack":
        """A stack of some of the members, as they stand, this one being unchanged; this one if all are chosen."""
        if len(indices) == len(self.members):
            return self
        rows = torch.tensor(list(indices), dtype=torch.int64, device=self.device)
        standing = {name: values[rows].contiguous() for name, values in self.state.items()}
        return Stack([self.members[index] for index in indices], device=self.device, standing=standing)

    def steps(self, start: int, stop: int, *, batch: int) -> Float[Tensor, "step member"]:
        """Updates number start ... stop - 1 of every member; the losses (nats) before each."""
        return torch.stack([self.step(step, batch) for step in range(start, stop)])

    def step(self, step: int, batch: int) -> Float[Tensor, "member"]:
        """One update of every member on its own batch; the losses (nats) before the update."""
        drawn = self._data.batch(step, batch)
        leaves = {name: view.detach().requires_grad_() for name, view in views(self.values, self._shapes).items()}
        targets = drawn.targets.to(self.device)
        losses = cross_entropy(self._forward(leaves, drawn.inputs), targets)
        # A bias of the keys drops out of the softmax: its gradient is 0.
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        torch._foreach_copy_(list(views(self._gradients, self._shapes).values()), list(gradients))
        self._optimiser.step()
        return losses.detach()

    @torch.no_grad()
    def predict(
        self, inputs: Float[Tensor, "member batch position feature"] | Int[Tensor, "member batch position"]
    ) -> Float[Tensor, "member batch row output"]:
        """Logits of the scored positions, as every member stands."""
        parameters = views(self.values, self._shapes)
        pieces = torch.split(inputs, 512, dim=1)  # bounds memory, changes no result
        return torch.cat([self._forward(parameters, piece) for piece in pieces], dim=1).to(inputs.device)

    def evaluate(self, examples: int) -> dict[str, np.ndarray]:
        """The task's own evaluation of every member: arrays with a leading member axis, by name."""
        return dict(self._data.evaluate(self.predict, examples=examples))

    def parameters(self, index: int) -> dict[str, Tensor]:
        """A member's parameters, copied to the CPU."""
        own = views(self.values[index : index + 1], self._shapes)
        return {name: view[0].detach().cpu().clone() for name, view in own.items()}

    def _forward(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device, self.values.dtype if inputs.is_floating_point() else None)
        return forward(self._config, parameters, self._constants, inputs, rows=self._rows)


DECIDING = ("posbias.architecture", "posbias.models.reference", "posbias.tasks", "posbias.training")
"""Packages whose code decides the result of a training, beside those of tasks that stand elsewhere: checkpoints are
taken up while it is the same."""
CPU_VALUES = 1_120_000
"""Values of the stream (sequences * positions * features) of a stack on a CPU: what is
computed stays in the caches, and there is enough of it to be worth a call (benchmarks/train)."""


@dataclass(frozen=True, eq=False)
class Trained:
    """All members of a training, in the order they were given."""

    members: tuple[TrainedMember, ...]
    schedule: TrainingSchedule
    n_stacks: int
    """Programs that the members were trained in."""
    resumed: int
    """Stacks that were already finished in the directory."""
    device: str
    """Device on which they were trained."""

    def counts(self) -> dict[str, int]:
        """Number of members by the status in which they ended."""
        return dict(Counter(member.status for member in self.members))


@checked
def train_members(
    members: Sequence[Member], schedule: TrainingSchedule, *, options: TrainOptions | None = None
) -> Trained:
    """Train all members.

    Members of one shape, task shape and kind of optimiser are stacked; each member's result is that of training it
    alone, whatever the engine and its threads: on a CPU to the last bit where width, batch and examples are even, and
    to about 1e-7 relative per step where kernels round by the place of a matrix in memory.

    Args:
        members: At least one, names distinct.
        schedule: Steps, batch, evaluations, and when a member ends.
        options: Engine, device, directory, resume; by default this process, its first accelerator or the CPU, and
            nothing is kept.

    Returns:
        One result per member; a member that diverged or failed stops no other.

    Raises:
        UsageError: before anything is trained: no members, a name twice, a model that does not fit its task.
        RunError: a checkpoint cannot be written, or a stack repeatedly lost its worker.
    """
    options = TrainOptions() if options is None else options
    if not members:
        raise UsageError("there is nothing to train: 0 members given, at least 1 is needed")
    name, times = Counter(member.name for member in members).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{times} members are named {name!r}; names must be distinct")
    for member in members:
        member.check()
    options = replace(options, device=training_device(options.device))
    for member in members:
        check_precision(torch.device(options.device), member.config.torch_dtype)
    precisions = ", ".join(sorted({member.config.dtype for member in members}))
    report(f"{len(members)} members: {precisions} on {options.device}")
    stacks = group(members, stack_size=options.stack_size)
    work = StackWork(tuple(members), stacks, schedule, options)
    store = work.store()
    names = [f"stack-{unit:04d}" for unit in range(len(stacks))]
    pieces = collect(work, names, engine=options.engine, store=store)
    outcomes: dict[int, TrainedMember] = {}
    for stack, piece in zip(stacks, pieces, strict=True):
        states = zip(stack, unpacked(piece), strict=True)
        outcomes |= {index: TrainedMember.of_piece(members[index], kept) for index, kept in states}
    ended = tuple(outcomes[index] for index in range(len(members)))
    return Trained(ended, schedule, len(stacks), resumed=store.reused, device=options.device)


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
    schedule: TrainingSchedule
    options: TrainOptions
    description: str = "training stacks"

    def store(self) -> PartStore:
        """The place where checkpoints and finished stacks are kept."""
        tasks = {type(member.task).__module__.rpartition(".")[0] for member in self.members}
        settings = {
            "members": [member.describe() for member in self.members],
            "stacks": [list(stack) for stack in self.stacks],
            "options": self.schedule.describe(),
            "device": self.options.device,
            "made_by": made_by(sorted({*DECIDING, *filter(None, tasks)})),
        }
        return PartStore(self.options.directory, settings)

    def prepare(self) -> None:
        """Nothing is shared between stacks."""

    def compute(self, prepared: None, unit: int) -> Arrays:
        """Train one stack, from its latest checkpoint if there is one."""
        members = [self.members[index] for index in self.stacks[unit]]
        store, name = self.store(), f"stack-{unit:04d}-checkpoint"
        return packed([state.kept() for state in self._trained(members, store, name)])

    def _trained(self, members: Sequence[Member], store: PartStore, name: str) -> list[TrainedMember]:
        """The members of one stack; if the stack as a whole fails, each alone, so that one cannot stop the others."""
        try:
            return StackTrainer(members, self.schedule, self.options).train(store, name)
        except RunError:
            raise
        except Exception as error:  # whatever a member's parts may raise: recorded with the member
            if len(members) == 1:
                message = " ".join(str(error).split())
                kind = type(error).__name__
                return [TrainedMember(members[0], "failed", f"{kind}: {message}" if message else kind)]
        return [self._trained([member], store, f"{name}-{index}")[0] for index, member in enumerate(members)]


class StackTrainer:
    """Trains members of one stack key from the first step to the last; each leaves as it ends."""

    def __init__(self, members: Sequence[Member], schedule: TrainingSchedule, options: TrainOptions) -> None:
        self.members = tuple(members)
        self.schedule = schedule
        self._device = torch.device(options.device)
        self._chunk = default_chunk(self.members, schedule.batch, self._device)
        self._checkpoint_seconds = options.checkpoint_seconds
        self._step = 0
        self._states = {member: TrainedMember(member) for member in self.members}
        self._stacks = self._split()

    def _split(self) -> list[Stack]:
        """Small stacks of the members in training, as they are before the first step."""
        active = [member for member, state in self._states.items() if state.status == "training"]
        parts = [active[start : start + self._chunk] for start in range(0, len(active), self._chunk)]
        return [Stack(part, device=self._device) for part in parts]

    def train(self, store: PartStore, name: str) -> list[TrainedMember]:
        """Train every member to its end, from the checkpoint of that name if there is one."""
        with crew_for(self._device) as crew:
            checkpoint = store.find(name)
            if checkpoint is not None:
                self._restore(checkpoint)
            elif self.schedule.evaluate_every:
                self._evaluate(crew, due=True)
            saved = time.monotonic()
            while self._stacks and self._step < self.schedule.steps:
                self._window(crew)
                if time.monotonic() - saved >= self._checkpoint_seconds:
                    store.keep(name, self._checkpoint())
                    losses = [float(state.losses[-1]) for state in self._states.values()]
                    steps = f"step {self._step} of {self.schedule.steps}"
                    announce(f"{len(losses)} members, {steps}: loss {min(losses):.4g} to {max(losses):.4g} nats")
                    saved = time.monotonic()
        return list(self._states.values())

    def _window(self, crew: "Crew") -> None:
        """Steps up to the next entry of the loss curve, and what follows from it."""
        start, stop = self._step, min(self._step + self.schedule.window, self.schedule.steps)
        losses = crew(lambda stack: stack.steps(start, stop, batch=self.schedule.batch).cpu().double(), self._stacks)
        self._step = stop
        for stack, by_step in zip(self._stacks, losses, strict=True):
            # Summed one after another: the order of a vectorised sum may depend on how many members there are.
            mean = np.add.accumulate(by_step.numpy(), axis=0)[-1] / (stop - start)
            all_finite = stack.values.isfinite().all(dim=1).tolist()
            for member, loss, finite in zip(stack.members, mean, all_finite, strict=True):
                state = self._states[member]
                state.losses = np.append(state.losses, np.float32(loss))
                state.steps = stop
                state.status, state.reason = self._end(state, start, finite=finite)
        every = self.schedule.evaluate_every
        self._evaluate(crew, due=stop == self.schedule.steps or bool(every and stop % every == 0))
        self._leave()

    def _end(self, state: TrainedMember, start: int, *, finite: bool) -> tuple[MemberStatus, str]:
        """Status and reason of a member after its latest window, which began with step `start`.

        A loss is that before its update: the last update of a window may be what drives parameters to infinity.
        """
        if not state.losses[-1] <= self.schedule.diverged_above:
            loss = f"{state.losses[-1]:g}"
            return "diverged", f"the mean loss over steps {start} ... {self._step - 1} was {loss}"
        if not finite:
            return "diverged", f"its parameters are not finite after step {self._step - 1}"
        if self._step == self.schedule.steps:
            return "done", ""
        rule = self.schedule.stopping
        if rule is not None and rule.stops(state.losses):
            return "stopped_early", str(rule)
        return "training", ""

    def _evaluate(self, crew: "Crew", *, due: bool) -> None:
        """The task's evaluation of all members if it is due, and of those that have just ended."""
        if not self.schedule.examples:
            return
        stacks = []
        for stack in self._stacks:
            statuses = [self._states[member].status for member in stack.members]
            rows = [
                row for row, status in enumerate(statuses) if status != "diverged" and (due or status != "training")
            ]
            if rows:
                stacks.append(stack.select(rows))
        scores = crew(lambda stack: stack.evaluate(self.schedule.examples), stacks)
        for stack, by_name in zip(stacks, scores, strict=True):
            for row, member in enumerate(stack.members):
                self._states[member].evaluated({name: np.array(values[row]) for name, values in by_name.items()})

    def _leave(self) -> None:
        """Take members that have ended out of their stacks."""
        stacks = []
        for stack in self._stacks:
            remaining = []
            for row, member in enumerate(stack.members):
                state = self._states[member]
                if state.status == "training":
                    remaining.append(row)
                elif state.status != "diverged":
                    state.parameters = stack.parameters(row)
            if remaining:
                stacks.append(stack.select(remaining))
        self._stacks = stacks

    def _checkpoint(self) -> Arrays:
        """Everything that the rest of the training depends on, and the results so far."""
        states = [stack.state for stack in self._stacks]
        tensors = {name: torch.cat([state[name] for state in states]) for name in (states[0] if states else ())}
        return packed(
            {
                "step": self._step,
                "members": [state.kept() for state in self._states.values()],
                "tensors": {name: values.cpu().numpy() for name, values in tensors.items()},
            }
        )

    def _restore(self, arrays: Arrays) -> None:
        """Stand where the checkpoint was written."""
        piece = unpacked(arrays)
        self._step = piece["step"]
        states = zip(self.members, piece["members"], strict=True)
        self._states = {member: TrainedMember.of_piece(member, kept) for member, kept in states}
        self._stacks = self._split()
        row = 0
        for stack in self._stacks:
            rows = slice(row, row + len(stack.members))
            for name, values in piece["tensors"].items():
                stack.state[name].copy_(torch.from_numpy(values[rows]))
            row = rows.stop


Crew = Callable[[Callable[[Stack], Any], Sequence[Stack]], list[Any]]
"""Applies a function to stacks, several at a time."""


@contextmanager
def crew_for(device: torch.device) -> Iterator[Crew]:
    """On a CPU as many workers as PyTorch would use threads, each with one thread; elsewhere this thread."""
    if device.type != "cpu":
        yield lambda apply, stacks: [apply(stack) for stack in stacks]
        return
    keep_freed_memory()
    threads = torch.get_num_threads()
    with pinned(1), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda apply, stacks: list(pool.map(apply, stacks))


def default_chunk(members: Sequence[Member], batch: int, device: torch.device) -> int:
    """Members of each small stack: on a CPU as many as the caches hold, with some for every thread; elsewhere all."""
    if device.type != "cpu":
        return len(members)
    first = members[0]
    in_caches = CPU_VALUES // (batch * first.task.n_positions * first.config.width)
    return max(1, min(in_caches, -(-len(members) // torch.get_num_threads())))
