"""Differences over training seeds: their mean with Student's interval and paired test, and a verdict.

The unit is the seed. Two configurations trained with the same seed saw the same data, so their difference is taken
seed by seed. Interval and p-value are of one procedure, which can be had at the confidence that many quantities at once
need. No skewness is estimated: differences of equally trained networks are near symmetric, with six seeds it would
widen every interval, and the published pages stay as they were judged.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.errors import UsageError
from posbias.statistics import CONFIDENCE, Estimate, Interval, mean_of

ERROR = 1 - CONFIDENCE
"""How often an interval, or several that hold together, may miss."""
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"


@dataclass(frozen=True, eq=False)
class Difference:
    """A quantity with a sign, over seeds."""

    mean: Estimate
    """Mean over seeds."""
    n_seeds: int

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean; infinite with one seed."""
        return self.among(1)

    @property
    def p_value(self) -> float:
        """Two-sided, of a zero mean; 1 where nothing is known."""
        return float(self.mean.p())

    def among(self, quantities: int) -> Interval:
        """The interval of this quantity where `quantities` of them hold together with 95 % (Bonferroni).

        Args:
            quantities: How many, this one among them; >= 1.
        """
        return self.mean.interval(1 - ERROR / quantities)

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
        """Plain values for a record."""
        return {**self.interval.as_record(), "p_value": self.p_value, "n_seeds": self.n_seeds}

    def __str__(self) -> str:
        return self.interval.text("+.3f")


def difference(per_seed: Float64[np.ndarray, "n_seeds"]) -> Difference:
    """Mean over seeds with its interval and test.

    Args:
        per_seed: One value per seed, finite: a quantity whose sign matters, or a paired difference of two.

    Raises:
        UsageError: no seed, or a value that is not finite.
    """
    if not len(per_seed) or not np.all(np.isfinite(per_seed)):
        raise UsageError(f"a difference needs at least one seed and finite values, got {per_seed.tolist()}")
    return Difference(replace(mean_of(per_seed), skewness=np.zeros(())), len(per_seed))
