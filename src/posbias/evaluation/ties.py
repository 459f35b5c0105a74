"""The tie between influence and behaviour: do the positions that weigh more also get used more?

Rank correlation over positions, plainly and with position itself held fixed: both curves often are U-shaped or
monotone for reasons of their own, and then agree without any tie. Intervals resample contents, the same ones in both
curves; the positions are those that were chosen, and the permutation p-value speaks of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from posbias.checks import checked
from posbias.comparison.metrics import finite
from posbias.errors import UsageError
from posbias.evaluation.statistics import CONTENTS_FOR_CLAIM
from posbias.evaluation.tie_draws import Weights, drawn_together
from posbias.statistics import Interval, holm, percentile_interval

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
Rows = Float64[np.ndarray, "_ _"]
"""A table whose shape is checked with a message of our own, or is one of several groups'."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two quantities of one model at one length, on the same contents and positions."""

    first: Rows
    """For instance the share of influence of the item at each position; NaN where not measured."""
    second: Rows
    """For instance whether the answer was right."""
    positions: tuple[int, ...]
    """Place of each column, ascending."""
    n_items: int
    contents: tuple[str, ...] = ()
    """Name of each row's content, which other pairs may share; empty: contents of no other pair."""

    def __post_init__(self) -> None:
        if self.contents and not len(self.contents) == len(set(self.contents)) == len(self.first):
            raise UsageError(
                f"a tie needs a different name for each of {len(self.first)} contents, or none at all, got "
                f"{len(set(self.contents))}"
            )
        if self.first.shape != self.second.shape or self.first.shape[1] != len(self.positions):
            raise UsageError(
                f"a tie needs two equal tables with a column for each of {len(self.positions)} positions, got "
                f"{self.first.shape} and {self.second.shape}"
            )
        if np.isinf(self.first).any() or np.isinf(self.second).any():
            raise UsageError("a tie needs finite values, or NaN where nothing was measured; got an infinite one")

    @property
    def complete(self) -> tuple[Rows, Rows]:
        """The contents that have both quantities at every position."""
        there = self._there
        return self.first[there], self.second[there]

    @property
    def complete_contents(self) -> tuple[str, ...]:
        """The names of these contents; empty where they have none."""
        return (
            tuple(name for name, kept in zip(self.contents, self._there, strict=True) if kept) if self.contents else ()
        )

    @property
    def _there(self) -> Bool[np.ndarray, "_"]:
        there: np.ndarray = ~(np.isnan(self.first).any(axis=1) | np.isnan(self.second).any(axis=1))
        return there


@dataclass(frozen=True)
class Correlation:
    """One rank correlation over positions."""

    controlled: str
    """What was held fixed: a key of `CONTROLS`."""
    value: Interval
    """In -1 ... 1; NaN where a curve is constant, or too few positions are left. Interval over contents."""
    p: float
    """Share of permutations of the positions that correlate at least as strongly, either sign; NaN as the value."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"controlled": self.controlled, **self.value.as_record(), "p": finite(self.p)}


@dataclass(frozen=True)
class Tie:
    """How two curves over positions hang together."""

    correlations: tuple[Correlation, ...]
    """One for each of `CONTROLS`."""
    within: Interval
    """Correlation over examples of what positions and contents leave: does an example whose item weighs more than
    position and content let expect also do better? NaN where nothing varies."""
    n_positions: int
    n_contents: int
    n_groups: int
    """Models and lengths pooled; ranks are formed within each."""

    def of(self, controlled: str) -> Correlation:
        """The correlation with that held fixed."""
        return next(entry for entry in self.correlations if entry.controlled == controlled)

    def established(self, controlled: str) -> bool:
        """Whether the interval leaves out 0, with contents enough for a claim, and permutations agree at 5 %."""
        found = self.of(controlled)
        return self.n_contents >= CONTENTS_FOR_CLAIM and found.value.excludes(0.0) and found.p <= LEVEL

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "correlations": [
                {**entry.as_record(), "established": self.established(entry.controlled)} for entry in self.correlations
            ],
            "within": self.within.as_record(),
            "n_positions": self.n_positions,
            "n_contents": self.n_contents,
            "n_groups": self.n_groups,
        }


@checked
def tie(pairs: Sequence[Pair] | Pair, *, seed: int = 0) -> Tie:
    """Rank correlations over positions of one model, or pooled over several models and lengths.

    Ranks of the mean curves are formed within each model and length, then cleared of the ranks of what is held fixed
    (partial rank correlation), then correlated over all positions together. Resamples draw the contents of each pair
    anew, those that pairs share (`Pair.contents`) together; permutations move the positions within each pair.

    Args:
        pairs: One per model and length; contents with a gap are left out.
        seed: Of resamples and permutations, >= 0.

    Raises:
        UsageError: nothing given, or no content that has both quantities at every position.
    """
    groups = [pairs] if isinstance(pairs, Pair) else list(pairs)
    if not groups:
        raise UsageError("no pair of curves to tie; give at least 1")
    tables = [group.complete for group in groups]
    if not all(len(first) for first, _ in tables):
        raise UsageError("no content has both quantities at every position, so nothing can be tied")
    generator = np.random.default_rng(seed)
    named = [group.complete_contents or len(first) for group, (first, _) in zip(groups, tables, strict=True)]
    weights = drawn_together(named, generator=generator)
    correlations = [_correlation(name, groups, tables, weights, generator) for name in CONTROLS]
    n_contents = min(len(first) for first, _ in tables)
    within = _within(tables, weights)
    return Tie(
        correlations=tuple(correlations),
        within=_interval(within, n_contents),
        n_positions=sum(len(group.positions) for group in groups),
        n_contents=n_contents,
        n_groups=len(groups),
    )


def correct_for_number(entries: Sequence[Mapping[str, Any]]) -> None:
    """Correct the p-values of stored ties for their number (Holm, for each control by itself), in place.

    A tie then counts as established only where the corrected p-value is at most 0.05, too.

    Args:
        entries: Each with `ties`, {measure: Tie.as_record}: together one family.
    """
    for controlled in CONTROLS:
        family = [
            correlation
            for entry in entries
            for found in entry["ties"].values()
            for correlation in found["correlations"]
            if correlation["controlled"] == controlled and correlation["p"] is not None
        ]
        adjusted = holm(np.array([correlation["p"] for correlation in family]))
        for correlation, p_value in zip(family, adjusted, strict=True):
            correlation["adjusted_p"] = float(p_value)
            correlation["established"] = bool(correlation["established"] and p_value <= LEVEL)


def _correlation(
    name: str,
    groups: Sequence[Pair],
    tables: Sequence[tuple[Rows, Rows]],
    weights: Sequence[Weights],
    generator: np.random.Generator,
) -> Correlation:
    fixed = [
        np.array([_control(held, group) for held in CONTROLS[name]]).reshape(-1, len(group.positions))
        for group in groups
    ]
    left = [_cleared(rows @ first, held) for rows, (first, _), held in zip(weights, tables, fixed, strict=True)]
    right = [_cleared(rows @ second, held) for rows, (_, second), held in zip(weights, tables, fixed, strict=True)]
    freedom = sum(len(group.positions) - 1 - len(held) for group, held in zip(groups, fixed, strict=True))
    found = _pooled(left, right, freedom)
    n_contents = min(len(first) for first, _ in tables)
    value = _interval(found, n_contents)
    p_value = float("nan")
    if not np.isnan(found[0]):
        moved = _permuted([rows[:1] for rows in right], generator)
        # Cleared again, or what is held fixed would come back with the new order and make chance look weak.
        shuffled = [_freed(rows, held) for rows, held in zip(moved, fixed, strict=True)]
        by_chance = _pooled([np.repeat(rows[:1], len(shuffled[0]), axis=0) for rows in left], shuffled, freedom)
        # An order that leaves nothing to correlate counts as one that does as well.
        p_value = float(np.mean(~(np.abs(by_chance) < abs(found[0]) - ZERO_VARIANCE)))
    return Correlation(name, value, p_value)


def _control(name: str, group: Pair) -> Float64[np.ndarray, "n_positions"]:
    """What is held fixed, per position."""
    places = np.array(group.positions, dtype=np.float64)
    return places if name == "position" else np.minimum(places, group.n_items - 1 - places)


def _cleared(curves: Ranks, fixed: Float64[np.ndarray, "n_fixed n_positions"]) -> Ranks:
    """Ranks of each row, 0 ... 1, less what a linear function of the ranks of `fixed` explains of them."""
    from scipy.stats import rankdata

    n_positions = curves.shape[1]
    # Rounding must not decide a rank between equal means.
    ranks = rankdata(np.round(curves, 12), axis=1) / n_positions
    return _freed(ranks, fixed)


def _freed(rows: Ranks, fixed: Float64[np.ndarray, "n_fixed n_positions"]) -> Ranks:
    """Rows less what a linear function of the ranks of `fixed` explains of them."""
    from scipy.stats import rankdata

    design = np.column_stack([np.ones(rows.shape[1]), *(rankdata(row) for row in fixed)])
    left: np.ndarray = rows - rows @ (design @ np.linalg.pinv(design))
    return left


def _pooled(left: Sequence[Rows], right: Sequence[Rows], freedom: int) -> Float64[np.ndarray, "draws"]:
    """Correlation of all columns of all groups together; NaN where a side has no variance or no freedom is left."""
    first, second = np.concatenate(left, axis=1), np.concatenate(right, axis=1)
    product = (first * second).sum(axis=1)
    squares = np.square(first).sum(axis=1), np.square(second).sum(axis=1)
    defined = (squares[0] > ZERO_VARIANCE) & (squares[1] > ZERO_VARIANCE) & (freedom >= 2)
    scale = np.sqrt(np.where(defined, squares[0] * squares[1], 1.0))
    return np.where(defined, np.clip(product / scale, -1, 1), np.nan)


def _permuted(rows: Sequence[Rows], generator: np.random.Generator) -> list[Rows]:
    """The columns of each group in other orders; all orders of a single short group."""
    if len(rows) == 1 and rows[0].shape[1] <= EXACT_POSITIONS:
        return [rows[0][0][np.array(list(permutations(range(rows[0].shape[1]))))]]
    moved = [generator.permuted(np.repeat(row, PERMUTATIONS, axis=0), axis=1) for row in rows]
    return [np.concatenate([row, others]) for row, others in zip(rows, moved, strict=True)]


def _within(tables: Sequence[tuple[Rows, Rows]], weights: Sequence[Weights]) -> Float64[np.ndarray, "draws"]:
    """Correlation over examples after contents' and positions' means are taken out, groups pooled."""
    product, squares, other = 0.0, 0.0, 0.0
    for (first, second), rows in zip(tables, weights, strict=True):
        left, right = _standardised(first), _standardised(second)
        centre, other_centre = rows @ left, rows @ right
        product = product + (rows @ (left * right) - centre * other_centre).sum(axis=1)
        squares = squares + (rows @ np.square(left) - np.square(centre)).sum(axis=1)
        other = other + (rows @ np.square(right) - np.square(other_centre)).sum(axis=1)
    defined = (np.asarray(squares) > ZERO_VARIANCE) & (np.asarray(other) > ZERO_VARIANCE)
    scale = np.sqrt(np.where(defined, squares * other, 1.0))
    return np.where(defined, np.clip(product / scale, -1, 1), np.nan)


def _standardised(table: Rows) -> Rows:
    """A table less its rows' means, of standard deviation 1: each group counts alike, whatever its units; 0 where only
    rounding is left.
    """
    left: np.ndarray = table - table.mean(axis=1, keepdims=True)
    spread = float(left.std())
    return np.zeros_like(left) if spread <= ZERO_VARIANCE * max(1.0, float(np.abs(table).max())) else left / spread


def _interval(found: Float64[np.ndarray, "draws"], n_contents: int) -> Interval:
    """The first value with the interval of the others; infinite where the smallest group has a single content."""
    if len(found) < 2 or n_contents < 2:
        return Interval(float(found[0]), -math.inf, math.inf)
    return percentile_interval(float(found[0]), found[1:], n_contents)
