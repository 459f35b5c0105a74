"""`place`: the order of retrieved passages that a model with a measured curve is expected to use best.

A passage of relevance s in slot j is used with s c_j, c the curve; the sum is largest when passages and slots are
sorted alike (rearrangement inequality). The curve is shrunk towards flat by what the samples leave undecided; where
they do not show that positions differ at all, best-first is kept. What an order is worth is judged on samples that it
was not made from.

An order is an array of slots: the r-th most relevant passage stands in `slots[r]`. The gain of one order over another
is the difference of sum_r s_r c_slots[r] / sum_r s_r, in units of the score: with relevances proportional to the chance
of holding the answer, the difference in expected accuracy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import check_seed, checked
from posbias.errors import UsageError
from posbias.evaluation.curve import Scores, complete_samples, shape_of
from posbias.limits import CELLS
from posbias.statistics import DRAWS, Interval, halves, mean_of, percentile_interval, resample_counts

FLAT_LEVEL = 0.05
"""A curve counts as flat unless its F-test against flat reaches this."""
HALVINGS = 200
"""Random halvings behind the held-out estimate; its own scatter is then far below its interval."""
SAMPLES_TO_CONFIRM = 12
"""Samples below which halves are too small (6 each) for the held-out gain to support a claim."""

Slots = Int64[np.ndarray, "n_slots"]
Relevance = Float64[np.ndarray, "n_slots"]
Counts = Float64[np.ndarray, "_ _"]
"""How often each sample counts, one row per draw."""

REFERENCES: dict[str, Callable[[int], Slots]] = {
    "best_first": np.arange,
    "best_last": lambda n_slots: np.arange(n_slots)[::-1].copy(),
    "alternating": lambda n_slots: np.where(
        np.arange(n_slots) % 2 == 0, np.arange(n_slots) // 2, n_slots - 1 - np.arange(n_slots) // 2
    ),
}
"""The usual orders, which need no curve: what most pipelines do; most relevant last, next to the question; first, last,
second, last but one ..., with the least relevant passages in the middle."""


@checked
@dataclass(frozen=True, eq=False)
class MeasuredUse:
    """What a run measured of one model: how often an item is used, by where it stands."""

    scores: Scores
    """score[sample, position]: 1 right, 0 wrong, or a probability; NaN where skipped."""
    positions: tuple[int, ...]
    """Of each column among the items, ascending."""
    n_items: int
    """Items in each context, >= 1."""
    measure: str = "accuracy"

    def __post_init__(self) -> None:
        ascending = list(self.positions) == sorted(set(self.positions))
        if len(self.positions) != self.scores.shape[1] or not ascending or not self.positions:
            raise UsageError(
                f"positions must ascend, one for each of {self.scores.shape[1]} columns, got {list(self.positions)}"
            )
        if self.positions[0] < 0 or self.positions[-1] >= self.n_items:
            raise UsageError(f"positions must lie in 0 ... {self.n_items - 1}, got {list(self.positions)}")


@dataclass(frozen=True)
class Gain:
    """The chosen order against a usual one."""

    over: str
    """The usual order: a key of `REFERENCES`."""
    gain: Interval
    """Of the chosen order; exactly 0, without an interval, where both orders are the same."""
    held_out: bool
    """Whether the order was made from the curve, and is judged by halves: made on one half of the samples, judged on
    the other, averaged over halvings. An order that rests on no curve is judged on all samples."""
    order: tuple[int, ...]
    """The usual order itself: indices of the passages, first slot to last."""
    n_samples: int

    @property
    def raises(self) -> bool:
        """Whether samples that had no part in the choice show that the chosen order is better."""
        return self.n_samples >= SAMPLES_TO_CONFIRM and self.gain.known and self.gain.low > 0


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
    """p-value against a flat curve, of an F-test that any differences may raise; above 0.05 nothing is kept and
    best-first is the order."""
    p_shape: float
    """p-value of `evaluate` on the same samples, which looks for a trend and a bend alone: smaller where there is one,
    larger where places differ otherwise."""
    gains: tuple[Gain, ...]
    """Over each of `REFERENCES`."""
    n_samples: int
    """Complete samples behind the curve."""
    interpolated: bool
    """Whether the slots differ from the positions that were measured."""
    measure: str

    @property
    def decided(self) -> bool:
        """Whether the samples show that positions differ, so that the order rests on the curve."""
        return self.kept > 0

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            **vars(self),
            "order": list(self.order),
            "curve": self.curve.tolist(),
            "decided": self.decided,
            "gains": [
                {
                    "over": gain.over,
                    "gain": gain.gain.as_record(),
                    "held_out": gain.held_out,
                    "order": list(gain.order),
                    "raises": gain.raises,
                }
                for gain in self.gains
            ],
        }


@checked
def place(relevance: Sequence[Any], use: MeasuredUse, *, seed: int = 0) -> Placement:
    """Order passages so that the relevant ones stand where this model uses them.

    Maximises sum_i s_i c_slot(i) / sum_i s_i: where the relevances are proportional to the chance that passage i holds
    the answer, this is the expected score of the model. Passages equally relevant keep their order.

    Args:
        relevance: One value per passage, finite, >= 0, not all zero.
        use: The measured curve: `measured_use(run)`, best of a run on one's own questions with as many passages as are
            to be ordered, `evaluate("documents(documents=20, file='passages.jsonl')", ...)`, of at least 12 questions
            for a gain to be claimed.
        seed: Of resamples and halves, >= 0.

    Raises:
        UsageError: no relevance, a negative or infinite one, fewer than 6 complete samples, or a single position.
    """
    check_seed(seed)
    weights = _checked(relevance)
    CELLS.check("passages x resamples", len(weights) * DRAWS)
    complete = complete_samples(use.scores, "placing")
    spread = slot_weights(use.positions, n_items=use.n_items, n_slots=len(weights))
    shrunk = shrink_to_flat(complete, np.ones((1, len(complete))))
    curve, decided = shrunk.curves[0] @ spread, bool(shrunk.kept[0] > 0)
    slots = order_by_curve(curve[None])[0] if decided else np.arange(len(weights))
    ranks = np.argsort(-weights, kind="stable")
    gains = []
    for name, reference in REFERENCES.items():
        against = reference(len(weights))
        if np.array_equal(slots, against):
            gain = Interval(0.0, 0.0, 0.0)
        elif decided:
            gain = held_out_gain(complete, spread, relevance=weights[ranks], against=against, seed=seed)
        else:
            in_slots, falling = complete @ spread, weights[ranks]
            gain = mean_of((in_slots[:, slots] - in_slots[:, against]) @ (falling / falling.sum())).interval()
        gains.append(Gain(name, gain, decided, _arranged(ranks, against), len(complete)))
    return Placement(
        order=_arranged(ranks, slots),
        curve=curve,
        kept=float(shrunk.kept[0]),
        p_flat=float(shrunk.p_flat[0]),
        p_shape=shape_of(complete, positions=np.array(use.positions, dtype=np.float64)).p_flat,
        gains=tuple(gains),
        n_samples=len(complete),
        interpolated=tuple(use.positions) != tuple(range(len(weights))) or use.n_items != len(weights),
        measure=use.measure,
    )


def _arranged(ranks: Slots, slots: Slots) -> tuple[int, ...]:
    """Passages from the first slot to the last, where the r-th most relevant one stands in `slots[r]`."""
    order = np.empty(len(ranks), dtype=np.int64)
    order[slots] = ranks
    return tuple(int(index) for index in order)


def _checked(relevance: Sequence[Any]) -> Relevance:
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


def order_by_curve(curves: Float64[np.ndarray, "draws n_slots"]) -> Int64[np.ndarray, "draws n_slots"]:
    """For every curve the slots from the best to the worst; equal slots from the front.

    Sum_r s_r c_slots[r] with s falling is then largest among all orders (rearrangement inequality; Hardy, Littlewood
    and Polya 1934, theorem 368).
    """
    return np.argsort(-curves, axis=1, kind="stable")


def slot_weights(positions: Sequence[int], *, n_items: int, n_slots: int) -> Float64[np.ndarray, "n_positions n_slots"]:
    """Matrix that carries a curve over measured positions to slots, linearly between relative positions j / (n - 1).

    Slots before the first or after the last measured position take its value. Columns sum to 1; the identity where all
    positions of as many items were measured. One slot alone stands at relative position 0.
    """
    measured = np.array(positions, dtype=np.float64) / max(n_items - 1, 1)
    wanted = np.arange(n_slots) / max(n_slots - 1, 1)
    return np.stack([np.interp(wanted, measured, row) for row in np.eye(len(measured))])


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Curves of many resamples, each shrunk by its own noise."""

    curves: Float64[np.ndarray, "draws n_positions"]
    kept: Float64[np.ndarray, "draws"]
    """Share of the differences kept, 0 where they do not stand out."""
    p_flat: Float64[np.ndarray, "draws"]


def shrink_to_flat(scores: Scores, weights: Float64[np.ndarray, "draws n_samples"]) -> Shrunk:
    """Mean curves, their differences multiplied by 1 - 1/F; exactly flat unless F is significant at 5 %.

    F is that of a two-way layout without replication (samples times positions): spread between positions over what
    samples and positions leave unexplained. 1 - 1/F is the share of that spread that is not noise.

    `scores` without NaN, of at least 2 positions; `weights` say how often each sample counts in each resample, of which
    one with fewer than 2 samples is flat.

    Source: Morris 1983, "Parametric empirical Bayes inference", with the moment estimate of the signal; that a curve
    that is not significant is flat is our own, stricter rule.
    """
    from scipy.special import fdtrc

    n_positions = scores.shape[1]
    centred = scores - scores.mean(axis=1, keepdims=True)
    sizes = weights.sum(axis=1)
    safe = np.maximum(sizes, 1.0)
    means = weights @ scores / safe[:, None]
    deviations = weights @ centred / safe[:, None]
    between = safe * np.square(deviations).sum(axis=1) / (n_positions - 1)
    residual = (weights @ np.square(centred)).sum(axis=1) - safe * np.square(deviations).sum(axis=1)
    degrees = np.maximum(sizes - 1, 1) * (n_positions - 1)
    rounding = np.finfo(np.float64).eps * (1 + np.square(scores).sum())
    noise = np.where(residual > rounding, residual, 0.0) / degrees
    ratio = np.divide(between, noise, out=np.where(between > rounding, np.inf, 0.0), where=noise > 0)
    p_flat = np.where(np.isinf(ratio), 0.0, fdtrc(n_positions - 1, degrees, np.where(np.isinf(ratio), 0.0, ratio)))
    p_flat = np.where(sizes < 2, 1.0, p_flat)
    kept = np.where(p_flat <= FLAT_LEVEL, 1 - 1 / np.maximum(ratio, 1.0), 0.0)
    level = means.mean(axis=1, keepdims=True)
    return Shrunk(level + kept[:, None] * deviations, kept, p_flat)


def held_out_gain(
    scores: Scores,
    spread: Float64[np.ndarray, "n_positions n_slots"],
    *,
    relevance: Relevance,
    against: Slots,
    seed: int,
) -> Interval:
    """Gain of "sort by the curve of one half" on the other half, both ways, averaged over random halvings.

    The whole procedure, shrinking and its retreat to best-first included, is repeated on resampled samples; copies of
    one sample stay in one half, so nothing is judged on what it was made from. By simulation its interval holds the
    gain of the order that all samples give, too (in 91 to 100 of 100 cases); the same samples' own estimate of that
    gain, optimistic by what the choice owes to luck, had coverages of .54 to .81 and is not given.

    `scores` without NaN, of at least 2 samples; `spread` as of `slot_weights`; `relevance` falling.
    """
    n_samples = len(scores)
    generator = np.random.default_rng(seed)

    def gains(made: Counts, judged: Counts) -> Float64[np.ndarray, "_"]:
        """Gain on the samples of the second counts of the order made from the first; NaN where none is left."""
        shrunk = shrink_to_flat(scores, made)
        best_first = np.arange(spread.shape[1])[None]
        slots = np.where(shrunk.kept[:, None] > 0, order_by_curve(shrunk.curves @ spread), best_first)
        sizes = judged.sum(axis=1, keepdims=True)
        means = np.divide(judged @ scores, sizes, out=np.full((len(sizes), scores.shape[1]), np.nan), where=sizes > 0)
        curves = means @ spread
        own = np.take_along_axis(curves, slots, axis=1) @ relevance
        return np.asarray((own - curves[:, against] @ relevance) / relevance.sum())

    def both_ways(first: Counts, counts: Counts) -> Float64[np.ndarray, "_"]:
        one, other = counts * first, counts * (1 - first)
        return np.asarray(np.mean([gains(one, other), gains(other, one)], axis=0))

    point = both_ways(halves(n_samples, generator=generator, draws=HALVINGS), np.ones((1, n_samples)))
    counts = resample_counts(n_samples, generator=generator, draws=DRAWS)
    drawn = both_ways(halves(n_samples, generator=generator, draws=DRAWS), counts)
    return percentile_interval(float(np.nanmean(point)), drawn, n_samples)
