"""Scores by position, with paired statistics: every position against the best, the shape of the curve, what is lost in
the middle. The samples are the independent units, every one put at all positions.

Input is always score[sample, position], such as 1 and 0 for right and wrong, or log-probabilities; NaN if an
example was skipped. Means use every score there is; comparisons use the samples that have a score at all positions.
Scores that all lie in 0 ... 1 are taken for shares: neither they nor their differences leave that range. Others none of
which is above 0 are taken for log-probabilities, whose means are not, either.

Two questions about the shape, in this order, without a model of the curve. Is it flat: linear and quadratic orthogonal
contrasts, corrected by Holm. If not, is it a U: both ends above the middle, each tested on its own; a monotone curve
cannot satisfy both, whatever its form.
"""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.results.figures import MEASURED, Curve
from posbias.results.showing import Showing, Shown
from posbias.statistics import (
    CONFIDENCE,
    POWER,
    Estimate,
    Interval,
    StoredInterval,
    StoredNumber,
    estimate,
    holm,
    mean_of,
    paired_shares,
    wilson,
)

ALPHA = 1 - CONFIDENCE
SAMPLES_FOR_CLAIM = 6
"""Complete samples below which nothing is compared: with fewer, even samples that all agree do not reach 5 %."""
AGREEMENT = 1e-9
"""Relative differences between samples that count as none, far above rounding."""
END_SHARE = 5
"""An end is one fifth of the positions, rounded down, at least one; the middle is all between the two ends."""
DECIDING = 0.05
"""Difference of scores for which the samples that would find it are counted if the observed one is smaller."""
SHAPES = {
    "u": "a U: both ends are above the middle",
    "inverted_u": "an inverted U: both ends are below the middle",
    "rising": "a rise from first to last position; no U is established",
    "falling": "a fall from first to last position; no U is established",
    "unclear": "not flat, but neither a U nor a trend is established",
    "flat": "no dependence on the position is established",
}
"""Labels of shapes, in words. `rising` and `falling` do not say that every step goes that way; `flat` says that nothing
is established, so read it beside how many samples would decide."""

Scores = Float64[np.ndarray, "n_samples n_positions"]
Independent = Float64[np.ndarray, "n_independent n_positions"]
"""Scores of samples that are independent of one another; clusters of others are averaged to one row."""
PerSample = Float64[np.ndarray, "n_samples"]
Weights = Float64[np.ndarray, "n_positions"]
Sums = Float64[np.ndarray, "n_samples *sums"]
PerSum = Float64[np.ndarray, "*sums"]


PAIR = np.array([1.0, -1.0])
"""Weights of a difference of two scores."""
CLUSTER = "cluster"
"""Name of the table that tells which samples are not independent: they share a number."""


def independent(
    table: Float64[np.ndarray, "n_samples _"], tables: Mapping[str, Scores]
) -> Float64[np.ndarray, "n_independent _"]:
    """A table with the mean of every cluster of samples in a row of its own; the table itself if there are none."""
    if CLUSTER not in tables:
        return table
    _, first, members = np.unique(tables[CLUSTER][:, 0], return_index=True, return_inverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing is NaN
        return np.stack([np.nanmean(table[members == cluster], axis=0) for cluster in np.argsort(first)])


def change_text(value: Interval, *, least: int = 3, unit: str = "") -> str:
    """A change with its ends, such as `+0.120 [0.040, 0.200]`, in as many decimals as tell it from no change.

    If the interval leaves out 0, no end that is not 0 reads as 0; else the end farther from 0 does not.
    """
    numbers = (value.low, value.high) if value.known else (value.value,)
    sizes = [abs(number) for number in numbers if math.isfinite(number) and number]
    smallest = (min if value.excludes(0.0) else max)(sizes, default=1.0)
    digits = max(least, math.ceil(-math.log10(smallest)))
    return value.text(f"+.{digits}f" if digits < 12 else "+.1e", unit=unit)


@dataclass(frozen=True)
class Change:
    """A mean over samples of a weighted sum of scores, tested: of a difference, or of what a method changes."""

    value: StoredInterval
    """In units of the score, after minus before; it leaves out 0 exactly if `p` is below 1 - its confidence."""
    p: float
    """Two-sided p-value of no change, with the choice of positions paid for, not yet the number of methods; of n
    samples that all agree 2^(1-n), what so many could show at most."""
    unseen: float = 0.0
    """p-value of rare changes the other way that would undo this one and are in no sample; 0 if `p` is exact."""
    needed: tuple[float, int] | None = None
    """A rise, and about how many samples find it with 80 % power; None if no sample changed, or it is not tested."""

    def towards(self, sign: int) -> float:
        """The p-value if the change goes in this direction, else 1."""
        return self.p if sign * self.value.value > 0 else 1.0

    def __str__(self) -> str:
        return change_text(self.value)

    def confirmed(self) -> "Change":
        """The change with both p-values in one, and the interval extended to 0 unless both are below 5 %."""
        value = self.value if max(self.p, self.unseen) < ALPHA else self.value.including(0.0)
        return replace(self, value=value, p=max(self.p, self.unseen), unseen=0.0)

    def p_one_sided(self, sign: int) -> float:
        """One-sided p-value for a value above (1) or below (-1) 0."""
        return self.p / 2 if sign * self.value.value > 0 else 1 - self.p / 2


@dataclass(frozen=True)
class Difference:
    """One position against the best one, on the same samples."""

    position: int
    """Index of its column."""
    interval: StoredInterval
    """Mean score minus that of the best position, <= 0, with an interval that holds jointly over all pairs of positions
    (Bonferroni): Tango's if scores are 0 and 1."""
    p: StoredNumber
    """Two-sided p-value of this pair alone: McNemar's exact test if scores are 0 and 1."""
    adjusted_p: StoredNumber
    """`p` times the number of pairs, so that choosing the best is paid for; below 1 - confidence exactly if `interval`
    leaves out 0."""


@dataclass(frozen=True)
class Comparison:
    """All positions against the best one."""

    best: int
    """Index of the position with the highest mean; the first of several."""
    differences: tuple[Difference, ...]
    """One for each other position."""


def complete_samples(scores: Scores) -> Float64[np.ndarray, "n_complete n_positions"]:
    """The samples that have a score at every position; refused are infinite scores, and no positions."""
    if scores.shape[1] < 1:
        raise UsageError("scores need at least 1 position, got none")
    if np.isinf(scores).any():
        raise UsageError("scores must be finite numbers, or NaN for a skipped example; got an infinite one")
    return np.asarray(scores[~np.isnan(scores).any(axis=1)])


def is_binary(scores: Float64[np.ndarray, "..."]) -> bool:
    """True if every score that is there is 0 or 1."""
    return bool(np.isin(scores[~np.isnan(scores)], (0.0, 1.0)).all())


def range_of(scores: Float64[np.ndarray, "..."]) -> tuple[float, float]:
    """The least and the most that such scores can be: 0 and 1 of shares; no more than 0 of log-probabilities."""
    least, most = np.nanmin(scores, initial=0.0), np.nanmax(scores, initial=0.0)
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    return -math.inf, math.inf if most > 0 else 0.0


def position_means(scores: Scores) -> tuple[Interval, ...]:
    """Mean score at each position, each with its own (pointwise) interval.

    Wilson's interval if all scores are 0 or 1, which stays honest at 0 % and 100 %; NaN within (-inf, inf) if nothing
    was scored. No end lies above what such scores can be.
    """
    complete_samples(scores)
    columns = [column[~np.isnan(column)] for column in scores.T]
    if is_binary(scores):
        return tuple(map(wilson, columns))
    least, most = range_of(scores)
    unscored = Interval(np.nan, -np.inf, np.inf)
    return tuple(mean_of(column).interval(least=least, most=most) if len(column) else unscored for column in columns)


def estimated(sums: Sums, scores: Float64[np.ndarray, "..."], weights: Weights = PAIR) -> Estimate:
    """The mean of each column of sums of scores with these weights.

    Scores of 0 and 1: the error is at least that of one sample which differs at one position, since never having seen
    a difference does not exclude one.
    """
    sizes = np.abs(weights)
    found = estimate(sums.mean(axis=0), sums, scale=float(sizes.sum() * np.abs(scores).max(initial=0.0)))
    if not is_binary(scores):
        return found
    least = sizes.max() / len(sums)
    error = np.asarray(np.maximum(found.error, least))
    return replace(found, error=error, skewness=np.where(found.error < least, 0.0, found.skewness))


def bounds_of(
    sums: Sums,
    scores: Float64[np.ndarray, "..."],
    alpha: float,
    *,
    limits: tuple[float, float] = (-math.inf, math.inf),
    reference: float = 0.0,
    weights: Weights = PAIR,
    cautious: bool = True,
) -> tuple[PerSum, PerSum, PerSum]:
    """Ends at 1 - alpha of the means of columns, and their two-sided p-values of being `reference`.

    Args:
        sums: sum[sample, column], weighted sums of scores.
        scores: These scores. If they are not all 0 and 1, a cautious estimate allows for more skewness than they show.
        alpha: In (0, 1); an interval leaves the reference out exactly if its p-value is below it.
        limits: Smallest and largest possible mean.
        reference: Mean that is tested.
        weights: Weights in a sum; by default those of a difference.
        cautious: False for one contrast that was planned: Student's test and the one corrected for skewness.
    """
    right_or_wrong = is_binary(scores)
    found = replace(estimated(sums, scores, weights), cautious=cautious and not right_or_wrong)
    p, (low, high) = found.p(reference), found.ends(1 - alpha, least=limits[0], most=limits[1])
    if not (cautious and right_or_wrong):
        agreed = np.ptp(sums, axis=0) <= AGREEMENT * np.abs(sums).max(axis=0)
        p = np.asarray(np.maximum(p, np.where(agreed, 2.0 ** (1 - len(sums)), 0.0)))  # what so many could show at most
    includes = p >= alpha
    return np.where(includes, np.minimum(low, reference), low), np.where(includes, np.maximum(high, reference), high), p


def contrast_of(scores: Scores, weights: Weights, alpha: float = ALPHA) -> Change:
    """Test and interval, covering 1 - alpha, of a contrast over samples (at least 2, no NaN); the weights sum to 0."""
    sums = scores @ weights
    limits = (-math.inf, math.inf)
    if range_of(scores) == (0.0, 1.0):
        limits = (float(weights[weights < 0].sum()), float(weights[weights > 0].sum()))
    low, high, p = bounds_of(sums, scores, alpha, limits=limits, weights=weights, cautious=False)
    return Change(Interval(float(sums.mean()), float(low), float(high)), float(p))


def paired_difference(first: PerSample, second: PerSample, alpha: float = ALPHA) -> Change:
    """Mean of `first` less mean of `second` on the same samples (>= 2, no NaN), with an interval that covers 1 - alpha.

    Tango's interval and McNemar's exact test if scores are 0 and 1, `contrast_of` otherwise.
    """
    pair = np.column_stack([first, second])
    if is_binary(pair):
        return Change(*paired_shares(first, second, 1 - alpha))
    return contrast_of(pair, PAIR, alpha)


def compare_to_best(scores: Scores) -> Comparison:
    """Every position against the best one, on complete samples (>= 6), with the choice of the best accounted for.

    The best of several equal positions looks better than it is: intervals and p-values hold for all pairs of positions
    at once, hence for whichever pair is chosen afterwards.
    """
    best, pairs = int(np.argmax(scores.mean(axis=0))), math.comb(scores.shape[1], 2)
    differences = []
    for position, column in enumerate(scores.T):
        if position != best:
            tested = paired_difference(column, scores[:, best], ALPHA / pairs)
            differences.append(Difference(position, tested.value, tested.p, min(1.0, pairs * tested.p)))
    return Comparison(best, tuple(differences))


@dataclass(frozen=True)
class Shape:
    """The form of the curve, so far as the samples establish it."""

    label: str
    """One of `SHAPES`."""
    p_flat: float
    """Holm-corrected p-value of the null hypothesis that the curve is flat: the smaller of trend's and bend's."""
    p_u: float
    """p-value against every curve that is not a U: the larger of the two one-sided ones; 1 with 2 positions."""


@dataclass(frozen=True, repr=False)
class PositionCurve(Showing):
    """Scores by position of the moved item."""

    positions: tuple[int, ...]
    """Positions of the item, ascending."""
    means: tuple[StoredInterval, ...]
    """Mean score at each position, pointwise interval."""
    counts: tuple[int, ...]
    """Samples scored at each position; the others were skipped."""
    n_samples: int
    n_complete: int
    """Samples scored at every position; comparisons rest on these."""
    comparison: Comparison | None = None
    """Every position against the best; None below 2 positions or 6 complete samples."""
    shape: Shape | None = None
    """U, monotone or flat; None below 2 positions or 6 complete samples."""
    middle_loss: Change | None = None
    """Ends minus middle; None below 3 positions or 6 complete samples."""
    deciding: tuple[float, int] | None = None
    """If no dependence on position is established: a difference of ends and middle (of two positions: of these), and
    about how many samples would find it with 80 % power."""
    quantity: str = "score"
    """Name of the scores, in words."""

    def shown(self) -> Shown:
        """Mean scores with their pointwise intervals, and the findings."""
        findings = self.findings
        title = f"{self.quantity} at {len(self.positions)} positions, {self.n_samples} samples: {findings[0]}"
        facts = {f"finding {number}": text for number, text in enumerate(findings, 1)}
        curve = Curve.of_intervals(self.quantity, self.positions, self.means, MEASURED)
        return Shown(title, (curve,), self.quantity, facts=facts)

    @property
    def findings(self) -> tuple[str, ...]:
        """One line for each thing that is established, or is not, every number with its interval or p-value."""
        if self.shape is None or self.comparison is None:
            return (
                f"{self.n_complete} samples scored at every one of {len(self.positions)} positions: too few for a "
                f"claim, which needs {SAMPLES_FOR_CLAIM} samples and 2 positions",
            )
        tested = f"p for a trend or bend {self.shape.p_flat:.2g}, for a U {self.shape.p_u:.2g}"
        findings = [f"{SHAPES[self.shape.label]} ({tested})"]
        if (loss := self.middle_loss) is not None:
            findings.append(f"ends minus middle {loss.value} (p {loss.p:.2g})")
        worst = min(self.comparison.differences, key=lambda difference: difference.interval.value)
        best = self.positions[self.comparison.best]
        about = f"position {self.positions[worst.position]} against the best, {best}"
        if worst.interval.value == 0:
            about = "all positions have the same mean; differences"
        return (*findings, f"{about}: {worst.interval} jointly over all pairs")


def position_curve(scores: Scores, *, positions: Sequence[int], quantity: str = "score") -> PositionCurve:
    """Everything that paired scores say about positions.

    Args:
        scores: score[sample, position], NaN if an example was skipped.
        positions, quantity: As in `PositionCurve`.

    Raises:
        UsageError: positions that do not ascend or do not fit the columns, or infinite scores.
    """
    columns = tuple(positions)
    if len(columns) != scores.shape[1] or any(later <= earlier for earlier, later in itertools.pairwise(columns)):
        raise UsageError(f"positions must ascend, one for each of the {scores.shape[1]} columns, got {list(columns)}")
    complete = complete_samples(scores)
    curve = PositionCurve(
        positions=columns,
        means=position_means(scores),
        counts=tuple(int(count) for count in (~np.isnan(scores)).sum(axis=0)),
        n_samples=len(scores),
        n_complete=len(complete),
        quantity=quantity,
    )
    if len(complete) < SAMPLES_FOR_CLAIM or len(columns) < 2:
        return curve
    shape = shape_of(complete, positions=np.array(columns, dtype=np.float64))
    return replace(
        curve,
        shape=shape,
        comparison=compare_to_best(complete),
        middle_loss=middle_loss(complete) if len(columns) > 2 else None,
        deciding=_deciding(complete) if shape.label == "flat" else None,
    )


def _deciding(scores: Scores) -> tuple[float, int]:
    """A difference of ends and middle, or of two positions, and about how many samples find it with 80 % power.

    The observed one, or DECIDING if it is smaller. Normal quantiles: n = ((z[1 - alpha/2] + z[power]) spread / d)^2.
    """
    from scipy.special import ndtri

    n_positions = scores.shape[1]
    weights = end_weights(n_positions).mean(axis=0) if n_positions > 2 else np.array([-1.0, 1.0])
    found = estimated(scores @ weights, scores, weights)
    difference, spread = max(DECIDING, abs(float(found.value))), float(found.error) * math.sqrt(len(scores))
    quantiles = ndtri((1 + CONFIDENCE) / 2) + ndtri(POWER)
    return difference, math.ceil((quantiles * spread / difference) ** 2)


def shape_of(scores: Scores, *, positions: Weights | None = None) -> Shape:
    """Decide between U, inverted U, rising, falling and flat, from complete samples (>= 6) at 2 positions or more.

    1. Flat unless the Holm-corrected p-value of the linear or of the quadratic contrast is at most alpha: of flat
       curves at most a share alpha gets any other label.
    2. Then a U if both ends lie above the middle, each one-sided at alpha (an intersection-union test: of monotone
       curves, of whatever form, at most a share alpha is called a U); an inverted U if both lie below.
    3. Else rising or falling if the trend is established; else unclear.
    """
    n_positions = scores.shape[1]
    weights = polynomial_weights(np.arange(n_positions, dtype=np.float64) if positions is None else positions)
    linear = contrast_of(scores, weights[0])
    trend = "rising" if linear.value.value > 0 else "falling"
    if n_positions == 2:
        return Shape(trend if linear.p <= ALPHA else "flat", linear.p, 1.0)
    first, last = (contrast_of(scores, row) for row in end_weights(n_positions))
    adjusted = holm(np.array([linear.p, contrast_of(scores, weights[1]).p]))
    p_flat, p_trend = float(adjusted.min()), float(adjusted[0])
    p_u, p_inverted = (max(first.p_one_sided(sign), last.p_one_sided(sign)) for sign in (1, -1))
    label = trend if p_trend <= ALPHA else "unclear"
    if p_flat > ALPHA:
        label = "flat"
    elif p_u <= ALPHA or p_inverted <= ALPHA:
        label = "u" if p_u <= ALPHA else "inverted_u"
    return Shape(label, p_flat, p_u)


def middle_loss(scores: Scores) -> Change:
    """Mean of the two ends minus mean of the middle, on samples (>= 6) that have a score at every position (>= 3)."""
    return contrast_of(scores, end_weights(scores.shape[1]).mean(axis=0))


def polynomial_weights(positions: Weights) -> Float64[np.ndarray, "two n_positions"]:
    """Weights of the orthogonal linear and quadratic contrasts, in units of the score.

    Applied to scores: the change from first to last position of the fitted line, and the height of the ends over the
    centre of the fitted parabola. Both sum to 0; the second is orthogonal to every line, and 0 with 2 positions, the
    fewest.
    """
    scaled = 2 * (positions - positions[0]) / (positions[-1] - positions[0]) - 1
    line = scaled - scaled.mean()
    bend = scaled**2 - (scaled**2).mean()
    bend = bend - line * (line @ bend) / (line @ line)
    curved = bend / (bend @ bend) if len(positions) > 2 else np.zeros(2)
    return np.stack([2 * line / (line @ line), curved])


def end_weights(n_positions: int) -> Float64[np.ndarray, "two n_positions"]:
    """Weights of first end minus middle, and of last end minus middle; at least 3 positions."""
    size = max(1, n_positions // END_SHARE)
    first = np.zeros(n_positions)
    first[size : n_positions - size] = -1 / (n_positions - 2 * size)
    first[:size] = 1 / size
    return np.stack([first, first[::-1]])
