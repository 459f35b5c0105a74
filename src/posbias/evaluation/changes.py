"""The changes that a method makes at four endpoints: mean, worst position, spread, formerly best position.

The worst position is chosen by the same scores that judge it, and a method may move it. Its change

    min_p after_p - min_q before_q = min_p max_q (after_p - before_q)

is therefore bounded by the same minimum and maximum over the ends of the intervals of all P x P paired differences,
each at 1 - .05 / P: whichever positions are truly worst, one of them is corrected for and the other needs no
correction. In simulation such an interval misses in at most 5 % of runs whatever the curves; with the choice made on
other samples (ten folds) it would miss in up to 30 % if positions are nearly alike, with a bootstrap that repeats
the choice in up to 52 % (docs/mitigate.md). Spread and formerly best position are bounded alike.

Few samples of a skewed change mostly lack the rare large ones that balance the others, and look like a sure change. So
estimates of other scores than right or wrong are cautious about skewness, and need more samples (docs/intervals.md).
Large ones that are in no sample no test can see: of losses in one sample of twenty, 40 samples lack all in 13 % of
runs. So a change has a second p-value, `unseen`, of a rare opposite change that would undo it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posbias.evaluation.curve import (
    SAMPLES_FOR_CLAIM,
    Contrast,
    Scores,
    are_shares,
    contrast_of,
    is_binary,
    paired_difference,
)
from posbias.evaluation.requirements import ALPHA, bounds_of, gaps_of
from posbias.statistics import POWER, Interval, StoredInterval, detectable

MEAN, WORST, SPREAD, FORMERLY_BEST = "mean", "worst position", "spread", "formerly best position"
JUDGED = (MEAN, WORST)
"""Endpoints whose rise is a gain; a fall of the formerly best position is harm, too."""
SAMPLES_FOR_MEANS = 16
"""Complete samples below which no change of other scores than right or wrong is judged: of lognormal changes (sigma
1.5) with four methods, 16 samples give a false verdict in 4 % of runs, 12 in 6 % (studies/intervals)."""
LEAST_SCALE = 1.0
"""Smallest size, in units of the scores, of the rare changes that a gain must outweigh: one answer, or one nat."""
SCIENTIFIC = 12
"""Decimals from which a number is written as a power of ten."""

Table = Float64[np.ndarray, "rows columns"]
PerSample = Float64[np.ndarray, "n_samples"]


@dataclass(frozen=True)
class Change:
    """The change that a method makes, paired over samples."""

    value: StoredInterval
    """After minus before; the interval leaves out 0 exactly if `p` is below 5 %."""
    p: float
    """p-value, two-sided, of no change, with the choice of positions paid for, not yet the number of methods."""
    unseen: float = 0.0
    """p-value of rare changes the other way that would undo this one and are in no sample; 0 if `p` is exact."""
    needed: tuple[float, int] | None = None
    """A rise, and about how many samples find it with 80 % power; None if no sample changed, or it is not tested."""

    def towards(self, sign: int) -> float:
        """The p-value if the change goes in this direction, else 1."""
        return self.p if sign * self.value.value > 0 else 1.0

    def confirmed(self) -> "Change":
        """The change with both p-values in one, and the interval extended to 0 unless both are below 5 %."""
        value = self.value if max(self.p, self.unseen) < ALPHA else self.value.including(0.0)
        return replace(self, value=value, p=max(self.p, self.unseen), unseen=0.0)


UNCHANGED = Change(Interval(0.0, 0.0, 0.0), 1.0)
"""Every log-probability is the same to the last digit, as of a method that leaves prompts of this length alone."""


def change_text(value: Interval, sign: str = "", *, least: int = 3, unit: str = "") -> str:
    """A change with its ends, such as `+0.120 [0.040, 0.200]`, in as many decimals as tell it from no change.

    If the interval leaves out 0, no end that is not 0 reads as 0; else the end farther from 0 does not.
    """
    numbers = (value.low, value.high) if value.known else (value.value,)
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    smallest = (min if value.excludes(0.0) else max)(sizes, default=1.0)
    digits = max(least, math.ceil(-math.log10(smallest)))
    return value.text(f"{sign}.{digits}f" if digits < SCIENTIFIC else f"{sign}.1e", unit=unit)


def samples_needed(scores: Float64[np.ndarray, "..."]) -> int:
    """Complete samples that a verdict takes: 6 if all scores are right or wrong, else 16."""
    return SAMPLES_FOR_CLAIM if is_binary(scores) else SAMPLES_FOR_MEANS


def _limit(scores: Float64[np.ndarray, "..."]) -> float:
    """The largest difference of two such scores: 1 if all lie in 0 ... 1, else none."""
    return 1.0 if are_shares(scores) else math.inf


def changes_of(before: Scores, after: Scores) -> dict[str, Change]:
    """The changes at all endpoints, on the same complete samples without the method and with it."""
    scores, n_positions = np.hstack([before, after]), before.shape[1]
    joint = ALPHA / n_positions
    if is_binary(scores):
        pairs = [[_numbers(paired_difference(new, old, joint)) for old in before.T] for new in after.T]
        value, low, high, p = np.moveaxis(np.array(pairs), 2, 0)
        weights = np.repeat([-1.0, 1.0], n_positions) / n_positions
        whole = change_between(after[:, 0], before[:, 0]) if n_positions == 1 else contrast_of(scores, weights)
    elif np.array_equal(before, after):
        return dict.fromkeys((MEAN, WORST, SPREAD, FORMERLY_BEST), UNCHANGED)
    else:
        gaps = (after[:, :, None] - before[:, None]).reshape(len(before), -1)
        bounds = gaps.mean(axis=0), *bounds_of(gaps, scores, joint, limit=_limit(scores))
        value, low, high, p = (part.reshape(n_positions, n_positions) for part in bounds)
        whole = change_between(after.mean(axis=1), before.mean(axis=1))
    worst, spread = _saddle(value, low, high, p, n_positions), _spread_change(before, after)
    rare = [_unseen(worst.value.value, scores, n_positions), _unseen(whole.value.value, scores)]
    if is_binary(scores):  # McNemar's test is exact: of single positions
        rare = [0.0, rare[1] if n_positions > 1 else 0.0]
    best = int(np.argmax(before.mean(axis=0)))
    fallen = Interval(*(float(table[best, best]) for table in (value, low, high)))
    return {
        MEAN: Change(whole.value, whole.p, rare[1]),
        WORST: replace(worst, unseen=rare[0]),
        SPREAD: replace(spread, unseen=_unseen(spread.value.value, scores, n_positions * (n_positions - 1))),
        FORMERLY_BEST: Change(fallen, min(1.0, n_positions * float(p[best, best]))),
    }


def change_between(after: PerSample, before: PerSample, reference: float = 0.0) -> Contrast:
    """Mean of one number per sample less that of another, tested against a difference of `reference`."""
    scores = np.column_stack([after, before])
    if is_binary(scores) and not reference:
        return paired_difference(after, before)
    values = (after - before)[:, None]
    low, high, p = bounds_of(values, scores, ALPHA, limit=_limit(scores), reference=reference)
    return Contrast(Interval(float(values.mean()), float(low[0]), float(high[0])), float(p[0]))


def confirmed_between(after: PerSample, before: PerSample) -> Contrast:
    """`change_between`, 0 left out only if no rare changes that are in no sample could be the reason."""
    found, scores = change_between(after, before), np.column_stack([after, before])
    unseen = 0.0 if is_binary(scores) else _unseen(found.value.value, scores)
    whole = Change(found.value, found.p, unseen).confirmed()
    return Contrast(whole.value, whole.p)


def scale_of(scores: Float64[np.ndarray, "..."]) -> float:
    """How much a sample may lose, unseen: 1 if all scores lie in 0 ... 1, else two standard deviations or 1."""
    return min(_limit(scores), max(LEAST_SCALE, 2 * float(scores.std())))


def _unseen(change: float, scores: Float64[np.ndarray, "n_samples _"], comparisons: int = 1) -> float:
    """p-value of a change that is all but undone by rare ones the other way, of the size `scale_of`, none of them seen.

    They undo a change of d if a share q of all samples changes by s the other way, (1 - q) d = q s; and n samples hold
    none of these in (1 - q)^n = (1 + d / s)^-n of runs.
    """
    return min(1.0, comparisons * (1 + abs(change) / scale_of(scores)) ** -len(scores))


def samples_for(before: Scores, after: Scores, rise: float, tests: int) -> tuple[float, int] | None:
    """A rise of the mean, and about how many samples find it with 80 % power, by both p-values.

    Args:
        before: score[sample, position] without the method, no NaN, at least 2 samples.
        after: The same with it.
        rise: > 0, in units of the scores; if these have less room to their limit, that room.
        tests: Number of tests in the family of rises.

    Returns:
        The rise, and samples, as many at least as a verdict takes; None if there is no room.
    """
    from scipy.special import ndtri

    scores = np.hstack([before, after])
    most = 1.0 if _limit(scores) == 1 else 0.0 if scores.max() <= 0 else math.inf
    rise, alpha = min(rise, most - float(before.mean())), ALPHA / tests
    if not rise > 0:
        return None
    variance = float((after - before).mean(axis=1).var(ddof=1))
    if is_binary(scores):  # answers turn where scores rise, also if none did yet
        variance += rise * (1 - rise) / before.shape[1]
    spread, scale = math.sqrt(variance), scale_of(scores)

    def found(count: int) -> bool:
        rare = scale * (alpha ** (-1 / count) - 1) + float(ndtri(POWER)) * spread / math.sqrt(count)
        return 2.0 ** (1 - count) < alpha and max(rare, detectable(spread, count, alpha=alpha)) <= rise

    low = samples_needed(scores) - 1
    high = low + 1
    while not found(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return rise, high


def _numbers(compared: Contrast) -> tuple[float, float, float, float]:
    """Estimate, ends and p-value."""
    return compared.value.value, compared.value.low, compared.value.high, compared.p


def _saddle(value: Table, low: Table, high: Table, p: Table, comparisons: int) -> Change:
    """Minimum over rows of the maximum over columns: bounds by those of the ends, p-values by those of the tests.

    It is above 0 if every row has a column above 0, below 0 if some row lies below 0 in every column. Ends and
    p-values are those of single differences, the ends at 1 - .05 / comparisons.
    """
    rising = np.where(value > 0, p, 1.0).min(axis=1).max()
    falling = np.where(value < 0, p, 1.0).max(axis=1).min()
    ends = (float(ends.max(axis=1).min()) for ends in (low, high))
    return Change(Interval(float(value.max(axis=1).min()), *ends), min(1.0, comparisons * float(min(rising, falling))))


def _spread_change(before: Scores, after: Scores) -> Change:
    """Best minus worst after, less the same before: a maximum over pairs of a minimum over pairs."""
    old, new, scores = gaps_of(before), gaps_of(after), np.hstack([before, after])
    comparisons = old.shape[1]
    if not comparisons:
        return Change(Interval(0.0, 0.0, 0.0), 1.0)
    columns = [old - column[:, None] for column in new.T]
    rows = [(differences.mean(axis=0), *bounds_of(differences, scores, ALPHA / comparisons)) for differences in columns]
    value, low, high, p = (np.stack(part) for part in zip(*rows, strict=True))
    shrunk = _saddle(value, low, high, p, comparisons)  # of before minus after
    return Change(Interval(-shrunk.value.value, -shrunk.value.high, -shrunk.value.low), shrunk.p)
