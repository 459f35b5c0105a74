"""Tasks on lists of tokens: naming one by its position, free recall, running span, and both of these.

Position copy shows random tokens, and the model is to name the k-th of them from the last position. Without position
encodings, whether a position can be named at all is a matter of mask and depth. Source: Ziming Liu, "Sparse attention
7", 2026 (V = 10, C = 10, one model per k).

In the recall tasks a list of different items is shown, then a cue. After the cue of free recall all items are to be
named, each once (a long-term demand): the order to learn is drawn uniformly, so that every item is asked for equally at
every step, or it is that of the list, forwards or backwards. After the cue of running span the last `span` items are to
be named in the order shown (a short-term demand).
Positions: list 0 ... n - 1, cue n, then the items recalled so far (teacher forcing in training); rows n ... 2n - 1 are
scored, a row past the span is ignored. The next item can be read off later inputs, so the mask must be causal from the
cue on. Source: the behavioural account of arXiv 2510.10276 (recall of everything gives primacy, of the last items
recency, both a U), known to us by its abstract: lengths, vocabulary, order and scoring are our definitions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posbias.checks import check_choice, check_size, check_whole, checked
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.synthetic.base import (
    IGNORED,
    SYNTHETIC_TASKS,
    Batch,
    Draws,
    Predict,
    Purpose,
    SyntheticTask,
    TaskStack,
    cross_entropy,
    ranks,
)

CUES = 3
"""Tokens beside the items: cue of free recall, cue of running span, filler after a finished span."""

ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda drawn: drawn,
    "listed": lambda drawn: drawn.sort(-1).values,
    "reversed": lambda drawn: drawn.sort(-1, descending=True).values,
}
"""By the name of an order of recall, the places in that order from places in a drawn one."""

Tokens = Int64[Tensor, "member batch position"]
Places = Int64[Tensor, "member batch row"]
Scores = Float64[Tensor, "member place"]


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
        check_size("position_copy: context", self.context, ITEMS)
        check_size("position_copy: vocabulary", self.vocabulary, ITEMS, least=2)
        check_whole("position_copy: target", self.target, least=0)
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
class RecallTask(SyntheticTask):
    """Base of the three recall tasks, which stack together and see the same lists for one seed."""

    needs_causal: ClassVar[bool] = True
    items: int = 12
    """Length of the list (>= 2)."""
    vocabulary: int = 32
    """Different items there are (>= items)."""
    order = "random"

    def __post_init__(self) -> None:
        check_size(f"{self.name}: items", self.items, ITEMS, least=2)
        check_choice(f"{self.name}: order", self.order, tuple(ORDERS))
        check_size(f"{self.name}: vocabulary", self.vocabulary, ITEMS, least=2)
        if self.vocabulary < self.items:
            raise UsageError(
                f"{self.name}: vocabulary must be at least items = {self.items}, as a list repeats none,"
                f" got {self.vocabulary}"
            )
        self._follows(
            n_positions=2 * self.items,  # list, cue, and all recalled items but the last
            n_outputs=self.vocabulary + CUES,
            vocabulary_size=self.vocabulary + CUES,
            rows=tuple(range(self.items, 2 * self.items)),
            stack_key=("recall", self.items, self.vocabulary),
        )

    @property
    def cues(self) -> tuple[int, float]:
        """Items asked for after the cue of running span, and the share of lists with the cue of free recall."""
        return 1, 1.0

    def stack(self, tasks: Sequence["RecallTask"], seeds: Sequence[int], device: torch.device) -> TaskStack:
        """Members may differ in the task, the span, the share of free recall and its order."""
        spans, free_shares = zip(*(task.cues for task in tasks), strict=True)
        orders = tuple(task.order for task in tasks)
        return RecallStack(self.items, self.vocabulary, spans, free_shares, orders, Draws.of("recall", seeds, device))


@checked
@SYNTHETIC_TASKS.register("free_recall")
@dataclass(frozen=True)
class FreeRecall(RecallTask):
    """Name every item of the list, in any order."""

    order: str = "random"
    """Order of recall to learn: `random`, drawn for each list, `listed` or `reversed`."""


@checked
@SYNTHETIC_TASKS.register("running_span")
@dataclass(frozen=True)
class RunningSpan(RecallTask):
    """Name the last items of the list, in order."""

    span: int = 4
    """Items asked for after the cue of running span (1 ... items)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: span", self.span, ITEMS)
        if self.span > self.items:
            raise UsageError(f"{self.name}: span must lie in 1 ... items = {self.items}, got {self.span}")

    @property
    def cues(self) -> tuple[int, float]:
        """The span, and no free recall."""
        return self.span, 0.0


@checked
@SYNTHETIC_TASKS.register("recall_and_span")
@dataclass(frozen=True)
class RecallAndSpan(RunningSpan):
    """Free recall of some lists, running span of the others, as the cue says."""

    free_share: float = 0.5
    """Share of the lists with free recall (strictly between 0 and 1)."""
    order: str = "random"
    """Order of free recall to learn: `random`, drawn for each list, `listed` or `reversed`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.free_share < 1:
            raise UsageError(f"recall_and_span: free_share must lie strictly between 0 and 1, got {self.free_share!r}")

    @property
    def cues(self) -> tuple[int, float]:
        """The span and the share."""
        return self.span, self.free_share


@dataclass(frozen=True)
class Lists:
    """Study lists with a cue each, and the places of the list in the order of recall."""

    studied: Int64[Tensor, "member batch place"]
    free: Bool[Tensor, "member batch"]
    """True if the cue is that of free recall."""
    places: Places
    """Place of the list asked for at each row."""
    scored: Bool[Tensor, "member batch row"]
    """Rows that ask for an item: all in free recall, the first `span` in running span."""

    @property
    def targets(self) -> Int64[Tensor, "member batch row"]:
        """The item at each row, or `IGNORED`."""
        return torch.where(self.scored, self.studied.gather(2, self.places), IGNORED)


@dataclass(frozen=True)
class RecallStack(TaskStack):
    """Members that recall lists of one length over one vocabulary."""

    items: int
    vocabulary: int
    spans: tuple[int, ...]
    free_shares: tuple[float, ...]
    orders: tuple[str, ...]
    draws: Draws

    def drawn(self, purpose: Purpose, index: int, size: int) -> Batch:
        """Lists with the members' own mixture of cues."""
        lists, _ = self._lists(purpose, index, size, self.free_shares)
        return Batch(self._inputs(lists), lists.targets)

    def evaluate(self, predict: Predict, *, examples: int) -> dict[str, np.ndarray]:
        """Scores by serial position after each cue, and the loss over the members' own mixture.

        Returns:
            Per member (axis 0): `loss` (nats per scored row); for free recall and for the span
            `free_probability`, `span_probability` [place]: mean probability of the item of that place at the row where
            it is asked for, the items before it given (teacher forcing; NaN for places the span never asks);
            `free_first`, `span_first` [place]: mean probability of naming it first;
            `free_recalled`, `span_recalled` [place]: share of lists in which it is named anywhere when the model's own
            draws (temperature 1, seeded) are fed back; NaN after a cue that the member was not trained on; and
            `recalled` [place]: the two, weighted as the member's training mixes them.
        """
        scores = super().evaluate(predict, examples=examples)
        shares = {"free": np.array(self.free_shares), "span": 1 - np.array(self.free_shares)}
        scores["recalled"] = sum(
            np.where(share > 0, share, 0)[:, None] * scores[f"{cue}_recalled"] for cue, share in shares.items()
        )
        for cue, share in shares.items():
            for measure in ("probability", "first", "recalled"):
                scores[f"{cue}_{measure}"][share == 0] = np.nan
        return scores

    def scores(self, predict: Predict, index: int, size: int) -> Iterator[tuple[str, Tensor]]:
        """Sums over one batch of every set."""
        mixed = self.drawn(Purpose.EVALUATION, 3 * index, size)
        yield "loss", cross_entropy(predict(mixed.inputs).double(), mixed.targets) * size
        for number, (cue, share) in enumerate((("free", 1.0), ("span", 0.0)), 1):
            lists, raw = self._lists(Purpose.EVALUATION, 3 * index + number, size, (share,) * len(self.spans))
            chances = predict(self._inputs(lists)).double().softmax(-1)
            # The probability of the target, filed under its place; NaN for places never asked.
            of_targets = chances.gather(3, lists.targets.clamp(min=0)[..., None])[..., 0]
            empty = torch.full_like(of_targets, torch.nan)
            by_row = torch.where(lists.scored, of_targets, torch.nan)
            yield f"{cue}_probability", empty.scatter(2, lists.places, by_row).sum(1)
            yield f"{cue}_first", chances[:, :, 0].gather(2, lists.studied).sum(1)
            yield f"{cue}_recalled", self._recalled(predict, lists, raw)

    def _recalled(self, predict: Predict, lists: Lists, raw: Int64[Tensor, "member batch row"]) -> Scores:
        """How often the item of each place is named when the model's own draws are fed back."""
        inputs = self._inputs(lists)
        inputs[..., self.items + 1 :] = self.vocabulary + 2
        named = torch.zeros_like(lists.studied, dtype=torch.bool)
        finite = torch.ones(lists.free.shape, dtype=torch.bool, device=inputs.device)
        for row in range(self.items):
            if not bool(lists.scored[..., row].any()):
                break
            chances = predict(inputs)[:, :, row].double().softmax(-1)
            finite &= chances.isfinite().all(-1)
            # The first output whose cumulated probability exceeds the draw.
            below = (chances.cumsum(-1) <= (raw[..., row].double() / 2**63)[..., None]).sum(-1)
            answers = below.clamp(max=chances.shape[-1] - 1)
            named |= (lists.studied == answers[..., None]) & lists.scored[..., row, None]
            if row + 1 < self.items:
                inputs[..., self.items + 1 + row] = answers
        return torch.where(finite[..., None], named.double(), torch.nan).sum(1)

    def _lists(
        self, purpose: Purpose, index: int, size: int, free_shares: tuple[float, ...]
    ) -> tuple[Lists, Int64[Tensor, "member batch row"]]:
        """Lists, and raw draws left over for sampled answers."""
        items, device = self.items, self.draws.device
        raw = self.draws.integers(purpose, index, (size, self.vocabulary + 2 * items + 1))
        studied = raw[..., : self.vocabulary].argsort(-1)[..., :items]
        coin = raw[..., -1].double() / 2**63
        free = coin < torch.tensor(free_shares, dtype=torch.float64, device=device)[:, None]
        spans = torch.tensor(self.spans, device=device)[:, None, None]
        rows = torch.arange(items, device=device)
        drawn = ranks(raw[..., self.vocabulary : self.vocabulary + items])
        order = torch.stack([ORDERS[name](places) for name, places in zip(self.orders, drawn, strict=True)])
        places = torch.where(free[..., None], order, (items - spans + rows) % items)
        return Lists(studied, free, places, free[..., None] | (rows < spans)), raw[..., -1 - items : -1]

    def _inputs(self, lists: Lists) -> Tokens:
        """List, cue, and what has been recalled before each later row."""
        cue = torch.where(lists.free, self.vocabulary, self.vocabulary + 1)[..., None]
        recalled = torch.where(lists.scored, lists.targets, self.vocabulary + 2)
        return torch.cat((lists.studied, cue, recalled[..., :-1]), dim=-1)
