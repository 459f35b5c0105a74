"""Synthetic tasks for controlled training: naming the token at a fixed position, at that of a cue, or with its key.

A task is a frozen variant whose fields are its parameters. Others may be registered from anywhere, as that of a
published experiment is in `posbias_papers`. Members of different parameters stack if their `stack_key` is equal: a
stack draws the data of many members at once. A batch is a pure function of a member's task, its seed, the step and the
size: the same bits alone or among others.

A stream is (task name, seed, purpose, index). The purpose takes its own bits of the generator's seed, so training
steps, evaluation sets and a member's fixed tables never share a stream; within a purpose, different indices below
2^30 never do either. Everything after these draws is arithmetic on the whole stack, with small tables that differ from
member to member looked up for all at once.

Position copy: the model is to name the k-th token from the last position. Without position encodings, whether a
position can be named at all is a matter of mask and depth. Source: Ziming Liu, "Sparse attention 7", 2026 (V = 10,
C = 10, one model per k). The other two (ours) ask one model for every position alike, by a cue behind the context.
Cued copy: the k-th cue asks for the k-th token; the model must tell positions apart. Key-value retrieval: every token
is a key with a value, no key stands twice, and the cue is a key; nothing needs to be known about positions, and nothing
else in the context has the answer's key.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from posbias.checks import Count, Natural, checked_value
from posbias.errors import UsageError
from posbias.registry import Registry, Spelled

LEFT = dict.fromkeys(
    ["free_recall", "running_span", "recall_and_span", "text_with_pairs"],
    "commit 573e2c34 has it; cued_copy and key_value_retrieval are much alike",
)
"""Tasks that posbias had, and what to do instead."""
SYNTHETIC_TASKS: Registry["SyntheticTask"] = Registry(
    "synthetic task", left=LEFT, homes={"in_context_retrieval": "posbias_papers.published"}
)
INDEX_BITS = 30
"""Bits of an index; with 2 bits of purpose they fill the 32 bits of a seed that torch's CPU generator uses."""
DRAWS_FOR_THREADS = 200_000
"""Draws of a whole stack (about a millisecond) from which on starting threads costs less than it saves."""
STRIDE = 0x9E3779B1
"""Odd, so that index -> index * STRIDE is one to one modulo 2^30; neighbouring steps get distant seeds."""
EVALUATION_BATCH = 250
"""Sequences per member drawn and predicted at a time in an evaluation; the last batch may be smaller."""

Inputs = Float[Tensor, "member batch position feature"] | Int64[Tensor, "member batch position"]
Logits = Float[Tensor, "member batch row output"]
Predict = Callable[[Any], Any]
"""Inputs of the whole stack -> Logits at the task's rows."""


class Purpose(IntEnum):
    """The purpose of a stream; FIXED: tables that a member keeps, such as class centres and labels."""

    FIXED = 0
    TRAINING = 1
    EVALUATION = 2


@dataclass(frozen=True)
class Draws:
    """The streams of a stack of members."""

    bases: tuple[int, ...]
    """One 63-bit number per member, from its task's name and its seed."""
    device: torch.device

    @classmethod
    def of(cls, task_name: str, seeds: Sequence[int], device: torch.device) -> "Draws":
        """Streams of members that do the same task, one seed each."""
        digests = [hashlib.blake2b(f"{task_name}:{seed}".encode(), digest_size=8).digest() for seed in seeds]
        return cls(tuple(int.from_bytes(digest, "little") >> 1 for digest in digests), device)

    def mixed(
        self, purpose: Purpose, index: int, *, integers: tuple[int, ...], normals: tuple[int, ...] = ()
    ) -> tuple[Int64[Tensor, "member ..."], Float32[Tensor, "member ..."]]:
        """Whole numbers first, then standard normals, of the given shapes per member (no normals for ()).

        Whole numbers are uniform in [0, 2^63), to be reduced modulo small counts (bias below count / 2^63). `index` is
        the step, or the number of the evaluation batch, below 2^30.
        """
        whole = torch.empty(len(self.bases), *integers, dtype=torch.int64, device=self.device)
        normal = torch.empty(len(self.bases), *(normals or (0,)), dtype=torch.float32, device=self.device)

        def fill(members: range) -> None:
            generator = torch.Generator(self.device)
            for member in members:
                generator.manual_seed(_stream(self.bases[member], purpose, index))
                whole[member].random_(generator=generator)
                if normals:
                    normal[member].normal_(generator=generator)

        # Members over torch's threads, if that pays: its generator fills a tensor with one thread only.
        members, draws = len(self.bases), whole.numel() + normal.numel()
        threads = min(torch.get_num_threads(), members)
        if self.device.type != "cpu" or threads < 2 or draws < DRAWS_FOR_THREADS:
            fill(range(members))
            return whole, normal
        ends = [members * thread // threads for thread in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, map(range, ends[:-1], ends[1:])))
        return whole, normal


@dataclass(frozen=True)
class Batch:
    """The sequences that a stack of members is trained on in one step."""

    inputs: Inputs
    """Vectors, or token numbers."""
    targets: Int64[Tensor, "member batch row"]
    """The right output at each scored row."""


class SyntheticTask(Spelled, ABC):
    """A task whose data are drawn, not read; the fields of a variant are its parameters, the rest follows from them."""

    n_positions: int
    """Length of an input in positions."""
    n_outputs: int
    """Classes or tokens that an output tells apart."""
    vocabulary_size: int | None = None
    """Token numbers an input may hold; None if inputs are vectors."""
    width: int | None = None
    """Features of an input vector; None if inputs are tokens."""
    rows: tuple[int, ...]
    """Positions whose outputs are scored."""
    stack_key: Hashable
    """Tasks of equal key are drawn together."""

    def _follows(self, **values: Any) -> None:
        """Set what follows from the parameters: all that is annotated above, from `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def stack(self, tasks: Sequence[Any], draws: Draws) -> "TaskStack":
        """The stack of `tasks`, all of this task's key; called by `stack_tasks`."""


class TaskStack(ABC):
    """The data of several members that do tasks of one key."""

    @abstractmethod
    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """The sequences of one stream (see `Draws`) for every member."""

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """Sums over one batch of every score, per member (axis 0); `loss` (nats) and `accuracy` unless overridden."""
        batch = self.drawn(Purpose.EVALUATION, index, size)
        logits = predict(batch.inputs)
        yield "loss", cross_entropy(logits.double(), batch.targets) * size
        yield "accuracy", right_answers(logits, batch.targets[..., 0])

    def batch(self, step: int, size: int) -> Batch:
        """The `size` (>= 1) sequences that every member sees at `step` (>= 0)."""
        return self.drawn(Purpose.TRAINING, step, size)

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """Named scores per member (axis 0) on seeded data of their own, disjoint from every training step.

        `examples` (>= 1) counts sequences per member and evaluation set; NaN for a member whose logits are not finite.
        """
        tally: dict[str, Tensor] = {}
        for index, start in enumerate(range(0, examples, EVALUATION_BATCH)):
            for name, total in self.scores(predict, index, min(EVALUATION_BATCH, examples - start)):
                tally[name] = tally[name] + total if name in tally else total
        return {name: (total / examples).cpu().numpy() for name, total in tally.items()}

    def item_vectors(self) -> Float[Tensor, "member item feature"] | None:
        """The vectors that an input may hold at a position, noise aside; None if inputs are tokens."""
        return None


def stack_tasks(tasks: Sequence[SyntheticTask], seeds: Sequence[int], device: torch.device | str = "cpu") -> TaskStack:
    """Draw the data of several members together.

    Args:
        tasks: One per member, at least one, all of one `stack_key`.
        seeds: One per member, whole numbers >= 0; members of one task name and one seed see paired data.
        device: Where batches are drawn; the bits depend on the kind of device, not on the stack.
    """
    return tasks[0].stack(tasks, Draws.of(tasks[0].name, seeds, torch.device(device)))


def cross_entropy(logits: Logits, targets: Int64[Tensor, "member batch row"]) -> Float[Tensor, "member"]:
    """Mean loss of every member over its scored rows, in nats."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return losses.view(len(targets), -1).mean(-1)


def right_answers(
    logits: Float[Tensor, "member batch one output"], targets: Int64[Tensor, "member batch"]
) -> Float64[Tensor, "member"]:
    """Right answers per member; NaN if a logit is not finite."""
    right = (logits[:, :, 0].argmax(-1) == targets).double()
    return torch.where(logits[:, :, 0].isfinite().all(-1), right, torch.nan).sum(1)


def _stream(base: int, purpose: Purpose, index: int) -> int:
    low = (base + index * STRIDE) & ((1 << INDEX_BITS) - 1)
    return (base >> 32 << 32) | (purpose << INDEX_BITS) | low


Tokens = Int64[Tensor, "member batch position"]


@dataclass(frozen=True)
class Asked:
    """Contexts, and by position what asks for it and the answer."""

    tokens: Tokens
    answers: Tokens
    chosen: Int64[Tensor, "member batch one"]
    """The position asked for."""
    cues: Tokens | None = None
    """What stands behind the context to ask for a position; None: nothing, for it is always the same one."""

    def at(self, chosen: Int64[Tensor, "member batch one"]) -> Batch:
        """The contexts when certain positions are asked for."""
        cued = [] if self.cues is None else [self.cues.gather(2, chosen)]
        return Batch(torch.cat((self.tokens, *cued), dim=2), self.answers.gather(2, chosen))


class CopyTask(SyntheticTask):
    """A task that asks for one position of a context of tokens, which may have a cue behind it."""

    context: int
    vocabulary: int

    def _asks(self, vocabulary_size: int, cues: int = 0) -> None:
        """Set what follows from the sizes, from `__post_init__`."""
        n_positions = self.context + (cues > 0)
        self._follows(
            n_positions=n_positions,
            n_outputs=self.vocabulary,
            vocabulary_size=vocabulary_size,
            rows=(n_positions - 1,),
            stack_key=(self.name, self.context, self.vocabulary, cues),
        )

    @abstractmethod
    def asked(self, tasks: Sequence[Any], draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """The sequences of one stream (see `Draws`) for every member."""

    def stack(self, tasks: Sequence["CopyTask"], draws: Draws) -> TaskStack:
        """Members differ in their seeds, and in the position that is always asked for."""
        return CopyStack(tuple(tasks), draws)


@dataclass(frozen=True)
class CopyStack(TaskStack):
    """Contexts of every member; members of one seed share them."""

    tasks: tuple[CopyTask, ...]
    draws: Draws

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Each context as its position is asked for."""
        contexts = self.tasks[0].asked(self.tasks, self.draws, purpose, index, size)
        return contexts.at(contexts.chosen)

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """`loss` (nats), `accuracy`; with cues `accuracy_by_position` [position]: each context is asked for all."""
        yield from super().scores(predict, index, size)
        contexts = self.tasks[0].asked(self.tasks, self.draws, Purpose.EVALUATION, index, size)
        right = []
        if contexts.cues is None:
            return
        for position in range(contexts.tokens.shape[2]):
            batch = contexts.at(torch.full_like(contexts.chosen, position))
            right.append(right_answers(predict(batch.inputs), batch.targets[..., 0]))
        yield "accuracy_by_position", torch.stack(right, dim=-1)


@SYNTHETIC_TASKS.register("position_copy")
@dataclass(frozen=True)
class PositionCopy(CopyTask):
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
        self._asks(self.vocabulary)

    def asked(self, tasks: Sequence["PositionCopy"], draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """Independent uniform tokens."""
        tokens = draws.mixed(purpose, index, integers=(size, self.context))[0] % self.vocabulary
        targets = torch.tensor([task.target for task in tasks], device=draws.device)
        return Asked(tokens, tokens, targets[:, None, None].expand(-1, size, 1))


@SYNTHETIC_TASKS.register("cued_copy")
@dataclass(frozen=True)
class CuedCopy(CopyTask):
    """Name the token at the position that the last token stands for, every position as likely as the others.

    Token number `vocabulary` + k stands for position k.
    """

    context: Count = 16
    """Tokens in the context, and positions that may be asked for (>= 1)."""
    vocabulary: Annotated[Count, Ge(2)] = 10
    """Different answers (>= 2)."""
    cues: Count | None = None
    """Different cues there are (>= context), which a model that reads several lengths needs; None: context."""

    def __post_init__(self) -> None:
        cues = self.context if self.cues is None else self.cues
        self._asks(self.vocabulary + cues, cues)
        checked_value(f"{self.name}: cues", cues, Annotated[int, Ge(self.context)])

    def asked(self, tasks: Sequence["CuedCopy"], draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """Independent uniform tokens."""
        raw = draws.mixed(purpose, index, integers=(size, self.context + 1))[0]
        tokens = raw[..., :-1] % self.vocabulary
        cues = self.vocabulary + torch.arange(self.context, device=raw.device).expand_as(tokens)
        return Asked(tokens, tokens, raw[..., -1:] % self.context, cues)


@SYNTHETIC_TASKS.register("key_value_retrieval")
@dataclass(frozen=True)
class KeyValueRetrieval(CopyTask):
    """Name the value that stands with the key asked for, at a uniform position.

    Token k * `vocabulary` + v is key k with value v, token keys * `vocabulary` + k asks for key k.
    """

    context: Count = 16
    """Pairs in the context, and positions that may be asked for (>= 1)."""
    vocabulary: Annotated[Count, Ge(2)] = 10
    """Different values (>= 2)."""
    keys: Count | None = None
    """Different keys there are (>= context); None: context, so that every key stands somewhere."""

    def __post_init__(self) -> None:
        keys = self.context if self.keys is None else self.keys
        self._asks(keys * (self.vocabulary + 1), keys)
        checked_value(f"{self.name}: keys", keys, Annotated[int, Ge(self.context)])

    def asked(self, tasks: Sequence[Any], draws: Draws, purpose: Purpose, index: int, size: int) -> Asked:
        """Different keys in random order, values independent of them and of each other."""
        there = self.context if self.keys is None else self.keys
        raw = draws.mixed(purpose, index, integers=(size, there + self.context + 1))[0]
        keys = raw[..., :there].argsort(-1)[..., : self.context]
        values = raw[..., there:-1] % self.vocabulary
        return Asked(
            keys * self.vocabulary + values,
            values,
            raw[..., -1:] % self.context,
            there * self.vocabulary + keys,
        )
