"""Distances of one profile to another, beside the flat line's, without which a distance says little; with intervals.

Intervals are over independent units (prompts or seeds), never over positions. Each unit is normalised, then averaged,
by its scale if it has one. Smooth functions of the average have intervals from the jackknife; a median and the place of
a minimum jump, and are resampled (`posbias.statistics`). A distance cannot be negative and noise only adds to it:
claims rest on the paired difference to the flat line when that works against the theory, never for it.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.comparison.metrics import METRICS, RESAMPLED, SIGNED, STATISTICS, wasserstein
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.statistics import (
    CONFIDENCE,
    DRAWS,
    Interval,
    StoredInterval,
    StoredNumber,
    blocks,
    draw_weights,
    halves,
    jackknife,
    leave_one_out,
    percentile_interval,
    weighted_median,
)

UNITS_FOR_CLAIM = 6
"""Independent units below which no interval supports a claim: the widest percentile interval of n units, from their
smallest to their largest, covers the true median with probability 1 - 2^(1-n), which reaches 95 % at n = 6."""

Units = Float64[np.ndarray, "n_units n_positions"]
Predictions = Float64[np.ndarray, "n_predictions n_predicted"]
"""One predicted profile per unit; that the counts and lengths match is checked with a message of our own."""
Weights = Float64[np.ndarray, "rows n_independent"]
Averages = Float64[np.ndarray, "_ n_positions"]


@dataclass(frozen=True, eq=False)
class Sample:
    """Profiles of independent prompts (or of prompts each with its own initialisation), over the same positions."""

    units: Units
    """One profile per unit; rows sum to 1. These are resampled."""
    scales: Float64[np.ndarray, "n_units"] | None = None
    """How much each unit counts in an average, > 0: its raw total, if raw influences are averaged and normalised
    once, a ratio that is formed anew on every draw. None: all count the same."""

    @classmethod
    def of(cls, values: Units, scales: Float64[np.ndarray, "n_units"] | None = None) -> "Sample":
        """Normalise raw influence per unit to profiles."""
        totals = values.sum(axis=-1)
        bad = np.flatnonzero(~(np.isfinite(totals) & (totals > 0)) | (values.min(axis=-1) < 0))
        if bad.size:
            raise UsageError(f"prompt {bad[0]} has no profile: its influence must be finite, >= 0 and not all zero")
        return cls(values / totals[:, None], scales)

    @property
    def average(self) -> Float64[np.ndarray, "n_positions"]:
        """The profile of the sample: the mean over its units."""
        return np.asarray(self.averages(leave_one_out(len(self.units))[:1])[0])

    def averages(self, weights: Weights) -> Averages:
        """Averages with the units weighted by rows that sum to 1."""
        return np.asarray(self.scaled(weights) @ self.units)

    def scaled(self, weights: Weights) -> Weights:
        """Weights times the units' scales; rows that sum to 1 still do."""
        if self.scales is None:
            return weights
        rows = weights * (self.scales / self.scales.max())
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class SplitHalf:
    """W1 between the averages of two random halves of the units: the noise floor of the measurement.

    The average of all units is closer to the truth than this, by about a factor of two.
    """

    mean: StoredNumber
    low: StoredNumber
    """2.5 % quantile over random halvings (NaN with a single unit, as the other two)."""
    high: StoredNumber


@dataclass(frozen=True)
class BesideFlat:
    """How far something and the flat line are from a measurement, with intervals over its independent units."""

    distance: StoredInterval
    """W1 to the average over units."""
    flat: StoredInterval
    """W1 of the flat line to the same."""
    difference: StoredInterval
    """`distance` minus `flat` on the same units: below zero, it is closer than the flat line."""
    n_units: int
    """Independent units; of two samples those of the smaller."""

    @property
    def decides(self) -> int:
        """-1: closer than the flat line; 1: farther; 0: the data do not decide."""
        return decided(self.difference, self.n_units)

    @property
    def said(self) -> str:
        """What is decided, in words; if nothing is, whether that is for the interval or for the number of units."""
        if self.decides:
            return f"{'closer' if self.decides < 0 else 'farther'} than the flat line"
        if self.difference.excludes(0.0):
            return f"{self.n_units} prompts or seeds are too few to decide, which takes {UNITS_FOR_CLAIM}"
        return "the data do not decide"


@dataclass(frozen=True)
class PromptComparison(BesideFlat):
    """A theory beside a measurement."""

    noise: SplitHalf
    per_prompt: StoredInterval
    """Median over units of the W1 to the single unit (of the unit's own prediction, if there is one)."""
    per_prompt_flat: StoredInterval


@dataclass(frozen=True)
class Contrast(BesideFlat):
    """A second measurement of the same kind beside the first: the model at initialisation and as trained."""

    statistics: Mapping[str, StoredInterval]
    """First minus second, per registered statistic."""


def beside_flat(rows: Units, sample: Sample, *, apart: Sample | None = None) -> BesideFlat:
    """Distance of something to a measurement, with intervals over its units, beside the flat line's.

    Args:
        rows: One normalised profile for all units, or one for each, which is left out with its unit.
        sample: The measurement.
        apart: What `rows` averages, if it was drawn independently of the measurement: its units are left out, too.
    """
    count, n_positions = sample.units.shape
    if rows.shape[1] != n_positions:
        raise UsageError(f"cannot compare a profile of {rows.shape[1]} positions with one of {n_positions}")
    flat, weights = Profile.uniform(n_positions).influence[None], leave_one_out(count)
    left_out = [(weights @ rows if len(rows) > 1 else rows, sample.averages(weights))]
    if apart is not None:
        left_out.append((apart.averages(leave_one_out(len(apart.units))), sample.average[None]))
    ours = [wasserstein(profiles, averages) for profiles, averages in left_out]
    even = [wasserstein(np.broadcast_to(flat, profiles.shape), averages) for profiles, averages in left_out]
    distance, of_flat = (jackknife(*each).interval(least=0.0, most=1.0) for each in (ours, even))
    difference = jackknife(*map(np.subtract, ours, even)).interval(least=-1.0, most=1.0)
    return BesideFlat(distance, of_flat, difference, count if apart is None else min(count, len(apart.units)))


def compare_with_prompts(
    predicted: Profile | Predictions | Sample, measured: Sample | Units, *, generator: np.random.Generator
) -> PromptComparison:
    """Distance of a theory to a measurement, with intervals over prompts, beside the flat line and split-half noise.

    Args:
        predicted: One profile for all prompts; or one row per prompt, which is left out with its prompt; or an average
            over prompts of its own, drawn independently of the measurement's.
        measured: Influence per prompt, raw or normalised.
        generator: Source of halvings and resamples.
    """
    sample = measured if isinstance(measured, Sample) else Sample.of(measured)
    count, apart = len(sample.units), predicted if isinstance(predicted, Sample) else None
    if isinstance(predicted, np.ndarray):
        rows = Sample.of(predicted).units
        if len(rows) != count:
            raise UsageError(f"{len(rows)} predictions for {count} prompts; one for each, or a single Profile")
    else:
        rows = (predicted.average if isinstance(predicted, Sample) else predicted.influence)[None]
    beside = beside_flat(rows, sample, apart=apart)
    flat = Profile.uniform(rows.shape[1]).influence[None]
    draws = draw_weights(count, generator=generator, draws=DRAWS)
    medians = (
        percentile_interval(float(np.median(values)), weighted_median(values, draws), count)
        for values in (wasserstein(rows, sample.units), wasserstein(flat, sample.units))
    )
    noise = split_half_noise(sample, generator=generator)
    return PromptComparison(beside.distance, beside.flat, beside.difference, beside.n_units, noise, *medians)


def split_half_noise(sample: Sample, *, generator: np.random.Generator) -> SplitHalf:
    """W1 between the averages of random halves of the units."""
    units = sample.units
    if len(units) < 2:
        return SplitHalf(float("nan"), float("nan"), float("nan"))
    # By 200 halvings the mean moves by under 3 %.
    first, n_first = halves(len(units), generator=generator, draws=200), len(units) // 2
    contrast = sample.scaled(first / n_first) - sample.scaled((1 - first) / (len(units) - n_first))
    zero = np.zeros((1, units.shape[1]))
    values = np.concatenate([wasserstein(rows @ units, zero) for rows in blocks(contrast, units.shape[1])])
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return SplitHalf(float(values.mean()), float(low), float(high))


def decided(difference: Interval, n_units: int = UNITS_FOR_CLAIM) -> int:
    """The sign of a difference whose interval excludes 0, given enough units for a claim; otherwise 0."""
    if n_units < UNITS_FOR_CLAIM or not difference.excludes(0.0):
        return 0
    return -1 if difference.value < 0 else 1


def distances(predicted: Profile, measured: Profile) -> tuple[dict[str, float], dict[str, float]]:
    """Every registered distance of a prediction to a measurement by its name, and those of the flat line.

    NaN if undefined, infinite if a profile has zeros that the other has not.
    """
    if predicted.n_positions != measured.n_positions:
        raise UsageError(
            f"cannot compare a profile of {predicted.n_positions} positions with one of {measured.n_positions};"
            " both need the same length"
        )
    of_prediction, of_flat = (
        {name: float(METRICS[name](profile.influence, measured.influence)) for name in METRICS}
        for profile in (predicted, Profile.uniform(measured.n_positions))
    )
    return of_prediction, of_flat


def point_statistics(profile: Profile) -> dict[str, Interval]:
    """Every statistic of a profile, without intervals."""
    return {name: Interval(float(STATISTICS[name](profile.influence)), -np.inf, np.inf) for name in STATISTICS}


def summarise(sample: Sample, *, generator: np.random.Generator) -> dict[str, Interval]:
    """Every registered statistic of the average profile, with its interval; those that jump are resampled."""
    n_units = len(sample.units)
    return {
        name: percentile_interval(values[0], values[1:], n_units)
        if name in RESAMPLED
        else jackknife(values).interval(least=-1.0 if name in SIGNED else 0.0, most=1.0)
        for name, values in _statistics_of(sample, generator, DRAWS).items()
    }


def statistic_differences(
    first: Sample, second: Sample, *, generator: np.random.Generator, paired: bool
) -> dict[str, Interval]:
    """Every registered statistic of `first` minus that of `second`, with its interval.

    `paired`: the units of both are the same prompts in the same order, left out and resampled together.
    """
    n_units = min(len(first.units), len(second.units))
    draws = DRAWS if n_units > 1 else 0
    again = deepcopy(generator) if paired else generator  # the same draws of the same prompts
    one, other = _statistics_of(first, generator, draws), _statistics_of(second, again, draws)
    statistics = {}
    for name in one:
        if name in RESAMPLED:
            of_draws = one[name][1:] - other[name][1:]
            statistics[name] = percentile_interval(one[name][0] - other[name][0], of_draws, n_units)
            continue
        without = (one[name] - other[name],) if paired else (one[name] - other[name][0], one[name][0] - other[name])
        statistics[name] = jackknife(*without).interval(least=-1.0, most=1.0)
    return statistics


def _statistics_of(
    sample: Sample, generator: np.random.Generator, draws: int
) -> dict[str, Float64[np.ndarray, "rows"]]:
    """Every statistic of the average, then of averages without a unit, or of resampled units if it jumps."""
    n_units, n_positions = sample.units.shape
    averages = sample.averages(leave_one_out(n_units))
    found = {name: STATISTICS[name](averages) for name in STATISTICS}
    parts = list(blocks(draw_weights(n_units, generator=generator, draws=draws), n_positions))
    for name in RESAMPLED:
        of_draws = [STATISTICS[name](sample.averages(part)) for part in parts]
        found[name] = np.concatenate([found[name][:1], *of_draws])
    return found
