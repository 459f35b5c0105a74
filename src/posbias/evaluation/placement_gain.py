"""What an order is worth against another, judged on contents that it was not made from.

The gain of an order is the difference of sum_r s_r c_slots[r] / sum_r s_r, in units of the score: with relevances
proportional to the chance of holding the answer, the difference in expected accuracy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.evaluation.placement_orders import order_by_curve, shrink_to_flat
from posbias.evaluation.statistics import Scores
from posbias.statistics import DRAWS, Interval, mean_of, percentile_interval, resample_counts

HALVINGS = 200
"""Random halvings behind the held-out estimate; its own scatter is then far below its interval."""
CONTENTS_TO_CONFIRM = 12
"""Contents below which halves are too small (6 each) for the held-out gain to support a claim."""

Slots = Int64[np.ndarray, "n_slots"]
Relevance = Float64[np.ndarray, "n_slots"]
Counts = Float64[np.ndarray, "_ _"]
"""How often each content counts, one row per draw."""


@dataclass(frozen=True)
class Gain:
    """The chosen order against a usual one."""

    over: str
    """Name of the usual order."""
    gain: Interval
    """Of the chosen order; exactly 0, without an interval, where both orders are the same."""
    held_out: bool
    """Whether the order was made from the curve, and is judged by halves: made on one half of the contents, judged on
    the other, averaged over halvings. An order that rests on no curve is judged on all contents."""
    order: tuple[int, ...]
    """The usual order itself: indices of the passages, first slot to last."""
    n_contents: int
    """Complete contents behind the gain."""

    @property
    def raises(self) -> bool:
        """Whether contents that had no part in the choice show that the chosen order is better."""
        return self.n_contents >= CONTENTS_TO_CONFIRM and self.gain.known and self.gain.low > 0

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "over": self.over,
            "gain": self.gain.as_record(),
            "held_out": self.held_out,
            "order": list(self.order),
            "raises": self.raises,
        }


def fixed_gain(differences: Float64[np.ndarray, "n_contents n_slots"], relevance: Relevance) -> Interval:
    """Gain of one order over another where neither was chosen on these contents.

    Args:
        differences: Each content's score where the one order puts the r-th most relevant passage, less its score where
            the other puts it.
        relevance: Falling.
    """
    return mean_of(differences @ (relevance / relevance.sum())).interval()


def held_out_gain(
    scores: Scores,
    spread: Float64[np.ndarray, "n_positions n_slots"],
    *,
    relevance: Relevance,
    against: Slots,
    seed: int,
) -> Interval:
    """Gain of "sort by the curve of one half" on the other half, both ways, averaged over random halvings.

    The whole procedure, shrinking and its retreat to best-first included, is repeated on resampled contents; copies of
    one content stay in one half, so nothing is judged on what it was made from. By simulation its interval holds the
    gain of the order that all contents give, too (in 91 to 100 of 100 cases); the same contents' own estimate of that
    gain, optimistic by what the choice owes to luck, had coverages of .54 to .81 and is not given.

    Args:
        scores: No NaN; at least 2 contents.
        spread: Carries a curve over positions to slots.
        relevance: Falling.
        against: Slots of the usual order.
        seed: Of halves and resamples.
    """
    n_contents = len(scores)
    generator = np.random.default_rng(seed)

    def gains(halves: Counts, counts: Counts) -> Float64[np.ndarray, "_"]:
        """Mean of both directions."""
        parts = (counts * halves, counts * (1 - halves))
        both = [
            _gains(scores, spread, relevance=relevance, against=against, weights=split)
            for split in (parts, parts[::-1])
        ]
        return np.asarray(np.mean(both, axis=0))

    point = gains(_halves(n_contents, HALVINGS, generator), np.ones((1, n_contents)))
    counts = resample_counts(n_contents, generator=generator, draws=DRAWS)
    drawn = gains(_halves(n_contents, DRAWS, generator), counts)
    return percentile_interval(float(np.nanmean(point)), drawn, n_contents)


def _halves(n_contents: int, draws: int, generator: np.random.Generator) -> Float64[np.ndarray, "draws n_contents"]:
    """Which contents are in the first half (1) or the second (0)."""
    order = generator.permuted(np.tile(np.arange(n_contents), (draws, 1)), axis=1)
    return (np.argsort(order, axis=1) < n_contents // 2).astype(np.float64)


def _gains(
    scores: Scores,
    spread: Float64[np.ndarray, "n_positions n_slots"],
    *,
    relevance: Relevance,
    against: Slots,
    weights: tuple[Counts, Counts],
) -> Float64[np.ndarray, "draws"]:
    """Gain on the contents of the second weights of the order made from those of the first; NaN where none is left."""
    made, judged = weights
    shrunk = shrink_to_flat(scores, made)
    kept_first = np.arange(spread.shape[1])[None]
    slots = np.where(shrunk.kept[:, None] > 0, order_by_curve(shrunk.curves @ spread), kept_first)
    sizes = judged.sum(axis=1, keepdims=True)
    means = np.divide(judged @ scores, sizes, out=np.full((len(sizes), scores.shape[1]), np.nan), where=sizes > 0)
    curves = means @ spread
    own = np.take_along_axis(curves, slots, axis=1) @ relevance
    gained: np.ndarray = (own - curves[:, against] @ relevance) / relevance.sum()
    return gained
