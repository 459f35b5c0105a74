"""`place`: the order of retrieved passages that a model with a measured curve is expected to use best.

A passage of relevance s in slot j is used with s c_j, c the curve; the sum is largest when passages and slots are
sorted alike (rearrangement inequality). The curve is shrunk towards flat by what the contents leave undecided; where
they do not show that positions differ at all, best-first is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import check_seed, checked
from posbias.errors import UsageError
from posbias.evaluation.placement_gain import Gain, fixed_gain, held_out_gain
from posbias.evaluation.placement_orders import (
    REFERENCES,
    order_by_curve,
    shrink_to_flat,
    slot_weights,
)
from posbias.evaluation.statistics import CONTENTS_FOR_CLAIM, Scores, complete_contents
from posbias.statistics import Interval


@checked
@dataclass(frozen=True, eq=False)
class MeasuredUse:
    """What a run measured of one model: how often an item is used, by where it stands."""

    scores: Scores
    """score[content, position]: 1 right, 0 wrong, or a probability; NaN where skipped."""
    positions: tuple[int, ...]
    """Place of each column among the items, ascending."""
    n_items: int
    """Items in each context, >= 1."""
    measure: str = "accuracy"
    """What the scores are."""

    def __post_init__(self) -> None:
        ascending = list(self.positions) == sorted(set(self.positions))
        if len(self.positions) != self.scores.shape[1] or not ascending or not self.positions:
            raise UsageError(
                f"positions must ascend, one for each of {self.scores.shape[1]} columns, got {list(self.positions)}"
            )
        if self.positions[0] < 0 or self.positions[-1] >= self.n_items:
            raise UsageError(f"positions must lie in 0 ... {self.n_items - 1}, got {list(self.positions)}")


@dataclass(frozen=True, eq=False)
class Placement:
    """The order chosen for some passages, and what it is expected to be worth."""

    order: tuple[int, ...]
    """Indices of the passages as given, from the first slot of the context to the last."""
    curve: Float64[np.ndarray, "n_slots"]
    """Expected use of each slot, shrunk towards flat; interpolated where the slots were not measured."""
    kept: float
    """Share of the measured differences between positions that shrinking keeps, 0 (flat) ... 1."""
    p_flat: float
    """p-value against a flat curve; above 0.05 nothing is kept and best-first is the order."""
    gains: tuple[Gain, ...]
    """Over best-first, best-last and alternating."""
    n_contents: int
    """Complete contents behind the curve."""
    interpolated: bool
    """Whether the slots differ from the positions that were measured."""
    measure: str

    @property
    def decided(self) -> bool:
        """Whether the contents show that positions differ, so that the order rests on the curve."""
        return self.kept > 0

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "order": list(self.order),
            "curve": self.curve.tolist(),
            "kept": self.kept,
            "p_flat": self.p_flat,
            "decided": self.decided,
            "gains": [gain.as_record() for gain in self.gains],
            "n_contents": self.n_contents,
            "interpolated": self.interpolated,
            "measure": self.measure,
        }


@checked
def place(relevance: Sequence[Any], use: MeasuredUse, *, seed: int = 0) -> Placement:
    """Order passages so that the relevant ones stand where this model uses them.

    Maximises sum_i s_i c_slot(i) / sum_i s_i: where the relevances are proportional to the chance that passage i holds
    the answer, this is the expected score of the model.

    Args:
        relevance: One value per passage, finite, >= 0, not all zero; passages equally relevant keep their order.
        use: The measured curve.
        seed: Of resamples and halves, >= 0.

    Returns:
        The order; gains over the usual ones, judged on contents that had no part in the choice.

    Raises:
        UsageError: no relevance, a negative or infinite one, fewer than 6 complete contents, or a single position.
    """
    check_seed(seed)
    weights = _checked(relevance)
    complete = complete_contents(use.scores)
    if len(complete) < CONTENTS_FOR_CLAIM or complete.shape[1] < 2:
        raise UsageError(
            f"placing needs a curve of at least 2 positions and {CONTENTS_FOR_CLAIM} contents scored at each, got "
            f"{complete.shape[1]} and {len(complete)}"
        )
    spread = slot_weights(use.positions, n_items=use.n_items, n_slots=len(weights))
    shrunk = shrink_to_flat(complete, np.full((1, len(complete)), 1.0))
    curve = shrunk.curves[0] @ spread
    slots = order_by_curve(curve[None])[0] if shrunk.kept[0] > 0 else np.arange(len(weights))
    ranks = np.argsort(-weights, kind="stable")
    ordered = weights[ranks]
    order = np.empty(len(weights), dtype=np.int64)
    order[slots] = ranks
    gains = [
        Gain(
            name,
            _gain(complete, spread, (slots, against), relevance=ordered, seed=seed if shrunk.kept[0] > 0 else None),
            bool(shrunk.kept[0] > 0),
            _arranged(ranks, against),
            len(complete),
        )
        for name in REFERENCES
        for against in [REFERENCES[name](len(weights))]
    ]
    return Placement(
        order=tuple(int(index) for index in order),
        curve=curve,
        kept=float(shrunk.kept[0]),
        p_flat=float(shrunk.p_flat[0]),
        gains=tuple(gains),
        n_contents=len(complete),
        interpolated=tuple(use.positions) != tuple(range(len(weights))) or use.n_items != len(weights),
        measure=use.measure,
    )


def _gain(
    scores: Scores,
    spread: Float64[np.ndarray, "n_positions n_slots"],
    orders: tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]],
    *,
    relevance: Float64[np.ndarray, "n"],
    seed: int | None,
) -> Interval:
    """Gain of the first order over the second; on held-out halves with a seed, on all contents without."""
    slots, against = orders
    if np.array_equal(slots, against):
        return Interval(0.0, 0.0, 0.0)
    if seed is not None:
        return held_out_gain(scores, spread, relevance=relevance, against=against, seed=seed)
    in_slots = scores @ spread
    return fixed_gain(in_slots[:, slots] - in_slots[:, against], relevance)


def _arranged(ranks: Int64[np.ndarray, "n"], slots: Int64[np.ndarray, "n"]) -> tuple[int, ...]:
    """Passages from the first slot to the last, where the r-th most relevant one stands in `slots[r]`."""
    order = np.empty(len(ranks), dtype=np.int64)
    order[slots] = ranks
    return tuple(int(index) for index in order)


def _checked(relevance: Sequence[Any]) -> Float64[np.ndarray, "n"]:
    try:
        weights = np.asarray(list(relevance), dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"relevance must be a list of numbers, got {relevance!r:.80}") from None
    if weights.ndim != 1 or weights.size == 0:
        raise UsageError("relevance must be a list of at least 1 number, one for each passage")
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if wrong.size:
        raise UsageError(
            f"relevance of passage {wrong[0]} is {weights[wrong[0]]}; allowed: finite numbers >= 0 (turn logits into "
            "probabilities first)"
        )
    if not weights.any():
        raise UsageError("relevance is 0 for every passage, so no order is better than another; give at least one > 0")
    return weights
