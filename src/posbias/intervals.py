"""Percentile bootstrap over independent units (prompts or seeds), vectorised, with the generator passed in.

Every stochastic number of the library carries such an interval; the unit that is resampled is the one that was drawn
independently (a prompt, an initialisation seed), never the position.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

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


def bootstrap_statistic(
    units: Float64[np.ndarray, "n_units ..."],
    statistic: Callable[[np.ndarray], float],
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Percentile interval of `statistic(units)`, units resampled along the first axis.

    Args:
        units: Independent units along axis 0, at least 1. With a single unit the interval is (-inf, inf).
        statistic: Maps an array of units to one number.
        generator: Source of the resamples; pass a seeded one.
        draws: Number of resamples.
        confidence: Coverage in (0, 1).

    Returns:
        The statistic of all units and the percentile ends.
    """
    value = float(statistic(units))
    if len(units) < 2:
        return Interval(value, -np.inf, np.inf)
    values = [statistic(units[sample]) for sample in resamples(len(units), generator=generator, draws=draws)]
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_mean(
    units: Float64[np.ndarray, "n_units n_values"],
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> tuple[Float64[np.ndarray, "n_values"], Float64[np.ndarray, "n_values"]]:
    """Pointwise percentile interval of the mean over units, for many values at once (one matrix product)."""
    n_units = len(units)
    if n_units < 2:
        infinite = np.full(units.shape[1], np.inf)
        return -infinite, infinite
    samples = resamples(n_units, generator=generator, draws=draws)
    weights = np.stack([np.bincount(sample, minlength=n_units) for sample in samples]) / n_units
    means = weights @ units
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high
