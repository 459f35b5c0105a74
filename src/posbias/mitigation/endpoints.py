"""What a method changes at four endpoints, from paired scores: mean, worst position, spread, formerly best position.

The worst position is chosen by the same scores that judge it, and a method may move it. Its change

    min_p after_p - min_q before_q = min_p max_q (after_p - before_q)

is therefore bounded by the same minimum and maximum over the ends of the intervals of all P x P paired differences,
each at 1 - .05 / P: whichever positions are truly worst, one of them is corrected for and the other needs no
correction. In simulation such an interval misses in at most 5 % of runs whatever the curves; with the choice made on
other samples (ten folds) it would miss in up to 30 % where positions are nearly alike, with a bootstrap that repeats
the choice in up to 52 % (docs/mitigation.md). Spread and formerly best position are bounded alike.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posbias.evaluation.curve import Contrast, Scores, contrast_of, is_binary, paired_difference
from posbias.statistics import CONFIDENCE, Interval, estimate

MEAN, WORST, SPREAD, FORMERLY_BEST = "mean", "worst position", "spread", "formerly best position"
JUDGED = (MEAN, WORST)
"""Endpoints whose rise is a gain; a fall of the formerly best position is harm, too."""
ALPHA = 1 - CONFIDENCE
SCIENTIFIC = 12
"""Decimals from which a number is written as a power of ten."""

Table = Float64[np.ndarray, "rows columns"]
Gaps = Float64[np.ndarray, "n_samples pairs"]
PerPair = Float64[np.ndarray, "pairs"]


@dataclass(frozen=True)
class Change:
    """What a method changes, paired over samples."""

    value: Interval
    """After minus before; the interval leaves out 0 exactly where `p` is below 5 %."""
    p: float
    """Two-sided, of no change, with the choice of positions paid for, not yet the number of methods."""
    detectable: float | None = None
    """Smallest true rise that is found with at least 80 % power after all corrections, were this the only one
    (`power.py`); infinite where none is; None where no sample changed, or it is not tested."""
    needed: tuple[float, int] | None = None
    """A rise, and about how many samples find it with that power; None as for `detectable`."""

    def towards(self, sign: int) -> float:
        """The p-value where the change goes in this direction, else 1."""
        return self.p if sign * self.value.value > 0 else 1.0


UNCHANGED = Change(Interval(0.0, 0.0, 0.0), 1.0)
"""Every log-probability is the same to the last digit, as of a method that leaves prompts of this length alone."""


def change_text(value: Interval, sign: str = "", *, least: int = 3, unit: str = "") -> str:
    """A change with its ends, such as `+0.120 [0.040, 0.200]`, in as many decimals as tell it from no change.

    No end reads as 0 that is not where the interval leaves out 0, and else not the one farther from 0.
    """
    numbers = (value.low, value.high) if value.known else (value.value,)
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    told = (min if value.excludes(0.0) else max)(sizes, default=1.0)
    digits = max(least, math.ceil(-math.log10(told)))
    return value.text(f"{sign}.{digits}f" if digits < SCIENTIFIC else f"{sign}.1e", unit=unit)


def changes_of(before: Scores, after: Scores) -> dict[str, Change]:
    """All endpoints, of the same complete samples without the method and with it."""
    if np.array_equal(before, after) and not is_binary(np.hstack([before, after])):
        return dict.fromkeys((MEAN, WORST, SPREAD, FORMERLY_BEST), UNCHANGED)
    n_positions = before.shape[1]
    weights = np.repeat([1.0, -1.0], n_positions) / n_positions
    single = n_positions == 1
    whole = paired_difference(after[:, 0], before[:, 0]) if single else contrast_of(np.hstack([after, before]), weights)
    joint = ALPHA / n_positions
    pairs = [[paired_difference(new, old, joint) for old in before.T] for new in after.T]
    value, low, high, p = np.moveaxis(np.array([[_numbers(each) for each in row] for row in pairs]), 2, 0)
    best = int(np.argmax(before.mean(axis=0)))
    fallen = pairs[best][best]
    return {
        MEAN: Change(whole.value, whole.p),
        WORST: _saddle(value, low, high, p, n_positions),
        SPREAD: _spread_change(before, after),
        FORMERLY_BEST: Change(fallen.value, min(1.0, n_positions * fallen.p)),
    }


def _numbers(tested: Contrast) -> tuple[float, float, float, float]:
    """Estimate, ends and p-value."""
    return tested.value.value, tested.value.low, tested.value.high, tested.p


def _saddle(value: Table, low: Table, high: Table, p: Table, comparisons: int) -> Change:
    """Minimum over rows of the maximum over columns: bounds by those of the ends, p-values by those of the tests.

    It is above 0 where every row has a column above 0, below 0 where some row lies below 0 in every column. Ends and
    p-values are those of single differences, the ends at 1 - .05 / comparisons.
    """
    rising = np.where(value > 0, p, 1.0).min(axis=1).max()
    falling = np.where(value < 0, p, 1.0).max(axis=1).min()
    ends = (float(ends.max(axis=1).min()) for ends in (low, high))
    return Change(Interval(float(value.max(axis=1).min()), *ends), min(1.0, comparisons * float(min(rising, falling))))


def gaps_of(scores: Scores) -> Gaps:
    """First minus second of all ordered pairs of positions."""
    first, second = np.nonzero(~np.eye(scores.shape[1], dtype=bool))
    return np.asarray(scores[:, first] - scores[:, second])


def tested(values: Gaps, binary: bool, alpha: float) -> tuple[PerPair, PerPair, PerPair]:
    """Ends and two-sided p-values of the means of columns, made of scores of 0 and 1 where `binary`."""
    found = estimate(values.mean(axis=0), values, scale=float(np.abs(values).max(initial=0.0)))
    if binary:  # one sample is taken to differ, as in every contrast of such scores
        least = 1 / len(values)
        small = found.error < least
        found = replace(found, error=np.where(small, least, found.error), skewness=np.where(small, 0.0, found.skewness))
    low, high = found.ends(1 - alpha)
    return low, high, np.asarray(found.p())


def _spread_change(before: Scores, after: Scores) -> Change:
    """Best minus worst after, less the same before: a maximum over pairs of a minimum over pairs."""
    old, new = gaps_of(before), gaps_of(after)
    comparisons, binary = old.shape[1], is_binary(np.hstack([before, after]))
    if not comparisons:
        return Change(Interval(0.0, 0.0, 0.0), 1.0)
    rows = [(old - column[:, None], *tested(old - column[:, None], binary, ALPHA / comparisons)) for column in new.T]
    value, low, high, p = (np.stack(part) for part in zip(*((v.mean(axis=0), *rest) for v, *rest in rows), strict=True))
    shrunk = _saddle(value, low, high, p, comparisons)  # of before minus after
    return Change(Interval(-shrunk.value.value, -shrunk.value.high, -shrunk.value.low), shrunk.p)
