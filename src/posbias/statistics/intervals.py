"""Estimates from independent units: an interval and a p-value from one procedure, in closed form, without resampling.

With T = (estimate - truth) / error, an interval holds every truth that neither of two tests rejects: Student's, which
is right for symmetric units, and Student's after Hall's transformation, which takes the skewness out of T. It is the
wider of the two on each side, and its p-value the larger. Coverage by simulation: docs/intervals.md. An end is infinite
where nothing is known; an interval without width says that all units agreed, not that the truth is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError

CONFIDENCE = 0.95
"""Coverage that an interval claims by default."""
MISSING = "–"
"""What stands for a number that does not exist."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_record(cls, stored: Mapping[str, Any]) -> "Interval":
        """What `as_record` made plain."""
        value, low, high = stored["value"], stored["low"], stored["high"]
        return cls(
            math.nan if value is None else value, -math.inf if low is None else low, math.inf if high is None else high
        )

    @property
    def known(self) -> bool:
        """Whether the ends say anything: one of them is finite, and they differ."""
        return self.low < self.high and (math.isfinite(self.low) or math.isfinite(self.high))

    def excludes(self, reference: float) -> bool:
        """Whether `reference` lies outside the interval."""
        return not self.low <= reference <= self.high

    def including(self, value: float) -> "Interval":
        """The interval, extended to a value that cannot be left out."""
        return Interval(self.value, min(self.low, value), max(self.high, value))

    def as_record(self) -> dict[str, float | None]:
        """Plain numbers; None where a value is infinite or undefined, both ends where the interval is not known."""
        ends = {"low": self.low, "high": self.high} if self.known else {"low": math.nan, "high": math.nan}
        return {
            name: float(number) if math.isfinite(number) else None
            for name, number in {"value": self.value, **ends}.items()
        }

    def text(self, spec: str = ".3f", *, scale: float = 1.0, unit: str = "") -> str:
        """The value with its ends in brackets, such as `31.0 % [28.0, 35.0]`; no brackets where they are not known.

        Every number is multiplied by `scale` (100 for percent); the unit stands between the value and the ends.
        """
        if math.isnan(self.value):
            return MISSING
        ends = [_plain(scale * end, spec) for end in (self.low, self.high)] if self.known else []
        return f"{_plain(scale * self.value, spec)}{unit}" + (f" [{', '.join(ends)}]" if ends else "")

    def __str__(self) -> str:
        return self.text()


def _plain(number: float, spec: str) -> str:
    """A formatted number, without the sign of a zero that only rounding made negative."""
    text = format(number, spec)
    return format(0.0, spec) if math.isfinite(number) and not float(text) else text


ROUNDING = 64 * np.finfo(np.float64).eps
"""Spread over units, relative to their size, that counts as none."""
UNITS_FOR_SKEWNESS = 6
"""Units below which the skewness cannot be estimated, and Student's interval stands alone."""
LEAST_SKEWNESS = 1e-6
"""Below it Hall's transformation is the identity to within rounding."""

Numbers = Float64[np.ndarray, "*values"]
Scalars = Numbers | float
"""What NumPy makes of numbers without axes is a scalar."""
PerUnit = Float64[np.ndarray, "_ *values"]
"""One row per unit; the units of several samples differ in number."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """One estimate, or many at once, with what its intervals and p-values need."""

    value: Numbers
    error: Numbers
    """Standard error. Where no unit differs from another, that of one unit in n which shows nothing; 0 where there is a
    single unit, or all show nothing: then nothing is known."""
    skewness: Numbers
    """Third cumulant of the estimate over its standard error cubed: g / sqrt(n) for the mean of n units of skewness g.
    """
    freedom: Numbers
    """Degrees of freedom of the error; n - 1 for n units, Welch's number for several samples."""

    def ends(
        self, confidence: float = CONFIDENCE, *, least: float = -np.inf, most: float = np.inf
    ) -> tuple[Numbers, Numbers]:
        """Low and high ends of the intervals, within the truth's range; infinite where nothing is known."""
        from scipy.special import stdtrit

        if not 0 < confidence < 1:
            raise UsageError(f"confidence must lie in (0, 1), got {confidence}")
        quantile = stdtrit(self.freedom, (1 + confidence) / 2)
        down = np.maximum(quantile, _with_skewness(quantile, self.skewness))
        up = np.maximum(quantile, -_with_skewness(-quantile, self.skewness))
        low = np.minimum(np.maximum(self.value - down * self.error, least), self.value)
        high = np.maximum(np.minimum(self.value + up * self.error, most), self.value)
        known = self.error > 0
        return np.where(known, low, -np.inf), np.where(known, high, np.inf)

    def interval(self, confidence: float = CONFIDENCE, *, least: float = -np.inf, most: float = np.inf) -> Interval:
        """The interval of a single estimate, as `ends`."""
        low, high = self.ends(confidence, least=least, most=most)
        return Interval(float(self.value), float(low), float(high))

    def p(self, reference: float = 0.0) -> Numbers:
        """Two-sided p-value of the truth being `reference`, which `ends` excludes where it is below 1 - confidence.

        1 where nothing is known.
        """
        from scipy.special import stdtr

        known = self.error > 0
        distance = np.divide(self.value - reference, self.error, out=np.zeros(np.shape(self.value)), where=known)
        sign = np.sign(distance)
        least = np.minimum(sign * distance, sign * _without_skewness(distance, self.skewness))
        return np.where(known, 2 * stdtr(self.freedom, -np.maximum(least, 0.0)), 1.0)


def estimate(value: Scalars, *influences: PerUnit, scale: float = 0.0) -> Estimate:
    """An estimate that is, to first order, the truth plus the mean influence of the units of each sample.

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
            own = np.square(centred).sum(axis=0) / (count * (count - 1))
            variance, squared = variance + own, squared + own**2 / (count - 1)
            moment, third = moment + own * (count - 1) / count, third + (centred**3).sum(axis=0) / count**3
        known = np.isfinite(variance) & (variance > ROUNDING**2)
        agreed = np.isfinite(value) & (np.abs(value) > ROUNDING * largest)
        error = np.where(known, largest * np.sqrt(variance), np.where(agreed, np.abs(value) / fewest, 0.0))
        skewness, freedom = third / moment**1.5, variance**2 / squared
    return Estimate(
        np.asarray(value),
        error=error,
        skewness=np.where(known & (fewest >= UNITS_FOR_SKEWNESS), skewness, 0.0),
        freedom=np.where(known, freedom, fewest - 1),
    )


def mean_of(units: PerUnit) -> Estimate:
    """The mean over units (axis 0, at least 1), for many values at once."""
    return estimate(units.mean(axis=0), units)


def mean_ends(
    units: PerUnit, *, confidence: float = CONFIDENCE, least: float = -np.inf, most: float = np.inf
) -> tuple[Numbers, Numbers]:
    """Pointwise ends of the interval of the mean over units; see `Estimate.ends`."""
    return mean_of(units).ends(confidence, least=least, most=most)


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
    transformed: Scalars = distance * (1 + skewness * distance / 3 * (1 + skewness * distance / 9)) + skewness / 6
    return transformed


def _with_skewness(transformed: Scalars, skewness: Numbers) -> Scalars:
    """Its inverse: 3 / g ((1 + g (h - g / 6))^(1/3) - 1)."""
    tiny = np.abs(skewness) < LEAST_SKEWNESS
    divisor = np.where(tiny, 1.0, skewness)
    found: Scalars = 3 / divisor * (np.cbrt(1 + divisor * (transformed - divisor / 6)) - 1)
    return np.where(tiny, transformed, found)
