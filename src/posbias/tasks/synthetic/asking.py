"""Tasks that ask one model for every position of a context alike, by a cue after it: by place, or by content (ours).

Cued copy: random tokens, and the k-th cue asks for the k-th of them; the model must tell positions apart. Key-value
retrieval: every token is a key with a value, no key stands twice, and the cue is a key; nothing needs to be known about
positions, and nothing else in the context has the answer's key.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from posbias.checks import check_size, checked
from posbias.limits import ITEMS
from posbias.tasks.synthetic.base import (
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    cross_entropy,
    right_answers,
)

Tokens = Int64[Tensor, "member batch position"]


@checked
@SYNTHETIC_TASKS.register("cued_copy")
@dataclass(frozen=True)
class CuedCopy(SyntheticTask):
    """Name the token at the position that the last token stands for, every position as likely as the others."""

    context: int = 16
    """Tokens in the context, and positions that may be asked for (>= 1)."""
    vocabulary: int = 10
    """Different tokens (>= 2)."""
    cues: int | None = None
    """Different cues there are (>= context), which a model that reads several lengths needs; None: context."""

    def __post_init__(self) -> None:
        check_size("cued_copy: context", self.context, ITEMS)
        check_size("cued_copy: vocabulary", self.vocabulary, ITEMS, least=2)
        cues = self.context if self.cues is None else self.cues
        check_size("cued_copy: cues", cues, ITEMS, least=self.context)
        self._follows(
            n_positions=self.context + 1,
            n_outputs=self.vocabulary,
            vocabulary_size=self.vocabulary + cues,
            rows=(self.context,),
            stack_key=(self.name, self.context, self.vocabulary, cues),
        )

    def stack(self, tasks: Sequence["CuedCopy"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members differ in their seeds alone."""
        return CuedCopyStack(tasks[0], Draws.of(self.name, seeds, device))


@checked
@SYNTHETIC_TASKS.register("key_value_retrieval")
@dataclass(frozen=True)
class KeyValueRetrieval(SyntheticTask):
    """Name the value that stands with the key asked for, at a uniform position."""

    context: int = 16
    """Tokens in the context, each a key with a value (>= 1)."""
    vocabulary: int = 10
    """Different values (>= 2)."""
    keys: int | None = None
    """Different keys there are (>= context); None: context, so that every key stands somewhere."""

    def __post_init__(self) -> None:
        check_size("key_value_retrieval: context", self.context, ITEMS)
        check_size("key_value_retrieval: vocabulary", self.vocabulary, ITEMS, least=2)
        check_size("key_value_retrieval: keys", self.n_keys, ITEMS, least=self.context)
        self._follows(
            n_positions=self.context + 1,
            n_outputs=self.vocabulary,
            vocabulary_size=self.n_keys * (self.vocabulary + 1),
            rows=(self.context,),
            stack_key=(self.name, self.context, self.vocabulary, self.n_keys),
        )

    @property
    def n_keys(self) -> int:
        """Keys to draw from."""
        return self.context if self.keys is None else self.keys

    def stack(self, tasks: Sequence["KeyValueRetrieval"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members differ in their seeds alone."""
        return KeyValueStack(tasks[0], Draws.of(self.name, seeds, device))


@dataclass(frozen=True)
class Asked:
    """Contexts, and by position what asks for it and the answer."""

    tokens: Tokens
    cues: Tokens
    answers: Tokens
    chosen: Int64[Tensor, "member batch one"]
    """The position asked for, uniform."""


class AskedStack(TaskStack):
    """Contexts of every member, each with a cue after it."""

    @abstractmethod
    def asked(self, purpose: Purpose, index: int, size: int) -> Asked:
        """The sequences of one stream."""

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Each context with the cue of the position asked for."""
        contexts = self.asked(purpose, index, size)
        inputs = torch.cat((contexts.tokens, contexts.cues.gather(2, contexts.chosen)), dim=2)
        return Batch(inputs, contexts.answers.gather(2, contexts.chosen))

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """`loss` (nats), `accuracy`, and `accuracy_by_position` [position], each context asked for all of them."""
        batch = self.drawn(Purpose.EVALUATION, index, size)
        logits = predict(batch.inputs)
        yield "loss", cross_entropy(logits.double(), batch.targets) * size
        yield "accuracy", right_answers(logits, batch.targets[..., 0])
        contexts, right = self.asked(Purpose.EVALUATION, index, size), []
        for position in range(contexts.tokens.shape[2]):
            inputs = torch.cat((contexts.tokens, contexts.cues[..., position : position + 1]), dim=2)
            right.append(right_answers(predict(inputs), contexts.answers[..., position]))
        yield "accuracy_by_position", torch.stack(right, dim=-1)


@dataclass(frozen=True)
class CuedCopyStack(AskedStack):
    """Asked for by position: token number `vocabulary` + k stands for position k."""

    task: CuedCopy
    draws: Draws

    def asked(self, purpose: Purpose, index: int, size: int) -> Asked:
        """Independent uniform tokens."""
        context, vocabulary = self.task.context, self.task.vocabulary
        raw = self.draws.integers(purpose, index, (size, context + 1))
        tokens = raw[..., :-1] % vocabulary
        cues = vocabulary + torch.arange(context, device=raw.device).expand_as(tokens)
        return Asked(tokens, cues, tokens, raw[..., -1:] % context)


@dataclass(frozen=True)
class KeyValueStack(AskedStack):
    """Asked for by key: token k * `vocabulary` + v is key k with value v, keys * `vocabulary` + k asks for key k."""

    task: KeyValueRetrieval
    draws: Draws

    def asked(self, purpose: Purpose, index: int, size: int) -> Asked:
        """Different keys in random order, values independent of them and of each other."""
        context, vocabulary, n_keys = self.task.context, self.task.vocabulary, self.task.n_keys
        raw = self.draws.integers(purpose, index, (size, n_keys + context + 1))
        keys = raw[..., :n_keys].argsort(-1)[..., :context]
        values = raw[..., n_keys:-1] % vocabulary
        return Asked(keys * vocabulary + values, n_keys * vocabulary + keys, values, raw[..., -1:] % context)
