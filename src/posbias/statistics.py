"""Estimates, intervals and p-values over independent units: prompts, samples, seeds; never positions.

Smooth statistics, in closed form: with T = (estimate - truth) / error, an interval holds every truth that neither of
two tests rejects: Student's, which is right for symmetric units, and Student's after Hall's transformation, which takes
the skewness out of T. It is the wider of the two on each side, and its p-value the larger. An end is infinite if
nothing is known; an interval without width says that all units agreed, not that the truth is known. A cautious estimate
takes the skewness to be larger than it looks, and known to one standard error only.

Statistics that jump (the place of a minimum, a median, a rank correlation, a choice among orders) have no standard
error: they are resampled, the generator passed in, and have expanded percentile intervals.

Right or wrong: shares, their paired differences, several tests at once, and the smallest effect that a test would find.
Measured coverage of all: docs/intervals.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import numpy as np
from jaxtyping import Float64
from pydantic import BeforeValidator

from posbias.errors import UsageError

CONFIDENCE = 0.95
"""Coverage that an interval claims by default."""
MISSING = "–"
"""Text in place of a number that does not exist."""
Name = TypeVar("Name")


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_record(cls, stored: Mapping[str, Any]) -> "Interval":
        """The interval that `as_record` turned into plain numbers."""
        value, low, high = stored["value"], stored["low"], stored["high"]
        return cls(
            math.nan if value is None else value, -math.inf if low is None else low, math.inf if high is None else high
        )

    @property
    def known(self) -> bool:
        """True if the ends say anything: one of them is finite, and they differ."""
        return self.low < self.high and (math.isfinite(self.low) or math.isfinite(self.high))

    def excludes(self, reference: float) -> bool:
        """True if `reference` lies outside the interval."""
        return not self.low <= reference <= self.high

    def including(self, value: float) -> "Interval":
        """The interval, extended to a value that cannot be left out."""
        return Interval(self.value, min(self.low, value), max(self.high, value))

    def as_record(self) -> dict[str, float | None]:
        """Plain numbers; None for an infinite or undefined one, and for both ends if the interval is not known."""
        ends = {"low": self.low, "high": self.high} if self.known else {"low": math.nan, "high": math.nan}
        return {
            name: float(number) if math.isfinite(number) else None
            for name, number in {"value": self.value, **ends}.items()
        }

    def text(self, spec: str = ".3f", *, scale: float = 1.0, unit: str = "") -> str:
        """The value with its ends in brackets, such as `31.0 % [28.0, 35.0]`; no brackets if they are not known.

        Every number is multiplied by `scale` (100 for percent); the unit stands between the value and the ends.
        """
        if math.isnan(self.value):
            return MISSING
        ends = [_plain(scale * end, spec) for end in (self.low, self.high)] if self.known else []
        return f"{_plain(scale * self.value, spec)}{unit}" + (f" [{', '.join(ends)}]" if ends else "")

    def __str__(self) -> str:
        return self.text()


StoredInterval = Annotated[
    Interval, BeforeValidator(lambda stored: stored if isinstance(stored, Interval) else Interval.of_record(stored))
]
"""An interval in a dataclass that `runs.results.from_stored` reads from plain values."""
StoredNumber = Annotated[float, BeforeValidator(lambda stored: math.nan if stored is None else stored)]
"""A number there; NaN, which a record holds as None."""


def _plain(number: float, spec: str) -> str:
    """A formatted number, without the sign of a zero that only rounding made negative."""
    text = format(number, spec)
    return format(0.0, spec) if math.isfinite(number) and not float(text) else text


ROUNDING = 64 * np.finfo(np.float64).eps
"""Spread over units, relative to their size, that counts as none."""
LEAST_SKEWNESS = 1e-6
"""Below it Hall's transformation is the identity to within rounding."""

Numbers = Float64[np.ndarray, "*values"]
Scalars = Numbers | float
"""Numbers, or the scalar that NumPy makes of numbers without axes."""
PerUnit = Float64[np.ndarray, "_ *values"]
"""One row per unit; the units of several samples differ in number."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """One estimate, or many at once, with all that its intervals and p-values need."""

    value: Numbers
    error: Numbers
    """Standard error. If no unit differs from another, the error as if one unit in n showed nothing; 0 if nothing is
    known, because there is a single unit or all units show nothing."""
    skewness: Numbers
    """Third cumulant of the estimate over its standard error cubed: g / sqrt(n) for the mean of n units of skewness g.
    """
    freedom: Numbers
    """Degrees of freedom of the error; n - 1 for n units, Welch's number for several samples."""
    cautious: bool = False
    """Allow for a skewness a quarter larger than estimated, and one standard error more or less, sqrt(6 / n) for n
    normal units: for the mean of one sample, with rates of false findings in studies/intervals."""

    @property
    def plausible(self) -> tuple[Numbers, ...]:
        """The values of the skewness that intervals and p-values allow for."""
        if not self.cautious:
            return (self.skewness,)
        # Few units mostly lack the rare large values that make it up.
        larger, error = 1.25 * self.skewness, np.sqrt(6) / (self.freedom + 1)
        return self.skewness, larger - error, larger + error

    def ends(
        self, confidence: float = CONFIDENCE, *, least: float = -np.inf, most: float = np.inf
    ) -> tuple[Numbers, Numbers]:
        """Low and high ends of the intervals, within the truth's range; infinite if nothing is known."""
        from scipy.special import stdtrit

        if not 0 < confidence < 1:
            raise UsageError(f"confidence must lie in (0, 1), got {confidence}")
        quantile = stdtrit(self.freedom, (1 + confidence) / 2)
        down = np.max([quantile, *(_with_skewness(quantile, skewness) for skewness in self.plausible)], axis=0)
        up = np.max([quantile, *(-_with_skewness(-quantile, skewness) for skewness in self.plausible)], axis=0)
        low = np.minimum(np.maximum(self.value - down * self.error, least), self.value)
        high = np.maximum(np.minimum(self.value + up * self.error, most), self.value)
        return np.where(self.error > 0, low, -np.inf), np.where(self.error > 0, high, np.inf)

    def interval(self, confidence: float = CONFIDENCE, *, least: float = -np.inf, most: float = np.inf) -> Interval:
        """The interval of a single estimate, as `ends`."""
        low, high = self.ends(confidence, least=least, most=most)
        return Interval(float(self.value), float(low), float(high))

    def p(self, reference: float = 0.0) -> Numbers:
        """Two-sided p-value of the truth being `reference`, below 1 - confidence if `ends` excludes it."""
        from scipy.special import stdtr

        has_error = self.error > 0
        distance = np.divide(self.value - reference, self.error, out=np.zeros(np.shape(self.value)), where=has_error)
        sign = np.sign(distance)
        turned = (sign * _without_skewness(distance, skewness) for skewness in self.plausible)
        least = np.min([sign * distance, *turned], axis=0)
        return np.where(has_error, 2 * stdtr(self.freedom, -np.maximum(least, 0.0)), 1.0)


def estimate(value: Scalars, *influences: PerUnit, scale: float = 0.0) -> Estimate:
    """The estimate of a statistic that is, to first order, the truth plus the mean influence of each sample's units.

    Args:
        value: The estimate.
        influences: For every independent sample the influence of each of its units, up to a constant.
        scale: Size of the numbers that the influences are differences of; their rounding is no spread. 0: their own.

    Source: Student 1908; Welch 1947 for several samples; Hall 1992, "On the removal of skewness by transformation",
    with the population moments that it uses.
    """
    counts = [len(rows) for rows in influences]
    fewest = min(counts)
    if fewest < 2:
        unknown = np.zeros(np.shape(value))
        return Estimate(np.asarray(value), error=unknown, skewness=unknown, freedom=np.ones(np.shape(value)))
    variance, moment, third, squared = (np.zeros(np.shape(value)) for _ in range(4))
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite or undefined values have no interval
        largest = np.maximum(np.max([np.abs(rows).max(axis=0) for rows in influences], axis=0), scale)
        for count, rows in zip(counts, influences, strict=True):
            centred = (rows - rows.mean(axis=0)) / largest  # powers of tiny influences would vanish
            of_sample = np.square(centred).sum(axis=0) / (count * (count - 1))
            variance, squared = variance + of_sample, squared + of_sample**2 / (count - 1)
            moment, third = moment + of_sample * (count - 1) / count, third + (centred**3).sum(axis=0) / count**3
        varies = np.isfinite(variance) & (variance > ROUNDING**2)
        agreed = np.isfinite(value) & (np.abs(value) > ROUNDING * largest)
        error = np.where(varies, largest * np.sqrt(variance), np.where(agreed, np.abs(value) / fewest, 0.0))
        skewness, freedom = third / moment**1.5, variance**2 / squared
    return Estimate(
        np.asarray(value),
        error=error,
        # Of fewer than 6 units it cannot be estimated, and Student's interval stands alone.
        skewness=np.where(varies & (fewest >= 6), skewness, 0.0),
        freedom=np.where(varies, freedom, fewest - 1),
    )


def mean_of(units: PerUnit) -> Estimate:
    """The mean over units (axis 0, at least 1)."""
    return estimate(units.mean(axis=0), units)


def mean_ends(units: PerUnit, *, least: float = -np.inf, most: float = np.inf) -> tuple[Numbers, Numbers]:
    """Pointwise ends of the interval of the mean over units; see `Estimate.ends`."""
    return mean_of(units).ends(least=least, most=most)


def leave_one_out(n_units: int) -> Float64[np.ndarray, "rows n_units"]:
    """Weights of the units for `jackknife`: all alike in the first row, then one after another left out."""
    if n_units < 2:
        return np.ones((1, n_units))
    left_out = (1 - np.eye(n_units)) / (n_units - 1)
    return np.concatenate([np.full((1, n_units), 1 / n_units), left_out])


def jackknife(*samples: PerUnit) -> Estimate:
    """The estimate of any smooth function of the units' average, from its values with each unit left out.

    Not for functions that jump (the place of a minimum, a median, a choice among orders): resample those.

    Args:
        samples: For every independent sample, the function's values for the rows of `leave_one_out` of its units, all
            other samples complete. The first rows are the estimate, and equal.

    Source: Tukey 1958; Efron and Tibshirani 1993, chapter 11.
    """
    value = np.asarray(samples[0][0])
    with np.errstate(invalid="ignore"):
        influences = [(len(values) - 2) * (values[0] - values[1:]) for values in samples]
    largest = np.nan_to_num(np.abs(value), posinf=0.0).max(initial=0.0)
    return estimate(value, *influences, scale=float(max(1.0, largest)))


def _without_skewness(distance: Scalars, skewness: Scalars) -> Scalars:
    """Hall's monotone transformation of T: T + g T^2 / 3 + g^2 T^3 / 27 + g / 6, g being the estimate's skewness."""
    return np.asarray(distance * (1 + skewness * distance / 3 * (1 + skewness * distance / 9)) + skewness / 6)


def _with_skewness(transformed: Scalars, skewness: Numbers) -> Scalars:
    """The inverse of `_without_skewness`: 3 / g ((1 + g (h - g / 6))^(1/3) - 1)."""
    tiny = np.abs(skewness) < LEAST_SKEWNESS
    divisor = np.where(tiny, 1.0, skewness)
    skewed: Scalars = 3 / divisor * (np.cbrt(1 + divisor * (transformed - divisor / 6)) - 1)
    return np.where(tiny, transformed, skewed)


DRAWS = 1000
"""Bootstrap resamples: the ends of a 95 % interval then move by about 2 % of its width."""
BLOCK_VALUES = 4_000_000
"""Float64 values of averaged draws held at a time (32 MB)."""

Weights = Float64[np.ndarray, "draws n_units"]
Values = Float64[np.ndarray, "draws"]


def resample_counts(n_units: int, *, generator: np.random.Generator, draws: int = DRAWS) -> Weights:
    """How often each unit occurs in each bootstrap sample; no more memory than the result."""
    samples = generator.integers(0, n_units, size=(draws, n_units))
    counts = np.zeros(samples.shape)  # draws may be 0
    for row, sample in zip(counts, samples, strict=True):
        row += np.bincount(sample, minlength=n_units)
    return counts


def draw_weights(n_units: int, *, generator: np.random.Generator, draws: int = DRAWS) -> Weights:
    """Bootstrap draws as weights of the units, each row summing to 1; no draws from a single unit."""
    if n_units < 2:
        return np.zeros((0, n_units))
    return np.asarray(resample_counts(n_units, generator=generator, draws=draws) / n_units)


def halves(n_units: int, *, generator: np.random.Generator, draws: int) -> Weights:
    """Random halvings: 1 for the units of the first half (the smaller one), 0 for the others."""
    order = generator.permuted(np.tile(np.arange(n_units), (draws, 1)), axis=1)
    return (np.argsort(order, axis=1) < n_units // 2).astype(np.float64)


def blocks(weights: Weights, n_positions: int) -> list[Float64[np.ndarray, "_ n_units"]]:
    """The draws in blocks whose averages fit in memory."""
    size = max(1, BLOCK_VALUES // n_positions)
    return [weights[start : start + size] for start in range(0, max(len(weights), 1), size)]


def expanded_tail(n_units: int) -> float:
    """Share of draws left out at each end, below (1 - confidence) / 2, so that few units keep the coverage claimed.

    Phi(-sqrt(n / (n - 1)) t) with the Student quantile t of n - 1 degrees of freedom: at 95 %, .0024 at 6 units, .014
    at 16, .025 in the limit. The mean of 6 normal units then falls outside in 7 % of repetitions, of 16 in 5.5 %; with
    plain percentiles in 15 % and 8 %. Below 6 units no resampling helps: 13 % at 4, and half at 2.

    Source: Hesterberg, "What teachers should know about the bootstrap", 2015, expanded percentile interval.
    """
    from scipy.special import ndtr, stdtrit

    if n_units < 2:
        raise UsageError(f"an interval needs at least 2 independent units, got {n_units}")
    quantile = stdtrit(n_units - 1, (1 + CONFIDENCE) / 2)
    return float(ndtr(-np.sqrt(n_units / (n_units - 1)) * quantile))


def percentile_interval(value: float, resampled: Values, n_units: int) -> Interval:
    """Expanded percentile interval of the draws, widened to contain the estimate; infinite without draws.

    Draws that leave the statistic undefined (NaN) are left out; infinite draws count, and may make an end infinite.
    Widening matters when a distance is at the noise floor.
    """
    defined = resampled[~np.isnan(resampled)]
    if defined.size == 0:
        return Interval(float(value), -np.inf, np.inf)
    tail = expanded_tail(n_units)
    with np.errstate(invalid="ignore"):
        between = np.quantile(defined, [tail, 1 - tail])
    # Where one of the two draws around an end is infinite it is the outer one, which errs on the wide side.
    outer = np.quantile(defined, tail, method="lower"), np.quantile(defined, 1 - tail, method="higher")
    low, high = np.where(np.isfinite(between), between, outer).tolist()
    return Interval(float(value), low, high).including(float(value))


def weighted_median(values: Float64[np.ndarray, "n_units"], weights: Weights) -> Values:
    """Median of the values repeated in proportion to their weights, midway if half the weight lies on either side.

    Equal to `np.median` of the repeated values: the mean of the smallest value with at least half of the weight at or
    below it and of the smallest with more than half. One row of weights >= 0, not all zero, per draw.
    """
    order = np.argsort(values)
    cumulative = np.cumsum(weights[:, order], axis=1)
    half = cumulative[:, -1:] / 2
    slack = half * 1e-9  # rounding where cumulated weights, multiples of 1 / units, are exactly one half
    lower = np.argmax(cumulative >= half - slack, axis=1)
    upper = np.argmax(cumulative > half + slack, axis=1)
    ordered = values[order]
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


POWER = 0.8
"""Chance that a test finds an effect of detectable size."""
NUDGE = 1e-9
"""Share of the way to the limit at which the search for an end begins."""

Binary = Float64[np.ndarray, "n_units"]
"""0 or 1 per unit."""


def wilson(values: Float64[np.ndarray, "n"], confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion; infinite if there are no values.

    Source: Wilson 1927; it inverts the score test and has length above 0 at 0 % and 100 % too.
    """
    if not len(values):
        return Interval(np.nan, -np.inf, np.inf)
    from scipy.special import ndtri

    count, share, z = len(values), float(values.mean()), float(ndtri((1 + confidence) / 2))
    middle, reach = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z**2 / count
    low, high = max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)
    return Interval(share, low, high).including(share)  # at 0 and 1 rounding would leave it out


def bounded_mean(units: Float64[np.ndarray, "n"], confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean of units (>= 1) in 0 ... 1, whatever their distribution; exact for units of 0 and 1.

    A few units that fail do not tell how many would. So one more unit is added, at the limit, and all are weighted by
    shares drawn uniformly from those that sum to 1 (Dirichlet): the low end is a quantile of that mean. Of 0 and 1 this
    is the interval of Clopper and Pearson 1934.

    Source: Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable"; the quantile by the saddlepoint of Lugannani and Rice 1980, whose error is below .002.
    """
    alpha = (1 - confidence) / 2
    return Interval(float(units.mean()), _low_end(units, alpha), 1 - _low_end(1 - units, alpha))


def _low_end(units: Float64[np.ndarray, "n"], alpha: float) -> float:
    """The t with P(sum of E_i (x_i - t) <= 0) = alpha, E_i exponential and x the units with a 0 more."""
    from scipy.optimize import brentq
    from scipy.special import betaincinv, ndtr

    if np.isin(units, (0.0, 1.0)).all():
        right = float(units.sum())
        return float(betaincinv(right, len(units) - right + 1, alpha)) if right else 0.0
    values = np.append(units, 0.0) / units.max()

    def excess(end: float) -> float:
        """How far the chance of a mean below the end lies above alpha."""
        gaps = values - end
        limits = (1 - NUDGE) / gaps.min(), (1 - NUDGE) / gaps.max()
        point = brentq(lambda at: float((gaps / (1 - gaps * at)).sum()), *limits, rtol=1e-9)
        root = np.sign(point) * np.sqrt(max(0.0, 2 * np.log1p(-gaps * point).sum()))
        scaled = point * np.sqrt(np.square(gaps / (1 - gaps * point)).sum())
        if abs(root) < LEAST_SKEWNESS:
            return 0.5 - alpha
        return float(ndtr(root) + np.exp(-(root**2) / 2) / np.sqrt(2 * np.pi) * (1 / root - 1 / scaled)) - alpha

    return float(units.max() * brentq(excess, NUDGE, float(values.mean()), xtol=1e-7))


def paired_shares(first: Binary, second: Binary, confidence: float = CONFIDENCE) -> tuple[Interval, float]:
    """Mean of `first` less mean of `second` on the same units, and the two-sided p-value of their being equal.

    Tango's interval, extended to 0 if the exact test does not reject; so it leaves out 0 exactly if p is below
    1 - confidence.
    """
    from scipy.special import bdtr

    gained, lost = round((first * (1 - second)).sum()), round(((1 - first) * second).sum())
    p = min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))  # McNemar's exact test
    interval = tango(gained, lost, len(first), confidence)
    if interval.excludes(0.0) and p < 1 - confidence:
        return interval, p
    return interval.including(0.0), max(p, 1 - confidence)


@lru_cache(maxsize=1 << 14)  # comparisons of many positions and methods ask for the same ones again
def tango(gained: int, lost: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Score interval of the difference of two paired proportions; it excludes 0 when McNemar's score test rejects.

    It is never of length 0, also without any discordant unit. From the numbers of units that only the first has, that
    only the second has, and of all units.

    Source: Tango 1998, "Equivalence test and confidence interval for the difference in proportions", eq. 9.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    critical = float(ndtri((1 + confidence) / 2))

    def score(difference: float, level: float) -> float:
        """Distance of the score above the level, times its standard error."""
        linear = (2 * count - gained + lost) * difference - gained - lost
        product = -lost * difference * (1 - difference)
        only_second = (np.sqrt(max(linear**2 - 8 * count * product, 0.0)) - linear) / (4 * count)
        variance = max(count * (2 * only_second + difference * (1 - difference)), 0.0)
        return float(gained - lost - count * difference - level * np.sqrt(variance))

    def end(level: float, limit: float) -> float:
        inside = value + NUDGE * (limit - value)  # at the value itself the variance, and with it the score, may be 0
        if score(inside, level) * score(limit, level) >= 0:
            return limit
        return float(brentq(score, inside, limit, args=(level,), xtol=1e-14))

    value = (gained - lost) / count
    return Interval(value, end(critical, -1.0), end(-critical, 1.0))


def holm(p_values: Float64[np.ndarray, "n_tests"]) -> Float64[np.ndarray, "n_tests"]:
    """Holm's step-down correction: the chance of any false rejection stays at the level, whatever the dependence."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    return adjusted


def holm_over(families: Sequence[Mapping[Name, float]]) -> list[dict[Name, float]]:
    """Holm's correction of all p-values of several families together, by their names."""
    adjusted = iter(holm(np.array([p for family in families for p in family.values()], dtype=np.float64)).tolist())
    return [{name: next(adjusted) for name in family} for family in families]


def detectable(spread: float, n_samples: int, *, alpha: float = 1 - CONFIDENCE) -> float:
    """Smallest true mean of a paired quantity that a two-sided t-test finds with `POWER`; infinite below 2 units.

    (t[1 - alpha/2] + t[power]) spread / sqrt(n), quantiles of Student's t with n - 1 degrees of freedom; spread is the
    standard deviation over samples, alpha, in (0, 1), is divided by the number of comparisons.
    """
    from scipy.special import stdtrit

    if n_samples < 2:
        return float("inf")
    quantiles = stdtrit(n_samples - 1, 1 - alpha / 2) + stdtrit(n_samples - 1, POWER)
    return float(quantiles * spread / np.sqrt(n_samples))
