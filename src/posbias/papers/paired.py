"""Differences over training seeds: their mean with a Student and a bootstrap interval, an exact paired test, a verdict.

The unit is the seed. Two configurations trained with the same seed saw the same data, so their difference is taken
seed by seed. Verdicts follow the Student interval, whose coverage with six seeds is the one that it claims (.95 for
normal values, .94 for uniform ones; the expanded bootstrap .93, plain percentiles .86), and which can be had at the
confidence that many quantities at once need; the bootstrap stands beside it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import UNITS_FOR_CLAIM, interval_record
from posbias.comparison.sampling import draw_weights, interval_of
from posbias.errors import UsageError
from posbias.intervals import CONFIDENCE, Interval

MOST_SIGNS = 16
"""Units up to which every pattern of signs is tried (65,536 patterns)."""
RANDOM_SIGNS = 20_000
"""Patterns drawn beyond that; a p-value of .05 then moves by .0015."""
ERROR = 1 - CONFIDENCE
"""How often an interval, or several that hold together, may miss."""
SLACK = 1e-12
"""Relative rounding below which two means of signed differences count as equal."""

PerSeed = Float64[np.ndarray, "n_seeds"]


@dataclass(frozen=True)
class Difference:
    """A quantity with a sign, over seeds."""

    interval: Interval
    """Mean over seeds with its 95 % Student interval; infinite with one seed."""
    bootstrap: Interval
    """The same with the expanded percentile interval of resampled seeds."""
    p_value: float
    """Two-sided, exact: how often random signs of the seeds give a mean as far from zero. NaN with one seed."""
    n_seeds: int
    error: float
    """Standard error of the mean; NaN with one seed."""

    def among(self, quantities: int) -> Interval:
        """The interval of this quantity where `quantities` of them hold together with 95 % (Bonferroni).

        Args:
            quantities: How many, this one among them; >= 1.
        """
        return student_interval(self.interval.value, self.error, self.n_seeds, confidence=1 - ERROR / quantities)

    def supports(self, sign: int, *, quantities: int = 1) -> str:
        """What the interval says of an expected sign.

        Args:
            sign: 1 or -1.
            quantities: How many intervals are to hold together, this one among them.

        Returns:
            `reproduced`: the interval lies on that side of zero; `not reproduced`: on the other; `undecided`: it
            contains zero, or there are fewer than six seeds.
        """
        if self.n_seeds < UNITS_FOR_CLAIM:
            return UNDECIDED
        interval = self.among(quantities)
        low, high = sorted((sign * interval.low, sign * interval.high))
        return REPRODUCED if low > 0 else NOT_REPRODUCED if high < 0 else UNDECIDED

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record: `low` and `high` are Student's, `bootstrap` the other interval's ends."""
        resampled = interval_record(self.bootstrap)
        return {
            **interval_record(self.interval),
            "bootstrap": [resampled["low"], resampled["high"]],
            "p_value": None if np.isnan(self.p_value) else self.p_value,
            "n_seeds": self.n_seeds,
        }

    def __str__(self) -> str:
        return _spelled(self.interval)


def _spelled(interval: Interval) -> str:
    """A value and its ends, signed."""
    low, high = interval.low, interval.high
    ends = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) and np.isfinite(high) else " (one seed)"
    return f"{interval.value:+.3f}{ends}"


REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"


def difference(per_seed: PerSeed, *, generator: np.random.Generator) -> Difference:
    """Mean over seeds with intervals and paired test.

    Args:
        per_seed: One value per seed, finite: a quantity whose sign matters, or a paired difference of two.
        generator: Source of the resamples.

    Raises:
        UsageError: no seed, or a value that is not finite.
    """
    if not len(per_seed) or not np.all(np.isfinite(per_seed)):
        raise UsageError(f"a difference needs at least one seed and finite values, got {per_seed.tolist()}")
    count, mean = len(per_seed), float(per_seed.mean())
    error = float(per_seed.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
    return Difference(
        interval=student_interval(mean, error, count),
        bootstrap=interval_of(mean, draw_weights(count, generator=generator) @ per_seed, count),
        p_value=sign_test(per_seed, generator=generator),
        n_seeds=count,
        error=error,
    )


def student_interval(mean: float, error: float, count: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean of independent values.

    Args:
        mean: Of the values.
        error: Its standard error; 0 where all values are equal: then the interval is a point.
        count: Of the values, >= 1; infinite ends with one.
        confidence: Coverage in (0, 1) where the values are normal.

    Source: Student 1908.
    """
    from scipy.special import stdtrit

    if count < 2:
        return Interval(mean, -np.inf, np.inf)
    half = error * float(stdtrit(count - 1, (1 + confidence) / 2))
    return Interval(mean, mean - half, mean + half)


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
