"""The correlation of influence with behaviour: do the positions that weigh more also get used more?

Rank correlation over positions, plainly and with position itself held fixed: both curves often are U-shaped or
monotone for reasons of their own, and then agree without any further relation. Intervals resample samples, the same
ones in both curves; the positions are those that were chosen, and the permutation p-value speaks of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64
from pydantic import BeforeValidator

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.statistics import Interval, StoredInterval, StoredNumber, draw_weights, holm, percentile_interval

PERMUTATIONS = 5000
"""Random permutations of positions when there are too many to go through all."""
EXACT_POSITIONS = 7
"""Positions up to which all permutations are gone through (5040)."""
LEVEL = 0.05
"""Largest p-value, of permutations or corrected, that establishes a correlation."""
ZERO_VARIANCE = 1e-12
"""Share of a rank variance that counts as none left, far above rounding and far below one rank."""

CONTROLS: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "position": ("position",),
    "ends": ("ends",),
    "position_and_ends": ("position", "ends"),
}
"""What may be held fixed: the position itself, the distance to the nearer end, or both."""

Ranks = Float64[np.ndarray, "draws n_positions"]
Draws = Float64[np.ndarray, "draws"]
Fixed = Float64[np.ndarray, "n_fixed n_positions"]
Rows = Float64[np.ndarray, "_ _"]
"""A table whose shape is checked with a message of our own, or is one of several groups'."""
Weights = Rows
"""One row per draw, one column per sample, each row summing to 1."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two quantities of one model at one length, on the same samples and positions."""

    first: Rows
    """For instance the share of influence of the item at each position; NaN if not measured."""
    second: Rows
    """For instance whether the answer was right."""
    positions: tuple[int, ...]
    """Positions of the columns, ascending."""
    n_items: int
    source: str = ""
    """Names whose samples these are: pairs of one source share the sample of each row; empty: those of no other."""

    def __post_init__(self) -> None:
        if self.first.shape != self.second.shape or self.first.shape[1] != len(self.positions):
            raise UsageError(
                f"a correlation needs two equal tables with a column for each of {len(self.positions)} positions, got "
                f"{self.first.shape} and {self.second.shape}"
            )
        if np.isinf(self.first).any() or np.isinf(self.second).any():
            raise UsageError("a correlation needs finite values, or NaN if nothing was measured; got an infinite one")

    @property
    def complete(self) -> Bool[np.ndarray, "n_samples"]:
        """Does each sample have both quantities at every position?"""
        return np.asarray(~(np.isnan(self.first) | np.isnan(self.second)).any(axis=1))

    def fixed(self, controls: Sequence[str]) -> Fixed:
        """Values of the controls at each position."""
        positions = np.array(self.positions, dtype=np.float64)
        values = {"position": positions, "ends": np.minimum(positions, self.n_items - 1 - positions)}
        return np.array([values[name] for name in controls]).reshape(-1, len(positions))


@dataclass(frozen=True)
class RankCorrelation:
    """One rank correlation over positions."""

    controlled: str
    """Key of `CONTROLS`: what was held fixed."""
    value: StoredInterval
    """Value in -1 ... 1, with its interval over samples; NaN if a curve is constant or too few positions are left."""
    p: StoredNumber
    """Share of permutations of the positions that correlate at least as strongly, either sign; NaN as the value."""
    established: bool
    """True if the interval leaves out 0, with samples enough for a claim, and permutations agree at 5 %."""
    adjusted_p: float | None = None
    """`p` corrected for the number of correlations, if there were several (`corrected`)."""

    @property
    def p_value(self) -> float:
        """The corrected p-value, or `p` if there is none."""
        return self.p if self.adjusted_p is None else self.adjusted_p


def _nested(stored: Any) -> Any:
    """A stored rank correlation; older records hold its interval among its other numbers."""
    flat = isinstance(stored, Mapping) and not isinstance(stored["value"], Mapping | Interval)
    return {**stored, "value": Interval.of_record(stored)} if flat else stored


@dataclass(frozen=True)
class Correlations:
    """How two curves over positions hang together."""

    correlations: tuple[Annotated[RankCorrelation, BeforeValidator(_nested)], ...]
    """One for each of `CONTROLS`."""
    within: StoredInterval
    """Correlation over examples of what positions and samples leave: does an example whose item weighs more than
    position and sample suggest also do better? NaN if nothing varies."""
    n_positions: int
    n_samples: int

    def of(self, controlled: str) -> RankCorrelation:
        """The correlation with one of `CONTROLS` held fixed."""
        return next(entry for entry in self.correlations if entry.controlled == controlled)


class SeriesName(NamedTuple):
    """Name of a series of influence."""

    source: str
    """"measured", or a theory."""
    kind: str | None
    what: str
    """"gold" (the answer's item) or "place" (a position where another item stands)."""

    @property
    def array(self) -> str:
        """Name of its array in a record."""
        return "/".join(["influence", *filter(None, self)])


@dataclass(frozen=True)
class InfluenceSeries:
    """A series of influence over positions, with its correlations, as a record holds it."""

    source: str
    kind: str | None
    what: str
    means: tuple[StoredInterval, ...] = ()
    """Mean share of influence at each position."""
    correlations: Mapping[str, Correlations] = field(default_factory=dict)
    """Correlations with each measure of behaviour."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of runs that are pooled, by measure."""
    group: str = ""
    """Title of its group of runs, if it belongs to only one."""

    @property
    def name(self) -> SeriesName:
        """Its name, without what it is correlated with."""
        return SeriesName(self.source, self.kind, self.what)

    @property
    def measured(self) -> bool:
        """True for a measurement, False for a theory's prediction."""
        return self.source == "measured"


@checked
def correlate_pairs(pairs: Sequence[Pair] | Pair, *, seed: int = 0) -> Correlations:
    """Rank correlations over positions of one model, or pooled over several models and lengths, one pair each.

    Ranks of the mean curves are formed within each model and length, then cleared of the ranks of what is held fixed
    (partial rank correlation), then correlated over all positions together. Resamples draw the samples of each pair
    anew, those that pairs share (`Pair.samples`) together; permutations move the positions within each pair. Samples
    with a gap are left out.

    Raises:
        UsageError: no pairs, or no sample that has both quantities at every position.
    """
    given = [pairs] if isinstance(pairs, Pair) else list(pairs)
    if not given:
        raise UsageError("no pair of curves to correlate; give at least 1")
    n_samples = min(int(pair.complete.sum()) for pair in given)
    if not n_samples:
        raise UsageError("no sample has both quantities at every position, so nothing can be correlated")
    generator = np.random.default_rng(seed)
    weights = drawn_together(given, generator=generator)
    groups = [replace(pair, first=pair.first[pair.complete], second=pair.second[pair.complete]) for pair in given]
    return Correlations(
        correlations=tuple(_correlation(name, groups, weights, generator) for name in CONTROLS),
        within=_interval(_within(groups, weights), n_samples),
        n_positions=sum(len(group.positions) for group in groups),
        n_samples=n_samples,
    )


def corrected(entries: Sequence[InfluenceSeries]) -> tuple[InfluenceSeries, ...]:
    """The series with p-values corrected for their number (Holm, for each control by itself).

    A correlation then counts as established only if the corrected p-value is at most 0.05, too. All correlations of all
    series, with every measure, are one family.
    """
    every = [rank for entry in entries for found in entry.correlations.values() for rank in found.correlations]
    adjusted: dict[int, RankCorrelation] = {}
    for controlled in CONTROLS:
        family = [rank for rank in every if rank.controlled == controlled and not np.isnan(rank.p)]
        for rank, p in zip(family, holm(np.array([rank.p for rank in family])).tolist(), strict=True):
            adjusted[id(rank)] = replace(rank, adjusted_p=p, established=rank.established and p <= LEVEL)

    def of(found: Correlations) -> Correlations:
        return replace(found, correlations=tuple(adjusted.get(id(rank), rank) for rank in found.correlations))

    return tuple(
        replace(entry, correlations={measure: of(found) for measure, found in entry.correlations.items()})
        for entry in entries
    )


def drawn_together(pairs: Sequence[Pair], *, generator: np.random.Generator) -> list[Weights]:
    """Bootstrap weights of the complete samples of several pairs, row by row belonging to the same draw.

    Two models that were given the same samples do not give independent evidence about samples, so one draw decides for
    both; runs on different samples are independent.

    Returns:
        For every pair the plain mean in the first row, then the draws; a draw that takes none of a pair's samples has
        NaN there. No draws at all if a pair has a single sample and shares none.
    """
    rows = [np.flatnonzero(pair.complete) for pair in pairs]
    sources = [pair.source or number for number, pair in enumerate(pairs)]
    weights: list[Weights] = [np.zeros((0, 0))] * len(pairs)
    for source in dict.fromkeys(sources):
        members = [number for number, of in enumerate(sources) if of == source]
        together = np.unique(np.concatenate([rows[number] for number in members]))
        draws = draw_weights(len(together), generator=generator)
        for number in members:
            counts = draws[:, np.searchsorted(together, rows[number])]
            totals = counts.sum(axis=1, keepdims=True)
            shares = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
            weights[number] = np.concatenate([np.full((1, counts.shape[1]), 1 / counts.shape[1]), shares])
    fewest = min(len(each) for each in weights)
    return [each[:fewest] for each in weights]


def _correlation(
    name: str, groups: Sequence[Pair], weights: Sequence[Weights], generator: np.random.Generator
) -> RankCorrelation:
    fixed = [group.fixed(CONTROLS[name]) for group in groups]
    parts = list(zip(weights, groups, fixed, strict=True))
    first = [_cleared(rows @ group.first, controls) for rows, group, controls in parts]
    second = [_cleared(rows @ group.second, controls) for rows, group, controls in parts]
    freedom = sum(len(group.positions) - 1 - len(controls) for _, group, controls in parts)
    draws = _pooled(first, second, freedom)
    p_value = float("nan")
    if not np.isnan(draws[0]):
        moved = _permuted([rows[:1] for rows in second], generator)
        # Cleared again, or what is held fixed would come back with the new order and make chance look weak.
        shuffled = [_freed(rows, controls) for rows, controls in zip(moved, fixed, strict=True)]
        by_chance = _pooled([np.repeat(rows[:1], len(shuffled[0]), axis=0) for rows in first], shuffled, freedom)
        # An order that leaves nothing to correlate counts as one that does as well.
        p_value = float(np.mean(~(np.abs(by_chance) < abs(draws[0]) - ZERO_VARIANCE)))
    n_samples = min(len(group.first) for group in groups)
    value = _interval(draws, n_samples)
    established = n_samples >= SAMPLES_FOR_CLAIM and value.excludes(0.0) and p_value <= LEVEL
    return RankCorrelation(name, value, p_value, established)


def _cleared(curves: Ranks, fixed: Fixed) -> Ranks:
    """Ranks of each row, 0 ... 1, less what a linear function of the ranks of `fixed` explains of them."""
    from scipy.stats import rankdata

    # Rounding must not decide a rank between equal means.
    return _freed(rankdata(np.round(curves, 12), axis=1) / curves.shape[1], fixed)


def _freed(rows: Ranks, fixed: Fixed) -> Ranks:
    """Rows less what a linear function of the ranks of `fixed` explains of them."""
    from scipy.stats import rankdata

    design = np.column_stack([np.ones(rows.shape[1]), *(rankdata(row) for row in fixed)])
    return np.asarray(rows - rows @ (design @ np.linalg.pinv(design)))


def _pooled(first_groups: Sequence[Rows], second_groups: Sequence[Rows], freedom: int) -> Draws:
    """Correlation of all columns of all groups together; NaN if a side has no variance or no freedom is left."""
    first, second = np.concatenate(first_groups, axis=1), np.concatenate(second_groups, axis=1)
    draws = _ratio((first * second).sum(axis=1), np.square(first).sum(axis=1), np.square(second).sum(axis=1))
    return draws if freedom >= 2 else np.full_like(draws, np.nan)


def _ratio(product: Draws, first_square: Draws, second_square: Draws) -> Draws:
    """A correlation from sums of products and of squares; NaN if a side has no variance."""
    defined = (first_square > ZERO_VARIANCE) & (second_square > ZERO_VARIANCE)
    scale = np.sqrt(np.where(defined, first_square * second_square, 1.0))
    return np.where(defined, np.clip(product / scale, -1, 1), np.nan)


def _permuted(rows: Sequence[Rows], generator: np.random.Generator) -> list[Rows]:
    """The columns of each group in other orders; all orders of a single short group."""
    if len(rows) == 1 and rows[0].shape[1] <= EXACT_POSITIONS:
        return [rows[0][0][np.array(list(permutations(range(rows[0].shape[1]))))]]
    moved = [generator.permuted(np.repeat(row, PERMUTATIONS, axis=0), axis=1) for row in rows]
    return [np.concatenate([row, orders]) for row, orders in zip(rows, moved, strict=True)]


def _within(groups: Sequence[Pair], weights: Sequence[Weights]) -> Draws:
    """Correlation over examples after samples' and positions' means are taken out, groups pooled."""
    product, first_square, second_square = (np.zeros(len(weights[0])) for _ in range(3))
    for group, rows in zip(groups, weights, strict=True):
        first, second = _standardised(group.first), _standardised(group.second)
        first_centre, second_centre = rows @ first, rows @ second
        product = product + (rows @ (first * second) - first_centre * second_centre).sum(axis=1)
        first_square = first_square + (rows @ np.square(first) - np.square(first_centre)).sum(axis=1)
        second_square = second_square + (rows @ np.square(second) - np.square(second_centre)).sum(axis=1)
    return _ratio(product, first_square, second_square)


def _standardised(table: Rows) -> Rows:
    """A table less its rows' means, of standard deviation 1: each group counts alike, whatever its units; 0 if only
    rounding is left.
    """
    centred: np.ndarray = table - table.mean(axis=1, keepdims=True)
    spread = float(centred.std())
    rounding = ZERO_VARIANCE * max(1.0, float(np.abs(table).max()))
    return np.zeros_like(centred) if spread <= rounding else centred / spread


def _interval(draws: Draws, n_samples: int) -> Interval:
    """The first value with the interval of the others; infinite without a value, or of a single sample."""
    if len(draws) < 2 or n_samples < 2 or np.isnan(draws[0]):
        return Interval(float(draws[0]), -math.inf, math.inf)
    return percentile_interval(float(draws[0]), draws[1:], n_samples)
