"""Statistics of a sample's average profile (shares, minimum ...) and their differences between two samples.

Smooth statistics have intervals from the jackknife; the place of a minimum jumps, and is resampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.comparison.distance_intervals import BesideFlat, Sample, gaps_between
from posbias.comparison.metrics import RESAMPLED, SIGNED, STATISTICS
from posbias.statistics import (
    DRAWS,
    Interval,
    StoredInterval,
    blocks,
    draw_weights,
    jackknife,
    leave_one_out,
    percentile_interval,
)

Values = Float64[np.ndarray, "rows"]


def summarise(sample: Sample, *, generator: np.random.Generator, draws: int = DRAWS) -> dict[str, Interval]:
    """Every registered statistic of the average profile, with its interval; those that jump are resampled."""
    n_units = len(sample.units)
    return {
        name: percentile_interval(values[0], values[1:], n_units)
        if name in RESAMPLED
        else jackknife(values).interval(least=-1.0 if name in SIGNED else 0.0, most=1.0)
        for name, values in _statistics_of(sample, generator=generator, draws=draws).items()
    }


@dataclass(frozen=True)
class Contrast(BesideFlat):
    """A second measurement of the same kind beside the first: the model at initialisation and as trained."""

    statistics: Mapping[str, StoredInterval]
    """First minus second, per registered statistic; the two samples are independent."""


def contrast(first: Sample, second: Sample, *, generator: np.random.Generator, draws: int = DRAWS) -> Contrast:
    """Statistics of `first` minus those of `second`, and the distance between them, with intervals."""
    gaps = gaps_between(first, second)
    n_units = min(len(first.units), len(second.units))
    draws = draws if n_units > 1 else 0
    first_statistics, second_statistics = (
        _statistics_of(sample, generator=generator, draws=draws) for sample in (first, second)
    )
    statistics = {}
    for name, first_values in first_statistics.items():
        second_values = second_statistics[name]
        if name in RESAMPLED:
            statistics[name] = percentile_interval(
                first_values[0] - second_values[0], first_values[1:] - second_values[1:], n_units
            )
        else:
            statistics[name] = jackknife(first_values - second_values[0], first_values[0] - second_values).interval(
                least=-1.0, most=1.0
            )
    return Contrast(*gaps, n_units, statistics)


def _statistics_of(sample: Sample, *, generator: np.random.Generator, draws: int) -> dict[str, Values]:
    """Every statistic of the average, then of averages without a unit, or of resampled units if it jumps."""
    n_units, n_positions = sample.units.shape
    left_out, resampled = leave_one_out(n_units), draw_weights(n_units, generator=generator, draws=draws)
    rows = {True: np.concatenate([left_out[:1], resampled]), False: left_out}
    collected: dict[str, list[Values]] = {name: [] for name in STATISTICS}
    for jumps, weights in rows.items():
        for part in blocks(weights, n_positions):
            averages = sample.averages(part)
            for name in STATISTICS:
                if (name in RESAMPLED) == jumps:
                    collected[name].append(STATISTICS[name](averages))
    return {name: np.concatenate(values) for name, values in collected.items()}
