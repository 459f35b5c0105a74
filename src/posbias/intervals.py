"""Expanded percentile bootstrap over independent units (prompts, seeds), vectorised, the generator passed in.

Every stochastic number of the library carries such an interval; the unit that is resampled is the one that was drawn
independently (a prompt, an initialisation seed), never the position.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError

DRAWS = 1000
"""Bootstrap resamples: the ends of a 95 % interval then move by about 2 % of its width."""
CONFIDENCE = 0.95
"""Coverage that an interval claims unless told otherwise."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def excludes(self, reference: float) -> bool:
        """Whether `reference` lies outside the interval."""
        return not self.low <= reference <= self.high

    def as_record(self) -> dict[str, float]:
        """Plain numbers for a record."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def resamples(
    n_units: int, *, generator: np.random.Generator, draws: int = DRAWS
) -> Int64[np.ndarray, "draws n_units"]:
    """Indices of `draws` bootstrap samples of `n_units` units, with replacement."""
    return generator.integers(0, n_units, size=(draws, n_units))


def resample_counts(
    n_units: int, *, generator: np.random.Generator, draws: int = DRAWS
) -> Float64[np.ndarray, "draws n_units"]:
    """How often each unit occurs in each of the same bootstrap samples; no more memory than the result."""
    samples = resamples(n_units, generator=generator, draws=draws)
    counts = np.zeros(samples.shape)  # draws may be 0
    for row, sample in zip(counts, samples, strict=True):
        row += np.bincount(sample, minlength=n_units)
    return counts


def resampled_means(
    units: Float64[np.ndarray, "n_units n_values"], *, generator: np.random.Generator, draws: int = DRAWS
) -> Float64[np.ndarray, "draws n_values"]:
    """Means over `draws` bootstrap samples of the units, for many values at once (one matrix product)."""
    n_units = len(units)
    weights = resample_counts(n_units, generator=generator, draws=draws) / n_units
    return np.asarray(weights @ units)


def expanded_tail(n_units: int, confidence: float = CONFIDENCE) -> float:
    """Share of draws left out at each end so that few units, too, give the coverage that is claimed.

    Phi(-sqrt(n / (n - 1)) t) with the Student quantile t of n - 1 degrees of freedom: at 95 %, .0024 at 6 units, .014
    at 16, .025 in the limit. The mean of 6 normal units then falls outside in 7 % of repetitions, of 16 in 5.5 %; with
    plain percentiles in 15 % and 8 %. Below 6 units no resampling helps: 13 % at 4, and half at 2.

    Args:
        n_units: Independent units, at least 2.
        confidence: Coverage in (0, 1).

    Returns:
        In (0, (1 - confidence) / 2).

    Raises:
        UsageError: fewer units, or a coverage outside (0, 1).

    Source: Hesterberg, "What teachers should know about the bootstrap", 2015, expanded percentile interval.
    """
    from scipy.special import ndtr, stdtrit

    if n_units < 2:
        raise UsageError(f"an interval needs at least 2 independent units, got {n_units}")
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must lie in (0, 1), got {confidence}")
    quantile = stdtrit(n_units - 1, (1 + confidence) / 2)
    return float(ndtr(-np.sqrt(n_units / (n_units - 1)) * quantile))


def expanded_ends(
    drawn: Float64[np.ndarray, "draws *values"], n_units: int, confidence: float = CONFIDENCE
) -> tuple[Float64[np.ndarray, "*values"], Float64[np.ndarray, "*values"]]:
    """Ends of the expanded percentile interval of bootstrap draws along the first axis, one pair per value.

    Args:
        drawn: The statistic on every resample; at least 1 draw, no NaN.
        n_units: Independent units that were resampled, at least 2.
        confidence: Coverage in (0, 1).
    """
    tail = expanded_tail(n_units, confidence)
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return np.asarray(low), np.asarray(high)


def bootstrap_mean(
    units: Float64[np.ndarray, "n_units n_values"],
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> tuple[Float64[np.ndarray, "n_values"], Float64[np.ndarray, "n_values"]]:
    """Pointwise interval of the mean over units, for many values at once.

    Args:
        units: Independent units along axis 0, at least 1. With a single unit every interval is (-inf, inf).
        generator: Source of the resamples; pass a seeded one.
        draws: Number of resamples.
        confidence: Coverage in (0, 1).

    Returns:
        Low and high ends of expanded percentile intervals (`expanded_tail`).
    """
    n_units = len(units)
    if n_units < 2:
        infinite = np.full(units.shape[1], np.inf)
        return -infinite, infinite
    return expanded_ends(resampled_means(units, generator=generator, draws=draws), n_units, confidence)
