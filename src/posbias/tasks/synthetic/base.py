"""What every synthetic task offers: shapes, a stack that draws batches for many members at once, and an evaluation.

Members of different parameters stack where their `stack_key` is equal. A batch is a pure function of a member's task,
its seed, the step and the size: the same bits alone or among others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.architecture.masks import Mask
from posbias.checks import check_whole
from posbias.errors import UsageError
from posbias.registry import Registry
from posbias.tasks.synthetic.draws import Purpose

SYNTHETIC_TASKS: Registry["SyntheticTask"] = Registry("synthetic task")
IGNORED = -100
"""Target of a row that is not scored (torch's own convention in cross_entropy)."""
EVALUATION_BATCH = 250
"""Sequences per member drawn and predicted at a time in an evaluation; the last batch may be smaller."""

Inputs = Float[Tensor, "member batch position feature"] | Int64[Tensor, "member batch position"]
Logits = Float[Tensor, "member batch row output"]
Predict = Callable[[Any], Any]
"""Inputs of the whole stack -> Logits at the task's rows."""


@dataclass(frozen=True)
class Batch:
    """What a stack of members is trained on in one step."""

    inputs: Inputs
    """Vectors, or token numbers."""
    targets: Int64[Tensor, "member batch row"]
    """The right output at each scored row, or `IGNORED`."""


class SyntheticTask(ABC):
    """A task whose data are drawn, not read; the fields of a variant are its parameters, the rest follows from them."""

    name: ClassVar[str]
    needs_causal: ClassVar[bool] = False
    """Whether later inputs hold the answers, so that a mask that looks forwards would give them away."""
    n_positions: int
    """Length of an input in positions."""
    n_outputs: int
    """Classes or tokens that an output tells apart."""
    vocabulary_size: int | None
    """Token numbers an input may hold; None where inputs are vectors."""
    width: int | None
    """Features of an input vector; None where inputs are tokens."""
    rows: tuple[int, ...]
    """Positions whose outputs are scored."""
    stack_key: Hashable
    """Tasks of equal key are drawn together."""

    def _follows(self, **values: Any) -> None:
        """Set what follows from the parameters: all that is annotated above, from `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check_mask(self, mask: Mask) -> None:
        """Refuse a mask through which a scored row could see later inputs that hold its answer.

        Raises:
            UsageError: positions past the first scored row see each other both ways, and later inputs hold answers.
        """
        mutual = mask.mutual_prefix(self.n_positions)
        if self.needs_causal and mutual > self.rows[0] + 1:
            raise UsageError(
                f"{self.name}: answers stand after position {self.rows[0]}, so at most the first {self.rows[0] + 1}"
                f" positions may see each other both ways; under the mask {mask} the first {mutual} do"
            )

    @abstractmethod
    def stack(self, tasks: Sequence[Any], seeds: Sequence[int], device: torch.device) -> "TaskStack":
        """The stack of `tasks`, all of this task's key; called by `stack_tasks`."""

    def __str__(self) -> str:
        return SYNTHETIC_TASKS.spell(self)


class TaskStack(ABC):
    """The data of several members that do tasks of one key."""

    @abstractmethod
    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """The sequences of one stream (see `Draws`) for every member."""

    @abstractmethod
    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """Sums over one batch of every score, per member (axis 0)."""

    def batch(self, step: int, size: int) -> Batch:
        """The `size` (>= 1) sequences that every member sees at `step` (>= 0)."""
        if step < 0 or size < 1:
            raise UsageError(f"a batch needs a step >= 0 and a size >= 1, got step {step} and size {size}")
        return self.drawn(Purpose.TRAINING, step, size)

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """Scores per member (axis 0) on seeded data of their own, disjoint from every training step.

        Args:
            predict: Logits at the task's rows for inputs of the whole stack.
            examples: Sequences per member and evaluation set, >= 1.

        Returns:
            Named scores; NaN for a member whose logits are not finite.
        """
        check_whole("examples of an evaluation", examples, least=1)
        tally: dict[str, Tensor] = {}
        for index, start in enumerate(range(0, examples, EVALUATION_BATCH)):
            for name, total in self.scores(predict, index, min(EVALUATION_BATCH, examples - start)):
                tally[name] = tally[name] + total if name in tally else total
        return {name: (total / examples).cpu().numpy() for name, total in tally.items()}

    def item_vectors(self) -> Float[Tensor, "member item feature"] | None:
        """What an input may hold at a position, noise aside, where inputs are vectors; None where they are tokens."""
        return None


def stack_tasks(tasks: Sequence[SyntheticTask], seeds: Sequence[int], device: torch.device | str = "cpu") -> TaskStack:
    """Draw the data of several members together.

    Args:
        tasks: One per member, all of one `stack_key`.
        seeds: One per member, whole numbers >= 0; members of one task name and one seed see paired data.
        device: Where batches are drawn; the bits depend on the kind of device, not on the stack.

    Raises:
        UsageError: no tasks, as many seeds as tasks are needed, a seed is not a whole number, or keys differ.
    """
    if not tasks:
        raise UsageError("a stack needs at least 1 task, got none")
    if len(seeds) != len(tasks):
        raise UsageError(f"{len(seeds)} seeds for {len(tasks)} tasks; one is needed for each")
    for seed in seeds:
        check_whole("a seed", seed, least=0)
    for task in tasks:
        if task.stack_key != tasks[0].stack_key:
            raise UsageError(f"{task} and {tasks[0]} cannot be drawn in one stack: their shapes differ")
    return tasks[0].stack(tasks, seeds, torch.device(device))


def cross_entropy(logits: Logits, targets: Int64[Tensor, "member batch row"]) -> Float[Tensor, "member"]:
    """Mean loss of every member over its scored rows, in nats."""
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    per_member = losses.view(len(targets), -1).sum(-1)
    return per_member / (targets != IGNORED).view(len(targets), -1).sum(-1)
