"""Position copy: random tokens, and the model is to name the k-th of them from the last position.

Without position encodings, whether a position can be named at all is a matter of mask and depth.

Source: Ziming Liu, "Sparse attention 7", 2026 (V = 10, C = 10, one model per k).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.tasks.synthetic.base import (
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    cross_entropy,
)


@checked
@SYNTHETIC_TASKS.register("position_copy")
@dataclass(frozen=True)
class PositionCopy(SyntheticTask):
    """Name the token at one position of a context of independent uniform tokens."""

    target: int
    """Position to name (0 ... context - 1; the last position is its own)."""
    context: int = 10
    """Tokens in the context (>= 1)."""
    vocabulary: int = 10
    """Different tokens (>= 2)."""

    def __post_init__(self) -> None:
        check_whole("position_copy: context", self.context, least=1)
        check_whole("position_copy: vocabulary", self.vocabulary, least=2)
        check_whole("position_copy: target", self.target, least=0)
        if self.target >= self.context:
            raise UsageError(
                f"position_copy: target must lie in the context, 0 ... {self.context - 1}, got {self.target}"
            )
        self._follows(
            n_positions=self.context,
            n_outputs=self.vocabulary,
            vocabulary_size=self.vocabulary,
            width=None,
            rows=(self.context - 1,),
            stack_key=(self.name, self.context, self.vocabulary),
        )

    def stack(self, tasks: Sequence["PositionCopy"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members may differ in their target."""
        return CopyStack(tuple(tasks), Draws.of(self.name, seeds, device))


@dataclass(frozen=True)
class CopyStack(TaskStack):
    """Contexts of every member; members of one seed share them whatever their target."""

    tasks: tuple[PositionCopy, ...]
    draws: Draws

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Independent uniform tokens."""
        first = self.tasks[0]
        tokens = self.draws.integers(purpose, index, (size, first.context)) % first.vocabulary
        positions = torch.tensor([task.target for task in self.tasks], device=self.draws.device)
        return Batch(tokens, tokens.gather(2, positions[:, None, None].expand(-1, size, 1)))

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """Sums over one batch of every set."""
        batch = self.drawn(Purpose.EVALUATION, index, size)
        logits = predict(batch.inputs)
        yield "loss", cross_entropy(logits.double(), batch.targets) * size
        yield "accuracy", (logits.argmax(-1) == batch.targets).double().sum((1, 2))

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """`loss` (nats) and `accuracy`, one per member."""
        found = super().evaluate(predict, examples=examples)
        return {**found, "accuracy": np.where(np.isfinite(found["loss"]), found["accuracy"], np.nan)}
