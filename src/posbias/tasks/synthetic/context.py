"""Tasks on a context of random tokens: naming the one at a fixed position, at the position of a cue, or with its key.

Position copy: the model is to name the k-th token from the last position. Without position encodings, whether a
position can be named at all is a matter of mask and depth. Source: Ziming Liu, "Sparse attention 7", 2026 (V = 10,
C = 10, one model per k).

The other two (ours) ask one model for every position alike, by a cue behind the context. Cued copy: the k-th cue asks
for the k-th token; the model must tell positions apart. Key-value retrieval: every token is a key with a value, no key
stands twice, and the cue is a key; nothing needs to be known about positions, and nothing else in the context has the
answer's key.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Int64
from torch import Tensor

from posbias.checks import Count, Natural, checked_value
from posbias.errors import UsageError
from posbias.tasks.synthetic.base import (
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    right_answers,
)

Tokens = Int64[Tensor, "member batch position"]


@SYNTHETIC_TASKS.register("position_copy")
@dataclass(frozen=True)
class PositionCopy(SyntheticTask):
    """Name the token at one position of a context of independent uniform tokens."""

    target: Natural
    """Position to name (0 ... context - 1; the last position is its own)."""
    context: Count = 10
    """Tokens in the context (>= 1)."""
    vocabulary: Annotated[Count, Ge(2)] = 10
    """Different tokens (>= 2)."""

    def __post_init__(self) -> None:
        if self.target >= self.context:
            raise UsageError(
                f"position_copy: target must lie in the context, 0 ... {self.context - 1}, got {self.target}"
            )
        self._follows(
            n_positions=self.context,
            n_outputs=self.vocabulary,
            vocabulary_size=self.vocabulary,
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


@dataclass(frozen=True)
class Asked:
    """Contexts, and by position what asks for it and the answer."""

    tokens: Tokens
    cues: Tokens
    answers: Tokens
    chosen: Int64[Tensor, "member batch one"]
    """The position asked for, uniform."""


@dataclass(frozen=True)
class AskingTask(SyntheticTask):
    """Base of tasks with a context and, after it, a cue that asks for one of its positions."""

    context: Count = 16
    """Tokens in the context, and positions that may be asked for (>= 1)."""
    vocabulary: Annotated[Count, Ge(2)] = 10
    """Different answers (>= 2)."""

    def _asks(self, n_cues: int, vocabulary_size: int) -> None:
        """Check the sizes and set what follows from them, from `__post_init__`."""
        self._follows(
            n_positions=self.context + 1,
            n_outputs=self.vocabulary,
            vocabulary_size=vocabulary_size,
            rows=(self.context,),
            stack_key=(self.name, self.context, self.vocabulary, n_cues),
        )

    @abstractmethod
    def asked(self, draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """The sequences of one stream (see `Draws`) for every member."""

    def stack(self, tasks: Sequence["AskingTask"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members differ in their seeds alone."""
        return AskedStack(tasks[0], Draws.of(self.name, seeds, device))


@SYNTHETIC_TASKS.register("cued_copy")
@dataclass(frozen=True)
class CuedCopy(AskingTask):
    """Name the token at the position that the last token stands for, every position as likely as the others.

    Token number `vocabulary` + k stands for position k.
    """

    cues: Count | None = None
    """Different cues there are (>= context), which a model that reads several lengths needs; None: context."""

    def __post_init__(self) -> None:
        cues = self.context if self.cues is None else self.cues
        self._asks(cues, self.vocabulary + cues)
        checked_value(f"{self.name}: cues", cues, Annotated[int, Ge(self.context)])

    def asked(self, draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """Independent uniform tokens."""
        raw = draws.integers(purpose, index, (size, self.context + 1))
        tokens = raw[..., :-1] % self.vocabulary
        cues = self.vocabulary + torch.arange(self.context, device=raw.device).expand_as(tokens)
        return Asked(tokens, cues, tokens, raw[..., -1:] % self.context)


@SYNTHETIC_TASKS.register("key_value_retrieval")
@dataclass(frozen=True)
class KeyValueRetrieval(AskingTask):
    """Name the value that stands with the key asked for, at a uniform position.

    Token k * `vocabulary` + v is key k with value v, token keys * `vocabulary` + k asks for key k.
    """

    keys: Count | None = None
    """Different keys there are (>= context); None: context, so that every key stands somewhere."""

    def __post_init__(self) -> None:
        self._asks(self.n_keys, self.n_keys * (self.vocabulary + 1))
        checked_value(f"{self.name}: keys", self.n_keys, Annotated[int, Ge(self.context)])

    @property
    def n_keys(self) -> int:
        """Keys to draw from."""
        return self.context if self.keys is None else self.keys

    def asked(self, draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """Different keys in random order, values independent of them and of each other."""
        raw = draws.integers(purpose, index, (size, self.n_keys + self.context + 1))
        keys = raw[..., : self.n_keys].argsort(-1)[..., : self.context]
        values = raw[..., self.n_keys : -1] % self.vocabulary
        tokens, cues = keys * self.vocabulary + values, self.n_keys * self.vocabulary + keys
        return Asked(tokens, cues, values, raw[..., -1:] % self.context)


@dataclass(frozen=True)
class AskedStack(TaskStack):
    """Contexts of every member, each with a cue after it."""

    task: AskingTask
    draws: Draws

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Each context with the cue of the position asked for."""
        contexts = self.task.asked(self.draws, purpose, index, size)
        inputs = torch.cat((contexts.tokens, contexts.cues.gather(2, contexts.chosen)), dim=2)
        return Batch(inputs, contexts.answers.gather(2, contexts.chosen))

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """`loss` (nats), `accuracy`, and `accuracy_by_position` [position], each context asked for all of them."""
        yield from super().scores(predict, index, size)
        contexts, right = self.task.asked(self.draws, Purpose.EVALUATION, index, size), []
        for position in range(contexts.tokens.shape[2]):
            inputs = torch.cat((contexts.tokens, contexts.cues[..., position : position + 1]), dim=2)
            right.append(right_answers(predict(inputs), contexts.answers[..., position]))
        yield "accuracy_by_position", torch.stack(right, dim=-1)
