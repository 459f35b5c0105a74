"""The object every theory predicts and every measurement estimates: a distribution over input positions.

`influence[j]` is the share of input position j in what the last position's output depends on (docs/theory, section 1).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.results.figures import NEXT, Curve, Stroke
from posbias.results.showing import Showing, Shown
from posbias.statistics import mean_ends

SUM_TOLERANCE = 1e-8
"""How far a profile's sum may be from 1: far above float64 round-off at N = 10^6, far below any effect."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Profile(Showing):
    """Non-negative influence of every input position on the last one; sums to 1."""

    influence: Float64[np.ndarray, "n_positions"]
    low: Float64[np.ndarray, "n_positions"] | None = None
    """Lower end of the pointwise interval if the profile was estimated; infinite if nothing is known."""
    high: Float64[np.ndarray, "n_positions"] | None = None

    def __post_init__(self) -> None:
        influence = self.influence
        if influence.ndim != 1 or influence.size == 0:
            raise UsageError(f"a profile needs one value per position, got shape {influence.shape}")
        if not np.all(np.isfinite(influence)) or influence.min() < 0:
            raise UsageError("a profile needs finite values >= 0")
        total = float(influence.sum())
        if abs(total - 1) > SUM_TOLERANCE:
            raise UsageError(f"a profile sums to 1, got {total:.12g}; use Profile.normalised for raw values")

    @classmethod
    def normalised(cls, values: Float64[np.ndarray, "n_positions"]) -> "Profile":
        """The profile proportional to `values` (non-negative, not all zero)."""
        total = float(values.sum())
        if not np.isfinite(total) or total <= 0 or values.min() < 0:
            raise UsageError(f"cannot normalise values with sum {total} to a profile; need finite values >= 0")
        return cls(values / total)

    @classmethod
    def uniform(cls, n_positions: int) -> "Profile":
        """The flat baseline: every position weighs 1/N."""
        if n_positions < 1:
            raise UsageError(f"a profile needs at least 1 position, got {n_positions}")
        return cls(np.full(n_positions, 1 / n_positions))

    @classmethod
    def mean_of(cls, units: Float64[np.ndarray, "n_units n_positions"]) -> "Profile":
        """The mean of independent units' profiles (rows that sum to 1), with its pointwise interval."""
        return cls(units.mean(axis=0), *mean_ends(units, least=0.0, most=1.0))

    def curve(self, name: str, stroke: Stroke = NEXT, *, drawn: bool = True) -> Curve:
        """The profile as a named curve."""
        return Curve(name, np.arange(self.n_positions), self.influence, stroke, self.low, self.high, drawn)

    def shown(self) -> Shown:
        """Its single curve."""
        first, middle, last = self.influence[[0, self.n_positions // 2, -1]] * self.n_positions
        title = f"{self.n_positions} positions; flat line = 1: first {first:.3g}, middle {middle:.3g}, last {last:.3g}"
        return Shown(title, (self.curve("profile"),))

    @property
    def n_positions(self) -> int:
        """Number of positions N."""
        return int(self.influence.size)
