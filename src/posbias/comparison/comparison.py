"""One prediction beside one measurement: every registered distance, and the same for the flat line.

A distance alone says little; a theory is worth something where it is nearer to the measurement than 1/N everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.checks import checked
from posbias.comparison.metrics import METRICS, finite
from posbias.errors import UsageError
from posbias.profiles import Profile, uniform_profile


@dataclass(frozen=True, eq=False)
class Distances:
    """Every registered metric of one pair of profiles; each is also an attribute (`distances.wasserstein`)."""

    values: Mapping[str, float]
    """Metric name to value; NaN where undefined, infinite where a profile has zeros that the other has not."""

    def __getattr__(self, name: str) -> float:
        values: Mapping[str, float] = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(f"no metric {name!r}; known: {', '.join(values)}")
        return values[name]

    def as_record(self) -> dict[str, float | None]:
        """Plain numbers for a record; None where undefined or infinite."""
        return {name: finite(value) for name, value in self.values.items()}


@dataclass(frozen=True, eq=False)
class Comparison(Distances):
    """The distances of a prediction to a measurement, and in `.flat` those of the flat line to the same."""

    flat: Distances

    def __getattr__(self, name: str) -> float:
        return super().__getattr__(name)

    def as_flat_record(self) -> dict[str, dict[str, float | None]]:
        """Both sets of distances, plain: `{"theory": ..., "flat": ...}`."""
        return {"theory": self.as_record(), "flat": self.flat.as_record()}


@checked
def compare(predicted: Profile, measured: Profile) -> Comparison:
    """Every registered distance of a prediction to a measurement, beside the flat line's.

    Args:
        predicted: What a theory says.
        measured: What was observed, over the same positions.

    Returns:
        One attribute per metric (`wasserstein`, `spearman` ...), and `.flat` with the same for the flat baseline.

    Raises:
        UsageError: not two profiles, or of different lengths.
    """
    for profile in (predicted, measured):
        if not isinstance(profile, Profile):
            raise UsageError(f"compare needs two Profiles, got {type(profile).__name__}; see Profile.normalised")
    if predicted.n_positions != measured.n_positions:
        raise UsageError(
            f"cannot compare a profile of {predicted.n_positions} positions with one of {measured.n_positions};"
            " both need the same length"
        )
    flat = uniform_profile(measured.n_positions)
    return Comparison(
        _distances(predicted.influence, measured.influence), Distances(_distances(flat.influence, measured.influence))
    )


def _distances(
    predicted: Float64[np.ndarray, "n_positions"], measured: Float64[np.ndarray, "n_positions"]
) -> dict[str, float]:
    return {name: float(METRICS[name](predicted, measured)) for name in METRICS}
