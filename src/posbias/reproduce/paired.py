"""Differences over training seeds: their mean with a bootstrap interval, an exact paired test, and a verdict.

The unit is the seed. Two configurations trained with the same seed saw the same data, so their difference is taken
seed by seed and the seeds are resampled.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import UNITS_FOR_CLAIM, interval_record
from posbias.comparison.sampling import draw_weights, interval_of
from posbias.errors import UsageError
from posbias.intervals import Interval

MOST_SIGNS = 16
"""Units up to which every pattern of signs is tried (65,536 patterns)."""
RANDOM_SIGNS = 20_000
"""Patterns drawn beyond that; a p-value of .05 then moves by .0015."""
SLACK = 1e-12
"""Relative rounding below which two means of signed differences count as equal."""

PerSeed = Float64[np.ndarray, "n_seeds"]


@dataclass(frozen=True)
class Difference:
    """A quantity with a sign, over seeds."""

    interval: Interval
    """Mean over seeds with its 95 % interval."""
    p_value: float
    """Two-sided, exact: how often random signs of the seeds give a mean as far from zero. NaN with one seed."""
    n_seeds: int

    def supports(self, sign: int) -> str:
        """What the interval says of an expected sign.

        Args:
            sign: 1 or -1.

        Returns:
            `reproduced`: the interval lies on that side of zero; `not reproduced`: on the other; `undecided`: it
            contains zero, or there are fewer than six seeds.
        """
        if self.n_seeds < UNITS_FOR_CLAIM:
            return UNDECIDED
        low, high = sorted((sign * self.interval.low, sign * self.interval.high))
        return REPRODUCED if low > 0 else NOT_REPRODUCED if high < 0 else UNDECIDED

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        p_value = None if np.isnan(self.p_value) else self.p_value
        return {**interval_record(self.interval), "p_value": p_value, "n_seeds": self.n_seeds}

    def __str__(self) -> str:
        low, high = self.interval.low, self.interval.high
        ends = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) and np.isfinite(high) else " (one seed)"
        return f"{self.interval.value:+.3f}{ends}"


REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"


def difference(per_seed: PerSeed, *, generator: np.random.Generator) -> Difference:
    """Mean over seeds with interval and paired test.

    Args:
        per_seed: One value per seed, finite: a quantity whose sign matters, or a paired difference of two.
        generator: Source of the resamples.

    Raises:
        UsageError: no seed, or a value that is not finite.
    """
    if not len(per_seed) or not np.all(np.isfinite(per_seed)):
        raise UsageError(f"a difference needs at least one seed and finite values, got {per_seed.tolist()}")
    weights = draw_weights(len(per_seed), generator=generator)
    interval = interval_of(float(per_seed.mean()), weights @ per_seed, len(per_seed))
    return Difference(interval, sign_test(per_seed, generator=generator), len(per_seed))


def sign_test(per_seed: PerSeed, *, generator: np.random.Generator) -> float:
    """Two-sided permutation test of a zero mean: the signs of the seeds' values are flipped in every way.

    Returns:
        At least 2 / 2^n with n seeds (.03 with six); NaN with one.

    Source: Fisher's randomisation test for paired differences.
    """
    count = len(per_seed)
    if count < 2:
        return float("nan")
    if count <= MOST_SIGNS:
        signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    else:
        signs = generator.choice([-1.0, 1.0], size=(RANDOM_SIGNS, count))
        signs[0] = 1
    means = np.abs(signs @ per_seed)
    return float(np.mean(means >= abs(per_seed.sum()) - SLACK * np.abs(per_seed).sum()))
