"""Distances and statistics with intervals: the prompts (or seeds) are resampled, never the positions.

Each unit is normalised, then averaged, by its scale where it has one; a bootstrap draw reweights the units, so a
thousand draws are one matrix product. A distance cannot be negative and noise only adds to it, hence its draws lie a
little high; claims rest on the paired difference to the flat line, where that works against the theory, never for it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.comparison.metrics import finite, wasserstein
from posbias.comparison.statistics import STATISTICS
from posbias.errors import UsageError
from posbias.intervals import CONFIDENCE, DRAWS, Interval, expanded_tail, resample_counts
from posbias.profiles import Profile, uniform_profile

UNITS_FOR_CLAIM = 6
"""Independent units below which no interval supports a claim: the widest percentile interval of n units, from their
smallest to their largest, covers the true median with probability 1 - 2^(1-n), which reaches 95 % at n = 6."""
HALVINGS = 200
"""Random halvings behind the split-half noise; its mean then moves by under 3 %."""
HALF_SLACK = 1e-9
"""Relative rounding allowed where cumulated weights, multiples of 1 / units, are exactly one half."""
BLOCK_VALUES = 4_000_000
"""Float64 values of averaged draws held at a time (32 MB)."""

Units = Float64[np.ndarray, "n_units n_positions"]
Predictions = Float64[np.ndarray, "n_predictions n_predicted"]
"""One predicted profile per unit; that the counts and lengths match is checked with a message of our own."""
Weights = Float64[np.ndarray, "draws n_independent"]
Averages = Float64[np.ndarray, "draws n_positions"]
Values = Float64[np.ndarray, "draws"]


@dataclass(frozen=True, eq=False)
class Sample:
    """Profiles of single prompts, or of single (seed, prompt) pairs, over the same positions."""

    units: Units
    """One profile per unit; rows sum to 1."""
    groups: Int64[np.ndarray, "n_units"] | None = None
    """What each unit was drawn with (its initialisation seed) where several units share it; None: all independent."""
    scales: Float64[np.ndarray, "n_units"] | None = None
    """How much each unit counts in an average, > 0: its raw total, where raw influences are averaged and normalised
    once, a ratio that is formed anew on every draw. None: all count the same."""

    @classmethod
    def of(
        cls,
        values: Units,
        groups: Int64[np.ndarray, "n_labels"] | None = None,
        scales: Float64[np.ndarray, "n_scales"] | None = None,
    ) -> "Sample":
        """Normalise raw influence per unit to profiles.

        Raises:
            UsageError: a unit is negative, not finite or all zero, `groups` or `scales` has another length, a scale is
                not a positive number, or both are given.
        """
        totals = values.sum(axis=-1)
        bad = np.flatnonzero(~(np.isfinite(totals) & (totals > 0)) | (values.min(axis=-1) < 0))
        if bad.size:
            raise UsageError(f"prompt {bad[0]} has no profile: its influence must be finite, >= 0 and not all zero")
        if groups is not None and len(groups) != len(values):
            raise UsageError(f"{len(groups)} group labels for {len(values)} prompts; one is needed for each")
        if scales is not None:
            _check_scales(scales, count=len(values), grouped=groups is not None)
        return cls(values / totals[:, None], groups, scales)

    @property
    def average(self) -> Float64[np.ndarray, "n_positions"]:
        """The profile of the sample: the mean over its independent units."""
        units = self.independent
        if self.scales is None:
            mean: np.ndarray = units.mean(axis=0)
            return mean
        return np.asarray(self.scaled(np.full((1, len(units)), 1 / len(units)))[0] @ units)

    def scaled(self, weights: Float64[np.ndarray, "rows n_independent"]) -> Float64[np.ndarray, "rows n_independent"]:
        """Weights of the independent units in an average, times their scales; rows that sum to 1 still do."""
        if self.scales is None:
            return weights
        rows = weights * (self.scales / self.scales.max())
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    @property
    def independent(self) -> Float64[np.ndarray, "n_independent n_positions"]:
        """What is resampled: the units themselves, or their means by group where groups are given."""
        if self.groups is None:
            return self.units
        labels, index = np.unique(self.groups, return_inverse=True)
        members = (index[None, :] == np.arange(len(labels))[:, None]).astype(np.float64)
        means: np.ndarray = (members @ self.units) / members.sum(axis=1, keepdims=True)
        return means


@dataclass(frozen=True)
class SplitHalf:
    """W1 between the averages of two random halves of the units: the noise floor of the measurement.

    The average of all units is closer to the truth than this, by about a factor of two.
    """

    mean: float
    low: float
    """2.5 % quantile over random halvings (NaN with a single unit, as the other two)."""
    high: float
    """97.5 % quantile over random halvings."""


@dataclass(frozen=True)
class PromptComparison:
    """How far a theory and the flat line are from a measurement, with intervals over its independent units."""

    distance: Interval
    """W1 of the theory to the average over units."""
    flat: Interval
    """W1 of the flat line to the same."""
    difference: Interval
    """W1 of the theory minus W1 of the flat line on the same draws: below zero, the theory is closer."""
    noise: SplitHalf
    per_prompt: Interval
    """Median over units of the W1 to the single unit (of the unit's own prediction, where there is one)."""
    per_prompt_flat: Interval
    """The same for the flat line."""
    n_units: int
    """Independent units: prompts, or seeds where several units share one."""

    @property
    def decides(self) -> int:
        """-1: the theory is closer than the flat line; 1: it is farther; 0: the data do not decide."""
        return _decided(self.difference, self.n_units)


def compare_with_prompts(
    predicted: Profile | Predictions, measured: Sample | Units, *, generator: np.random.Generator, draws: int = DRAWS
) -> PromptComparison:
    """Distance of a theory to a measurement, prompts resampled, beside the flat line and the split-half noise.

    Args:
        predicted: One profile for all prompts, or one row per prompt; rows are then resampled with their prompts.
        measured: Influence per prompt, raw or normalised; a `Sample` where prompts share seeds.
        generator: Source of the resamples.
        draws: Bootstrap draws.

    Returns:
        95 % expanded percentile intervals; infinite where there is a single unit.

    Raises:
        UsageError: lengths or prompt counts differ, or a prompt has no profile.
    """
    sample = measured if isinstance(measured, Sample) else Sample.of(measured)
    theory = _theory_sample(predicted, sample)
    flat = uniform_profile(sample.units.shape[1]).influence
    paired = theory.independent if len(theory.units) > 1 else theory.units
    observed = sample.independent
    weights = draw_weights(len(observed), generator=generator, draws=draws)

    def distances(rows: Weights) -> Float64[np.ndarray, "two draws"]:
        averages = sample.scaled(rows) @ observed
        predictions = rows @ paired if len(paired) > 1 else np.broadcast_to(paired, averages.shape)
        return _gaps(averages, predictions, flat)

    point = distances(np.full((1, len(observed)), 1 / len(observed)))[:, 0]
    drawn = np.concatenate([distances(rows) for rows in blocks(weights, len(flat))], axis=1)
    return PromptComparison(
        distance=interval_of(point[0], drawn[0], len(observed)),
        flat=interval_of(point[1], drawn[1], len(observed)),
        difference=interval_of(point[0] - point[1], drawn[0] - drawn[1], len(observed)),
        noise=split_half_noise(sample, generator=generator),
        per_prompt=_median_interval(wasserstein(theory.units, sample.units), sample, weights),
        per_prompt_flat=_median_interval(wasserstein(flat[None], sample.units), sample, weights),
        n_units=len(observed),
    )


def compare_samples(
    predicted: Sample, measured: Sample, *, generator: np.random.Generator, draws: int = DRAWS
) -> PromptComparison:
    """The same where the prediction is an average over prompts of its own: both sides are resampled, independently.

    Args:
        predicted: Units that were drawn independently of the measurement's.
        measured: Influence per prompt.
        generator: Source of the resamples.
        draws: Bootstrap draws.

    Returns:
        95 % expanded percentile intervals, `n_units` those of the smaller sample; infinite where one has a single unit.

    Raises:
        UsageError: lengths differ.
    """
    gap = contrast(measured, predicted, generator=generator, draws=draws)
    weights = draw_weights(len(measured.independent), generator=generator, draws=draws)
    flat = uniform_profile(measured.units.shape[1]).influence
    return PromptComparison(
        distance=gap.distance,
        flat=gap.flat,
        difference=gap.difference,
        noise=split_half_noise(measured, generator=generator),
        per_prompt=_median_interval(wasserstein(predicted.average[None], measured.units), measured, weights),
        per_prompt_flat=_median_interval(wasserstein(flat[None], measured.units), measured, weights),
        n_units=gap.n_units,
    )


def split_half_noise(sample: Sample, *, generator: np.random.Generator, halvings: int = HALVINGS) -> SplitHalf:
    """W1 between the averages of random halves of the independent units."""
    units = sample.independent
    if len(units) < 2:
        return SplitHalf(float("nan"), float("nan"), float("nan"))
    order = generator.permuted(np.tile(np.arange(len(units)), (halvings, 1)), axis=1)
    in_first = (np.argsort(order, axis=1) < len(units) // 2).astype(np.float64)
    n_first = len(units) // 2
    halves = in_first / n_first, (1 - in_first) / (len(units) - n_first)
    contrast = sample.scaled(halves[0]) - sample.scaled(halves[1])
    zero = np.zeros((1, units.shape[1]))
    values = np.concatenate([wasserstein(rows @ units, zero) for rows in blocks(contrast, units.shape[1])])
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return SplitHalf(float(values.mean()), float(low), float(high))


def summarise(sample: Sample, *, generator: np.random.Generator, draws: int = DRAWS) -> dict[str, Interval]:
    """Every registered statistic of the average profile, with its interval over the independent units."""
    units = sample.independent
    weights = sample.scaled(draw_weights(len(units), generator=generator, draws=draws))
    points = sample.average
    drawn = _statistics_of_draws(units, weights)
    return {name: interval_of(float(STATISTICS[name](points)), drawn[name], len(units)) for name in STATISTICS}


@dataclass(frozen=True)
class Contrast:
    """Two measurements of the same kind beside each other: the model as trained and at its birth."""

    statistics: dict[str, Interval]
    """First minus second, per registered statistic; the two are resampled independently."""
    distance: Interval
    """W1 between the two averages."""
    flat: Interval
    """W1 of the flat line to the first."""
    difference: Interval
    """`distance` minus `flat` on the same draws: below zero, the second is closer to the first than a flat line."""
    n_units: int
    """Independent units of the smaller sample."""

    @property
    def decides(self) -> int:
        """-1: the second resembles the first more than a flat line does; 1: less; 0: the data do not decide."""
        return _decided(self.difference, self.n_units)


def contrast(first: Sample, second: Sample, *, generator: np.random.Generator, draws: int = DRAWS) -> Contrast:
    """Statistics of `first` minus those of `second`, and the distance between them, with intervals.

    Raises:
        UsageError: the samples have different lengths.
    """
    units, others = first.independent, second.independent
    if units.shape[1] != others.shape[1]:
        raise UsageError(f"cannot contrast profiles of {units.shape[1]} and {others.shape[1]} positions")
    n_units = min(len(units), len(others))
    draws = draws if n_units > 1 else 0
    weights = first.scaled(draw_weights(len(units), generator=generator, draws=draws))
    other_weights = second.scaled(draw_weights(len(others), generator=generator, draws=draws))
    flat = uniform_profile(units.shape[1]).influence
    parts = zip(blocks(weights, 2 * len(flat)), blocks(other_weights, 2 * len(flat)), strict=True)
    drawn = np.concatenate([_gaps(rows @ units, rest @ others, flat) for rows, rest in parts], axis=1)
    gap, flat_gap = _gaps(first.average[None], second.average[None], flat)[:, 0]
    own, other = _statistics_of_draws(units, weights), _statistics_of_draws(others, other_weights)
    points = {name: float(STATISTICS[name](first.average) - STATISTICS[name](second.average)) for name in STATISTICS}
    return Contrast(
        statistics={name: interval_of(points[name], own[name] - other[name], n_units) for name in STATISTICS},
        distance=interval_of(gap, drawn[0], n_units),
        flat=interval_of(flat_gap, drawn[1], n_units),
        difference=interval_of(gap - flat_gap, drawn[0] - drawn[1], n_units),
        n_units=n_units,
    )


def _check_scales(scales: Float64[np.ndarray, "n_scales"], *, count: int, grouped: bool) -> None:
    if grouped:
        raise UsageError("prompts that share seeds are averaged as profiles; scales are for independent prompts")
    if len(scales) != count:
        raise UsageError(f"{len(scales)} scales for {count} prompts; one is needed for each")
    if not np.all(np.isfinite(scales) & (scales > 0)):
        raise UsageError(f"scales must be finite and > 0, got {scales.min()} to {scales.max()}")


def _decided(difference: Interval, n_units: int) -> int:
    """The sign of a difference whose interval excludes 0, where there are units enough for a claim; else 0."""
    if n_units < UNITS_FOR_CLAIM or not difference.excludes(0.0):
        return 0
    return -1 if difference.value < 0 else 1


def _gaps(
    averages: Averages, others: Averages, flat: Float64[np.ndarray, "n_positions"]
) -> Float64[np.ndarray, "two draws"]:
    """W1 to the averages: of the other sample's, and of the flat line."""
    return np.stack([wasserstein(others, averages), wasserstein(flat[None], averages)])


def draw_weights(n_units: int, *, generator: np.random.Generator, draws: int = DRAWS) -> Weights:
    """Bootstrap draws as weights of the units, each row summing to 1; no draws from a single unit."""
    if n_units < 2:
        return np.zeros((0, n_units))
    weights: np.ndarray = resample_counts(n_units, generator=generator, draws=draws) / n_units
    return weights


def blocks(weights: Weights, n_positions: int) -> list[Float64[np.ndarray, "_ n_independent"]]:
    """The draws in blocks whose averages fit in memory."""
    size = max(1, BLOCK_VALUES // n_positions)
    return [weights[start : start + size] for start in range(0, max(len(weights), 1), size)]


def interval_of(value: float, drawn: Values, n_units: int) -> Interval:
    """Expanded percentile interval of the draws, widened to contain the estimate; infinite without draws.

    Draws that leave the statistic undefined (NaN) are left out; infinite draws count, and may make an end infinite.
    Widening matters where a distance is at the noise floor.
    """
    defined = np.sort(drawn[~np.isnan(drawn)])
    if defined.size == 0:
        return Interval(float(value), -np.inf, np.inf)
    tail = expanded_tail(n_units) * (defined.size - 1)
    low = _between(defined[int(np.floor(tail))], defined[int(np.ceil(tail))], tail % 1)
    high = _between(defined[-1 - int(np.floor(tail))], defined[-1 - int(np.ceil(tail))], tail % 1)
    if np.isnan(value):
        return Interval(float(value), low, high)
    return Interval(float(value), min(low, float(value)), max(high, float(value)))


def _between(outer: float, inner: float, share: float) -> float:
    """Linear interpolation; the outer draw where one of the two is infinite, which errs on the wide side."""
    if outer == inner or not (np.isfinite(outer) and np.isfinite(inner)):
        return float(outer)
    return float(outer + share * (inner - outer))


def interval_record(interval: Interval) -> dict[str, float | None]:
    """An interval for a record; None where an end is infinite or undefined."""
    return {name: finite(value) for name, value in interval.as_record().items()}


def _theory_sample(predicted: Profile | Predictions, sample: Sample) -> Sample:
    count, n_positions = sample.units.shape
    if isinstance(predicted, Profile):
        theory = Sample(predicted.influence[None])
    else:
        theory = Sample.of(predicted, sample.groups if len(predicted) == count else None)
        if len(predicted) != count:
            raise UsageError(f"{len(predicted)} predictions for {count} prompts; one for each, or a single Profile")
    if theory.units.shape[1] != n_positions:
        raise UsageError(f"cannot compare a profile of {theory.units.shape[1]} positions with one of {n_positions}")
    return theory


def _median_interval(values: Float64[np.ndarray, "n_units"], sample: Sample, weights: Weights) -> Interval:
    """Median over units; each draw is the weighted median, a unit weighing what its group weighs."""
    index = np.arange(len(values)) if sample.groups is None else np.unique(sample.groups, return_inverse=True)[1]
    drawn = np.empty(0)
    if len(weights):
        drawn = weighted_median(values, weights[:, index])
    return interval_of(float(np.median(values)), drawn, weights.shape[1])


def weighted_median(
    values: Float64[np.ndarray, "n_units"], weights: Float64[np.ndarray, "draws n_units"]
) -> Float64[np.ndarray, "draws"]:
    """Median of the values repeated in proportion to their weights, midway where half the weight lies on either side.

    Equal to `np.median` of the repeated values: the mean of the smallest value with at least half of the weight at or
    below it and of the smallest with more than half.

    Args:
        values: Finite.
        weights: >= 0, one row per draw, not all zero.
    """
    order = np.argsort(values)
    cumulative = np.cumsum(weights[:, order], axis=1)
    half = cumulative[:, -1:] / 2
    slack = half * HALF_SLACK
    lower = np.argmax(cumulative >= half - slack, axis=1)
    upper = np.argmax(cumulative > half + slack, axis=1)
    ordered = values[order]
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


def _statistics_of_draws(units: Units, weights: Weights) -> dict[str, Values]:
    """Every registered statistic of every draw's average, block by block."""
    collected: dict[str, list[Values]] = {name: [] for name in STATISTICS}
    for rows in blocks(weights, units.shape[1]):
        average: Averages = rows @ units
        for name, values in collected.items():
            values.append(STATISTICS[name](average))
    return {name: np.concatenate(values) for name, values in collected.items()}
