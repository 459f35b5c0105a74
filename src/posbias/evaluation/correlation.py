"""The correlation of influence with behaviour: do the positions that weigh more also get used more?

Rank correlation over positions, plainly and with position itself held fixed: both curves often are U-shaped or
monotone for reasons of their own, and then agree without any further relation. Intervals resample samples, the same
ones in both curves; the positions are those that were chosen, and the permutation p-value speaks of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from pydantic import BeforeValidator

from posbias.checks import checked
from posbias.comparison.metrics import finite
from posbias.errors import UsageError
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.statistics import Interval, StoredInterval, StoredNumber, draw_weights, holm, percentile_interval

PERMUTATIONS = 5000
"""Random permutations of positions where there are too many to go through all."""
EXACT_POSITIONS = 7
"""Positions up to which all permutations are gone through (5040)."""
LEVEL = 0.05
"""Of a permutation p-value, and of a corrected one."""
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
Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two quantities of one model at one length, on the same samples and positions."""

    first: Rows
    """For instance the share of influence of the item at each position; NaN where not measured."""
    second: Rows
    """For instance whether the answer was right."""
    positions: tuple[int, ...]
    """Of the columns, ascending."""
    n_items: int
    samples: Names = ()
    """Name of each row's sample, which other pairs may share; empty: samples of no other pair."""

    def __post_init__(self) -> None:
        if self.samples and not len(self.samples) == len(set(self.samples)) == len(self.first):
            raise UsageError(
                f"a correlation needs a different name for each of {len(self.first)} samples, or none at all, got "
                f"{len(set(self.samples))}"
            )
        if self.first.shape != self.second.shape or self.first.shape[1] != len(self.positions):
            raise UsageError(
                f"a correlation needs two equal tables with a column for each of {len(self.positions)} positions, got "
                f"{self.first.shape} and {self.second.shape}"
            )
        if np.isinf(self.first).any() or np.isinf(self.second).any():
            raise UsageError(
                "a correlation needs finite values, or NaN where nothing was measured; got an infinite one"
            )

    @property
    def complete(self) -> "Pair":
        """The samples that have both quantities at every position; there may be none."""
        there = ~(np.isnan(self.first).any(axis=1) | np.isnan(self.second).any(axis=1))
        names = tuple(name for name, kept in zip(self.samples, there, strict=False) if kept)
        return Pair(self.first[there], self.second[there], self.positions, self.n_items, names)

    def fixed(self, held: Names) -> Fixed:
        """What is held fixed, per position."""
        positions = np.array(self.positions, dtype=np.float64)
        known = {"position": positions, "ends": np.minimum(positions, self.n_items - 1 - positions)}
        return np.array([known[name] for name in held]).reshape(-1, len(positions))

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class RankCorrelation:
    """One rank correlation over positions."""

    controlled: str
    """Key of `CONTROLS`: what was held fixed."""
    value: StoredInterval
    """In -1 ... 1; NaN if a curve is constant, or too few positions are left. Interval over samples."""
    p: StoredNumber
    """Share of permutations of the positions that correlate at least as strongly, either sign; NaN as the value."""
    established: bool
    """Whether the interval leaves out 0, with samples enough for a claim, and permutations agree at 5 %."""
    adjusted_p: float | None = None
    """`p` corrected for the number of correlations, if there were several (`correct_for_number`)."""

    @property
    def p_value(self) -> float:
        """The corrected p-value, or `p` if there is none."""
        return self.p if self.adjusted_p is None else self.adjusted_p

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "controlled": self.controlled,
            **self.value.as_record(),
            "p": finite(self.p),
            "established": self.established,
        }


def _nested(stored: Any) -> Any:
    """A stored rank correlation with its interval as one value."""
    return stored if isinstance(stored, RankCorrelation) else {**stored, "value": Interval.of_record(stored)}


@dataclass(frozen=True)
class Correlations:
    """How two curves over positions hang together."""

    correlations: tuple[Annotated[RankCorrelation, BeforeValidator(_nested)], ...]
    """One for each of `CONTROLS`."""
    within: StoredInterval
    """Correlation over examples of what positions and samples leave: does an example whose item weighs more than
    position and sample let expect also do better? NaN where nothing varies."""
    n_positions: int
    n_samples: int
    n_groups: int
    """Models and lengths pooled; ranks are formed within each."""

    def of(self, controlled: str) -> RankCorrelation:
        """The correlation with that held fixed."""
        return next(entry for entry in self.correlations if entry.controlled == controlled)

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            **vars(self),
            "correlations": [entry.as_record() for entry in self.correlations],
            "within": self.within.as_record(),
        }


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
    """By measure of behaviour."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By measure, the groups of runs that are pooled."""
    group: str = ""
    """Title of the one group of runs that it is of."""

    @property
    def name(self) -> SeriesName:
        """Its name, without what it is correlated with."""
        return SeriesName(self.source, self.kind, self.what)

    @property
    def measured(self) -> bool:
        """Whether it is a measurement, rather than a theory's prediction."""
        return self.source == "measured"


@checked
def correlate_pairs(pairs: Sequence[Pair] | Pair, *, seed: int = 0) -> Correlations:
    """Rank correlations over positions of one model, or pooled over several models and lengths, one pair each.

    Ranks of the mean curves are formed within each model and length, then cleared of the ranks of what is held fixed
    (partial rank correlation), then correlated over all positions together. Resamples draw the samples of each pair
    anew, those that pairs share (`Pair.samples`) together; permutations move the positions within each pair. Samples
    with a gap are left out.

    Raises:
        UsageError: nothing given, or no sample that has both quantities at every position.
    """
    groups = [pair.complete for pair in ([pairs] if isinstance(pairs, Pair) else pairs)]
    if not groups:
        raise UsageError("no pair of curves to correlate; give at least 1")
    n_samples = min(map(len, groups))
    if not n_samples:
        raise UsageError("no sample has both quantities at every position, so nothing can be correlated")
    generator = np.random.default_rng(seed)
    weights = drawn_together([group.samples or len(group) for group in groups], generator=generator)
    return Correlations(
        correlations=tuple(_correlation(name, groups, weights, generator) for name in CONTROLS),
        within=_interval(_within(groups, weights), n_samples),
        n_positions=sum(len(group.positions) for group in groups),
        n_samples=n_samples,
        n_groups=len(groups),
    )


def correct_for_number(entries: Sequence[Mapping[str, Any]]) -> None:
    """Correct the p-values of stored correlations for their number (Holm, for each control by itself), in place.

    One then counts as established only where the corrected p-value is at most 0.05, too. The `correlations` {measure:
    Correlations.as_record} of all entries are one family.
    """
    for controlled in CONTROLS:
        family = [
            correlation
            for entry in entries
            for found in entry["correlations"].values()
            for correlation in found["correlations"]
            if correlation["controlled"] == controlled and correlation["p"] is not None
        ]
        adjusted = holm(np.array([correlation["p"] for correlation in family]))
        for correlation, p_value in zip(family, adjusted, strict=True):
            correlation["adjusted_p"] = float(p_value)
            correlation["established"] = bool(correlation["established"] and p_value <= LEVEL)


def drawn_together(samples: Sequence[Names | int], *, generator: np.random.Generator) -> list[Weights]:
    """Bootstrap weights of the samples behind several pairs, row by row belonging to the same draw.

    Two models that were given the same samples do not give independent evidence about samples, so one draw decides for
    both; runs on different samples are independent.

    Args:
        samples: Names of the samples of each pair, or how many where none is shared.

    Returns:
        For every pair the plain mean in the first row, then the draws; a draw that takes none of a pair's samples has
        NaN there. No draws at all where a pair has a single sample and shares none.
    """
    named: list[Sequence[object]] = [
        [(number, row) for row in range(own)] if isinstance(own, int) else own for number, own in enumerate(samples)
    ]
    weights: dict[int, Weights] = {}
    for members in _connected(named):
        together = list(dict.fromkeys(name for member in members for name in named[member]))
        columns = {name: column for column, name in enumerate(together)}
        drawn = draw_weights(len(together), generator=generator)
        for member in members:
            own = drawn[:, [columns[name] for name in named[member]]]
            totals = own.sum(axis=1, keepdims=True)
            shares = np.divide(own, totals, out=np.full_like(own, np.nan), where=totals > 0)
            weights[member] = np.concatenate([np.full((1, own.shape[1]), 1 / own.shape[1]), shares])
    fewest = min(len(rows) for rows in weights.values())
    return [weights[number][:fewest] for number in range(len(named))]


def _connected(named: Sequence[Sequence[object]]) -> list[list[int]]:
    """Numbers of pairs that share samples, directly or by way of others; by the last pair of each part."""
    from scipy.sparse.csgraph import connected_components

    sets = list(map(set, named))
    shared = np.array([[not own.isdisjoint(other) for other in sets] for own in sets])
    count, parts = connected_components(shared)
    return sorted((np.flatnonzero(parts == part).tolist() for part in range(count)), key=max)


def _correlation(
    name: str, groups: Sequence[Pair], weights: Sequence[Weights], generator: np.random.Generator
) -> RankCorrelation:
    fixed = [group.fixed(CONTROLS[name]) for group in groups]
    parts = list(zip(weights, groups, fixed, strict=True))
    left = [_cleared(rows @ group.first, held) for rows, group, held in parts]
    right = [_cleared(rows @ group.second, held) for rows, group, held in parts]
    freedom = sum(len(group.positions) - 1 - len(held) for _, group, held in parts)
    found = _pooled(left, right, freedom)
    p_value = float("nan")
    if not np.isnan(found[0]):
        moved = _permuted([rows[:1] for rows in right], generator)
        # Cleared again, or what is held fixed would come back with the new order and make chance look weak.
        shuffled = [_freed(rows, held) for rows, held in zip(moved, fixed, strict=True)]
        by_chance = _pooled([np.repeat(rows[:1], len(shuffled[0]), axis=0) for rows in left], shuffled, freedom)
        # An order that leaves nothing to correlate counts as one that does as well.
        p_value = float(np.mean(~(np.abs(by_chance) < abs(found[0]) - ZERO_VARIANCE)))
    n_samples = min(map(len, groups))
    value = _interval(found, n_samples)
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


def _pooled(left: Sequence[Rows], right: Sequence[Rows], freedom: int) -> Draws:
    """Correlation of all columns of all groups together; NaN where a side has no variance or no freedom is left."""
    first, second = np.concatenate(left, axis=1), np.concatenate(right, axis=1)
    found = _ratio((first * second).sum(axis=1), np.square(first).sum(axis=1), np.square(second).sum(axis=1))
    return found if freedom >= 2 else np.full_like(found, np.nan)


def _ratio(product: Draws, square: Draws, other: Draws) -> Draws:
    """A correlation from sums of products and of squares; NaN where a side has no variance."""
    defined = (square > ZERO_VARIANCE) & (other > ZERO_VARIANCE)
    scale = np.sqrt(np.where(defined, square * other, 1.0))
    return np.where(defined, np.clip(product / scale, -1, 1), np.nan)


def _permuted(rows: Sequence[Rows], generator: np.random.Generator) -> list[Rows]:
    """The columns of each group in other orders; all orders of a single short group."""
    if len(rows) == 1 and rows[0].shape[1] <= EXACT_POSITIONS:
        return [rows[0][0][np.array(list(permutations(range(rows[0].shape[1]))))]]
    moved = [generator.permuted(np.repeat(row, PERMUTATIONS, axis=0), axis=1) for row in rows]
    return [np.concatenate([row, others]) for row, others in zip(rows, moved, strict=True)]


def _within(groups: Sequence[Pair], weights: Sequence[Weights]) -> Draws:
    """Correlation over examples after samples' and positions' means are taken out, groups pooled."""
    product, square, other = (np.zeros(len(weights[0])) for _ in range(3))
    for group, rows in zip(groups, weights, strict=True):
        left, right = _standardised(group.first), _standardised(group.second)
        centre, other_centre = rows @ left, rows @ right
        product = product + (rows @ (left * right) - centre * other_centre).sum(axis=1)
        square = square + (rows @ np.square(left) - np.square(centre)).sum(axis=1)
        other = other + (rows @ np.square(right) - np.square(other_centre)).sum(axis=1)
    return _ratio(product, square, other)


def _standardised(table: Rows) -> Rows:
    """A table less its rows' means, of standard deviation 1: each group counts alike, whatever its units; 0 where only
    rounding is left.
    """
    left: np.ndarray = table - table.mean(axis=1, keepdims=True)
    spread = float(left.std())
    return np.zeros_like(left) if spread <= ZERO_VARIANCE * max(1.0, float(np.abs(table).max())) else left / spread


def _interval(found: Draws, n_samples: int) -> Interval:
    """The first value with the interval of the others; infinite where the smallest group has a single sample."""
    if len(found) < 2 or n_samples < 2:
        return Interval(float(found[0]), -math.inf, math.inf)
    return percentile_interval(float(found[0]), found[1:], n_samples)
