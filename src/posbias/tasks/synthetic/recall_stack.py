"""Lists, recall orders and scores by serial position for a stack of recall members (see `recall`)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posbias.tasks.synthetic.base import (
    IGNORED,
    Batch,
    Predict,
    TaskStack,
    check_step,
    cross_entropy,
    evaluation_sizes,
)
from posbias.tasks.synthetic.draws import Draws, Purpose, ranks

Tokens = Int64[Tensor, "member batch position"]
Places = Int64[Tensor, "member batch row"]
Scores = Float64[Tensor, "member place"]


@dataclass(frozen=True)
class Lists:
    """Study lists with a cue each, and the places of the list in the order of recall."""

    studied: Int64[Tensor, "member batch place"]
    free: Bool[Tensor, "member batch"]
    """Whether the cue is that of free recall."""
    places: Places
    """Place of the list asked for at each row."""
    asked: Bool[Tensor, "member batch row"]
    """Rows that ask for an item: all in free recall, the first `span` in running span."""

    @property
    def targets(self) -> Int64[Tensor, "member batch row"]:
        """The item at each row, or `IGNORED`."""
        return torch.where(self.asked, self.studied.gather(2, self.places), IGNORED)


@dataclass(frozen=True)
class RecallStack(TaskStack):
    """Members that recall lists of one length over one vocabulary."""

    items: int
    vocabulary: int
    spans: tuple[int, ...]
    free_shares: tuple[float, ...]
    draws: Draws

    def batch(self, step: int, size: int) -> Batch:
        """Lists with the members' own mixture of cues."""
        check_step(step, size)
        lists, _ = self._drawn(Purpose.TRAINING, step, size, self.free_shares)
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
        tally: dict[str, Tensor] = {}
        for index, size in enumerate(evaluation_sizes(examples)):
            for name, total in self._scores(predict, index, size).items():
                tally[name] = tally.get(name, torch.zeros_like(total)) + total
        scores = {name: (total / examples).cpu().numpy() for name, total in tally.items()}
        shares = {"free": np.array(self.free_shares), "span": 1 - np.array(self.free_shares)}
        scores["recalled"] = sum(
            np.where(share > 0, share, 0)[:, None] * scores[f"{cue}_recalled"] for cue, share in shares.items()
        )
        for cue, share in shares.items():
            for measure in ("probability", "first", "recalled"):
                scores[f"{cue}_{measure}"][share == 0] = np.nan
        return scores

    def _scores(self, predict: Predict, index: int, size: int) -> dict[str, Tensor]:
        """Sums over one batch of lists of every score."""
        mixed, _ = self._drawn(Purpose.EVALUATION, 3 * index, size, self.free_shares)
        scores = {"loss": cross_entropy(predict(self._inputs(mixed)).double(), mixed.targets) * size}
        for number, (cue, share) in enumerate((("free", 1.0), ("span", 0.0)), 1):
            shares = (share,) * len(self.spans)
            lists, raw = self._drawn(Purpose.EVALUATION, 3 * index + number, size, shares)
            chances = predict(self._inputs(lists)).double().softmax(-1)
            scores[f"{cue}_probability"] = _by_place(chances, lists)
            scores[f"{cue}_first"] = chances[:, :, 0].gather(2, lists.studied).sum(1)
            scores[f"{cue}_recalled"] = self._recalled(predict, lists, raw)
        return scores

    def _recalled(self, predict: Predict, lists: Lists, raw: Int64[Tensor, "member batch row"]) -> Scores:
        """How often the item of each place is named when the model's own draws are fed back."""
        inputs = self._inputs(lists)
        inputs[..., self.items + 1 :] = self.vocabulary + 2
        named = torch.zeros_like(lists.studied, dtype=torch.bool)
        finite = torch.ones(lists.free.shape, dtype=torch.bool, device=inputs.device)
        for row in range(self.items):
            if not bool(lists.asked[..., row].any()):
                break
            chances = predict(inputs)[:, :, row].double().softmax(-1)
            finite &= chances.isfinite().all(-1)
            drawn = _inverse_draw(chances, raw[..., row])
            named |= (lists.studied == drawn[..., None]) & lists.asked[..., row, None]
            if row + 1 < self.items:
                inputs[..., self.items + 1 + row] = drawn
        return torch.where(finite[..., None], named.double(), torch.nan).sum(1)

    def _drawn(
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
        order = ranks(raw[..., self.vocabulary : self.vocabulary + items])
        places = torch.where(free[..., None], order, (items - spans + rows) % items)
        asked = free[..., None] | (rows < spans)
        return Lists(studied, free, places, asked), raw[..., -1 - items : -1]

    def _inputs(self, lists: Lists) -> Tokens:
        """List, cue, and what has been recalled before each later row."""
        cue = torch.where(lists.free, self.vocabulary, self.vocabulary + 1)[..., None]
        recalled = torch.where(lists.asked, lists.targets, self.vocabulary + 2)
        return torch.cat((lists.studied, cue, recalled[..., :-1]), dim=-1)


def _by_place(chances: Float64[Tensor, "member batch row output"], lists: Lists) -> Scores:
    """Probability of the target, filed under its place and summed over the batch; NaN for places never asked."""
    given = chances.gather(3, lists.targets.clamp(min=0)[..., None])[..., 0]
    empty = torch.full(lists.studied.shape, torch.nan, dtype=given.dtype, device=given.device)
    return empty.scatter(2, lists.places, torch.where(lists.asked, given, torch.nan)).sum(1)


def _inverse_draw(
    chances: Float[Tensor, "member batch output"], raw: Int64[Tensor, "member batch"]
) -> Int64[Tensor, "member batch"]:
    """One output per sequence by its probability: the first whose cumulated probability exceeds the draw."""
    below = (chances.cumsum(-1) <= (raw.double() / 2**63)[..., None]).sum(-1)
    return below.clamp(max=chances.shape[-1] - 1)
