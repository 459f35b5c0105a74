"""A curve in three numbers (mean, worst position, spread) with honest intervals, bounds on them, and their changes.

A bound that a pipeline requires is judged at the end of the interval that is safe: `worst>=0.8` is met if the low end
is at least 0.8. The changes that a method makes are judged at these three, and at the formerly best position.

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
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.evaluation.curve import (
    ALPHA,
    SAMPLES_FOR_CLAIM,
    Change,
    PerSample,
    Scores,
    bounds_of,
    complete_samples,
    contrast_of,
    is_binary,
    paired_difference,
    range_of,
)
from posbias.statistics import (
    CONFIDENCE,
    POWER,
    Interval,
    StoredInterval,
    StoredNumber,
    bounded_mean,
    detectable,
    mean_of,
)

GRAMMAR = re.compile(
    r"\s*(?P<what>[a-z_]+)\s*(?P<sign>>=|<=)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)
EFFECTIVE_LENGTH, RECOVERY = "effective_length", "recovery"
LEVELS = ("worst", "mean", "spread")
UNKNOWN = Interval(math.nan, -math.inf, math.inf)
BOUNDED = (*LEVELS, RECOVERY, EFFECTIVE_LENGTH)
"""Numbers that may be required: the worst position, the mean over positions, best minus worst; recovery at its worst
position; and, of an evaluation at several lengths, the longest at which accuracy is high enough."""

Table = Float64[np.ndarray, "rows columns"]


@dataclass(frozen=True)
class Levels:
    """One curve in three numbers, each with the choice of its positions accounted for."""

    mean: StoredInterval
    worst: StoredInterval
    spread: StoredInterval


@final
@dataclass(frozen=True)
class Requirement:
    """A bound on one number of a result, such as `worst>=0.6`: for pipelines."""

    what: str
    """One of BOUNDED."""
    at_least: bool
    number: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """Read a requirement from text: `worst>=0.6`, `mean>=.5`, `spread<=0.2` or `effective_length>=4096`."""
        match = GRAMMAR.fullmatch(text)
        if match is None or match["what"] not in BOUNDED:
            raise UsageError(f"requirement {text!r}: allowed: {', '.join(BOUNDED)}, >= or <=, and a number: worst>=0.6")
        return cls(match["what"], match["sign"] == ">=", float(match["number"]))

    def check_possible(self, *, generated: bool, several_lengths: bool, recovery: bool = False) -> None:
        """Refuse a bound on what no result of an evaluation has, or outside what that can be."""
        allowed = ("worst", EFFECTIVE_LENGTH) if several_lengths else LEVELS
        if self.what == RECOVERY and not recovery:
            raise UsageError(f"require {self}: recovery is measured by evaluate, with recovery=True (--recovery)")
        if self.what not in (*allowed, RECOVERY):
            lengths = "several lengths" if several_lengths else "one length (--lengths 1024,4096 asks for several)"
            raise UsageError(f"require {self}: allowed: {', '.join(allowed)}, with {lengths}")
        least, most, numbers = 0.0, 1.0, "accuracies"
        if self.what == RECOVERY:
            numbers = "recoveries"
        elif not generated:
            numbers = "log-probabilities, as nothing is generated,"
            least, most = (0.0, math.inf) if self.what == "spread" else (-math.inf, 0.0)
        if self.what != EFFECTIVE_LENGTH and not least <= self.number <= most:
            raise UsageError(f"require {self}: {numbers} lie in {least:g} ... {most:g}, and so must the bound")
        if self.what == RECOVERY and not self.at_least:
            raise UsageError(f"require {self}: allowed: recovery>=")

    def check(self, value: Interval, measure: str, *, arm: str = "", withheld: str = "") -> "RequirementCheck":
        """The check of a number: the safe end of its interval must meet it. One that is withheld is not told."""
        met = (value.low >= self.number if self.at_least else value.high <= self.number) and not withheld
        told = UNKNOWN if withheld else value
        low, high = (end if np.isfinite(end) else None for end in (told.low, told.high))
        return RequirementCheck(str(self), met, told.value, low, high, measure, arm, withheld)

    def __str__(self) -> str:
        return f"{self.what}{'>=' if self.at_least else '<='}{self.number:g}"


@dataclass(frozen=True)
class RequirementCheck:
    """A requirement, and the number of a result that it bounds."""

    text: str
    """The requirement as it is spelled."""
    met: bool
    value: StoredNumber
    """The number; NaN if it is not known, as where answers decide nothing."""
    low: float | None
    """Ends of its interval; None: not known."""
    high: float | None
    measure: str
    arm: str = ""
    """The model, the arm of a trial, or where a rule stands."""
    withheld: str = ""
    """Why answers decide nothing, so that it is not met; empty if they decide."""

    @property
    def interval(self) -> Interval:
        """The number with the ends of its interval."""
        return Interval.of_record({"value": self.value, "low": self.low, "high": self.high})


def levels_of(scores: Scores, *, curves: int = 1) -> Levels:
    """Mean, worst position and spread of one curve of `curves` that are judged together, from 6 complete samples on.

    The low end of the worst position needs no correction: it is the lowest of all low ends, and so not above the low
    end of the position that is truly worst. The high end is the lowest of high ends that hold at once. Shares have
    `bounded_mean`: samples that fail at all positions at once are few, and other intervals would claim too much.
    """
    complete = complete_samples(scores)
    comparisons = complete.shape[1] * curves
    least, most = range_of(complete)

    def of(column: Float64[np.ndarray, "n_samples"], confidence: float) -> Interval:
        if least == 0:
            return bounded_mean(column, confidence)
        return mean_of(column).interval(confidence, most=most)

    mean = of(complete.mean(axis=1), CONFIDENCE)
    worst = Interval(
        float(complete.mean(axis=0).min()),
        min(of(column, CONFIDENCE).low for column in complete.T),
        min(of(column, 1 - ALPHA / comparisons).high for column in complete.T),
    )
    gaps = gaps_of(complete)
    if not gaps.shape[1]:
        return Levels(mean, worst, Interval(0.0, 0.0, 0.0))
    # Best minus worst: the low end holds for all pairs at once, the high one for each alone.
    low, _, _ = bounds_of(gaps, complete, ALPHA / gaps.shape[1])
    _, high, _ = bounds_of(gaps, complete, ALPHA)
    ends = max(0.0, float(low.max())), min(_limit(complete), float(high.max()))
    return Levels(mean, worst, Interval(float(gaps.mean(axis=0).max()), *ends))


def gaps_of(scores: Scores) -> Float64[np.ndarray, "n_samples pairs"]:
    """First minus second of all ordered pairs of positions."""
    first, second = np.nonzero(~np.eye(scores.shape[1], dtype=bool))
    return np.asarray(scores[:, first] - scores[:, second])


MEAN, WORST, SPREAD, FORMERLY_BEST = "mean", "worst position", "spread", "formerly best position"
JUDGED = (MEAN, WORST)
"""Endpoints whose rise is a gain; a fall of the formerly best position is harm, too."""
SAMPLES_FOR_MEANS = 16
"""Complete samples below which no change of other scores than right or wrong is judged: of lognormal changes (sigma
1.5) with four methods, 16 samples give a false verdict in 4 % of runs, 12 in 6 % (studies/intervals)."""
LEAST_SCALE = 1.0
"""Smallest size, in units of the scores, of the rare changes that a gain must outweigh: one answer, or one nat."""


UNCHANGED = Change(Interval(0.0, 0.0, 0.0), 1.0)
"""Every log-probability is the same to the last digit, as of a method that leaves prompts of this length alone."""


def samples_needed(scores: Float64[np.ndarray, "..."]) -> int:
    """Complete samples that a verdict takes: 6 if all scores are right or wrong, else 16."""
    return SAMPLES_FOR_CLAIM if is_binary(scores) else SAMPLES_FOR_MEANS


def _limit(scores: Float64[np.ndarray, "..."]) -> float:
    """The largest difference of two such scores: 1 if all lie in 0 ... 1, else none."""
    return 1.0 if range_of(scores)[0] == 0 else math.inf


def changes_of(before: Scores, after: Scores) -> dict[str, Change]:
    """The changes at all endpoints, on the same complete samples without the method and with it."""
    scores, n_positions = np.hstack([before, after]), before.shape[1]
    binary = is_binary(scores)
    if not binary and np.array_equal(before, after):
        return dict.fromkeys((MEAN, WORST, SPREAD, FORMERLY_BEST), UNCHANGED)
    value, low, high, p = _all_pairs(after, before, ALPHA / n_positions)
    whole = change_between(after.mean(axis=1), before.mean(axis=1))
    if binary and n_positions > 1:
        whole = contrast_of(scores, np.repeat([-1.0, 1.0], n_positions) / n_positions)
    worst, spread = _saddle(value, low, high, p, n_positions), _spread_change(before, after)
    rare = [_unseen(worst.value.value, scores, n_positions), _unseen(whole.value.value, scores)]
    if binary:  # McNemar's test is exact: of single positions
        rare = [0.0, rare[1] if n_positions > 1 else 0.0]
    best = int(np.argmax(before.mean(axis=0)))
    fallen = Interval(*(float(table[best, best]) for table in (value, low, high)))
    return {
        MEAN: replace(whole, unseen=rare[1]),
        WORST: replace(worst, unseen=rare[0]),
        SPREAD: replace(spread, unseen=_unseen(spread.value.value, scores, n_positions * (n_positions - 1))),
        FORMERLY_BEST: Change(fallen, min(1.0, n_positions * float(p[best, best]))),
    }


def _all_pairs(after: Scores, before: Scores, alpha: float, reference: float = 0.0) -> tuple[Table, ...]:
    """Every column of `after` less every one of `before`: means, their ends at 1 - alpha, p-values of `reference`."""
    scores, shape = np.hstack([before, after]), (after.shape[1], before.shape[1])
    if is_binary(scores) and not reference:
        pairs = [paired_difference(new, old, alpha) for new in after.T for old in before.T]
        rows = np.array([[pair.value.value, pair.value.low, pair.value.high, pair.p] for pair in pairs]).T
    else:
        gaps, limit = (after[:, :, None] - before[:, None]).reshape(len(before), -1), _limit(scores)
        bounds = bounds_of(gaps, scores, alpha, limits=(-limit, limit), reference=reference)
        rows = np.array([gaps.mean(axis=0), *bounds])
    return tuple(rows.reshape(4, *shape))


def change_between(after: PerSample, before: PerSample, reference: float = 0.0) -> Change:
    """Mean of one number per sample less that of another, tested against a difference of `reference`."""
    scores = np.column_stack([after, before])
    value, low, high, p = (float(t[0, 0]) for t in _all_pairs(after[:, None], before[:, None], ALPHA, reference))
    return Change(Interval(value, low, high), p, 0.0 if is_binary(scores) else _unseen(value, scores))


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
    rise, alpha = min(rise, range_of(scores)[1] - float(before.mean())), ALPHA / tests
    if not rise > 0:
        return None
    variance = float((after - before).mean(axis=1).var(ddof=1))
    if is_binary(scores):  # answers turn where scores rise, also if none did yet
        variance += rise * (1 - rise) / before.shape[1]
    spread, scale = math.sqrt(variance), scale_of(scores)

    def found(count: int) -> bool:
        rare = scale * (alpha ** (-1 / count) - 1) + float(ndtri(POWER)) * spread / math.sqrt(count)
        return 2.0 ** (1 - count) < alpha and max(rare, detectable(spread, count, alpha=alpha)) <= rise

    high = least = samples_needed(scores)
    while not found(high):
        high *= 2
    return rise, bisect_left(range(high), True, lo=least, key=found)


PLANNED = (0.25, 0.5, 0.75, 1.0)
"""Shares of the room between a bound and the best number, at which true numbers are planned for."""
MOST_PLANNED = 100_000
"""Samples; more than any bound takes on accuracies up to .99."""


def planned(require: Requirement, positions: int) -> dict[float, int]:
    """Samples by the true number, from the nearest to a bound on, from which on 80 % of runs or more meet the bound.

    As `levels_of` has it, for right and wrong answers. worst: exact, every position having the true accuracy, on its
    own: P(enough are right)^positions. mean: exact, samples being right at all positions or at none, which varies most.
    spread: by normal quantiles, accuracies being near 1/2, which varies most, and each pair of positions, the true
    spread apart, missing the bound in .2 / pairs of runs: n = ((z[.975] + z[power])^2 / 2) / (bound - true)^2, and
    z[.975]^2 / 2 more as the error is estimated.

    Raises:
        UsageError: a bound that no number of samples meets, or in the other direction.
    """
    from scipy.special import ndtri
    from scipy.stats import binom

    spread, bound = require.what == "spread", require.number
    if require.what not in LEVELS or require.at_least == spread or not 0.01 <= bound <= 0.99:
        raise UsageError(f"plan {require}: allowed: worst>=, mean>= or spread<=, and a number in 0.01 ... 0.99")
    found, together = {}, positions if require.what == "worst" else 1
    for share in PLANNED:
        if spread:
            pairs = math.comb(positions, 2) * (2 if share == 1 else 1)  # alike, either may come out higher
            critical, margin = ndtri(1 - ALPHA / 2), ndtri(1 - (1 - POWER) / pairs)
            samples = math.ceil((critical + margin) ** 2 / 2 / (bound * share) ** 2 + critical**2 / 2)
            found[bound * (1 - share)] = max(SAMPLES_FOR_CLAIM, samples)
        else:
            true, counts = bound + (1 - bound) * share, np.arange(SAMPLES_FOR_CLAIM, MOST_PLANNED)
            least = binom.isf(ALPHA / 2, counts, bound)  # more must be right for their interval to begin at the bound
            failing = counts[binom.sf(least, counts, true) ** together < POWER]
            found[true] = int(failing.max(initial=SAMPLES_FOR_CLAIM - 1)) + 1
    return found


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
