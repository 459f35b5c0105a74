"""Linear encodings (none, ALiBi, decay) in O(N) per head: weights rate^distance, hence a one-term recurrence.

y_j = z_j + rate y_{j+1} (docs/theory, section 1). Weights are taken relative to distance 1, so that the off-diagonal
weight of a row lies between 1 and N whatever the slope. Without a window all heads run inside one loop over positions,
and the normaliser is tabulated only as long as it still changes.
"""

from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture import HeadGroup
from posbias.errors import UsageError
from posbias.theory.kernels.interval import IntervalKernel, Shares, Side, split_rows
from posbias.theory.kernels.loops import BLOCK, scan_heads, scan_window

Table = Float64[np.ndarray, "_ heads"]
"""Factors of every unique head, by position; a single row stands for all positions."""

CHUNK = 16384
"""Positions per call of the compiled loop."""

FLAT_NATS = 40.0
"""exp(-40) < 2^-57: past this many nats the geometric sum of a row no longer changes in float64."""

KEPT_TABLES = 16
"""Chunks whose normalisers are kept between pulls; longer ramps are recomputed chunk by chunk."""


class LinearKernel(IntervalKernel):
    """Heads whose logits fall off linearly with distance."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        slopes = group.linear_slopes()
        if slopes is None:
            raise UsageError(f"encoding {group.encoding} is not linear in the distance")
        self._group_slopes = slopes
        super().__init__(group, n_positions)
        first = [member[0] for member in self.members]
        self.slopes = slopes[first]
        self.rates = np.exp(-self.slopes)
        self._content = group.content[first]
        self._sinks = group.sinks[first]
        self.layer_heads = tuple(group.heads[member] for member in self.members)
        """Heads of the layer that each unique head stands for."""
        bare = not np.any(group.content) and bool(np.all(group.sinks == -np.inf))
        whole = self.window >= n_positions - 1 and self.prefix < 2
        self.walked = self.rates if bare and whole else None
        """Rates of causal heads without content and sinks."""
        self._powers = np.exp(-self.slopes * np.arange(BLOCK + 1)[:, None])
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    def _unique_heads(self) -> tuple[Int64[np.ndarray, "members"], ...]:
        keys = np.stack([self._group_slopes, self.group.content, self.group.sinks], axis=1)
        _, inverse = np.unique(keys, axis=0, return_inverse=True)
        inverse = inverse.ravel()
        return tuple(np.flatnonzero(inverse == unique) for unique in range(inverse.max() + 1))

    def _off_weight(self, head: int, query: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """Off-diagonal weight of rows, relative to the weight of distance 1."""
        before = np.minimum(query, self.window)
        after = np.maximum(0, self.prefix - 1 - query)
        slope = self.slopes[head]
        if slope == 0:
            return np.asarray(before + after, dtype=np.float64)
        return np.asarray((np.expm1(-slope * before) + np.expm1(-slope * after)) / np.expm1(-slope))

    def _split(self, head: int, query: Int64[np.ndarray, "n"]) -> Shares:
        slope = self.slopes[head]
        return split_rows(self._off_weight(head, query), self._content[head] + slope, self._sinks[head] + slope)

    def shares(self, head: int) -> Shares:
        """Normalisers from the closed geometric sum."""
        return self._split(head, np.arange(self.n_positions))

    def scan(self, head: int, side: Side, signal: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The recurrence; a window takes two passes."""
        window = min(self.window if side == "lower" else self.prefix - 1, len(signal))
        steps = np.arange(window // BLOCK + 1) * BLOCK
        out = np.empty_like(signal)
        high = np.exp(-self.slopes[head] * steps)
        scan_window(signal, self.rates[head], window, self._powers[:, head].copy(), high, out)
        return out

    def _distinct(self, low: int, high: int) -> Int64[np.ndarray, "rows"]:
        """Queries low ... high - 1, or one that stands for all if their normalisers agree in float64."""
        slope = float(self.slopes.min())
        long = FLAT_NATS / slope if slope > 0 else np.inf
        settled = low >= min(long, self.window)
        if settled and low >= self.prefix - 1:
            return np.array([self.n_positions - 1])
        if settled and self.prefix - high >= long:
            return np.array([int(long) + 1])
        return np.arange(low, high)

    def _share_table(self, low: int, high: int) -> Table:
        """Off-diagonal shares of rows low ... high - 1 for every unique head; a single row if they do not change."""
        query = self._distinct(low, high)
        key = (int(query[0]), len(query))
        if key in self._tables:
            return self._tables[key]
        table = np.stack([self._split(head, query).off for head in range(len(self.weights))], axis=1)
        if len(self._tables) < KEPT_TABLES:
            self._tables[key] = table
        return table

    @cached_property
    def _diagonal(self) -> Float64[np.ndarray, "n_positions"]:
        total = np.empty(self.n_positions)
        for low in range(0, self.n_positions, CHUNK):
            high = min(low + CHUNK, self.n_positions)
            query = self._distinct(low, high)
            diagonals = [weight * self._split(head, query).diagonal for head, weight in enumerate(self.weights)]
            total[low:high] = np.sum(diagonals, axis=0)
        return total

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """All heads in one sweep from the last position down; windows head by head."""
        return super().pull(row) if 0 < self.window < self.n_positions - 1 else self._sweep(row, pull=True)

    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """All heads in one sweep from the first position up; windows head by head."""
        return super().push(column) if 0 < self.window < self.n_positions - 1 else self._sweep(column, pull=False)

    def _sweep(self, vector: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "n"]:
        """out_t = sum_h outside_th sum_(u<t) rate_h^(t-u-1) inside_uh vector_u, chunk by chunk, and the other parts.

        A pull walks down: t counts from the end, and shares stand inside; a push walks up, with shares outside.
        """
        out: np.ndarray = self._diagonal * vector
        carry, spill = np.zeros_like(self.rates), np.zeros_like(self.rates)
        direction, no_shares = slice(None, None, -1 if pull else 1), np.ones((1, len(self.rates)))
        # A window of one key has no chunks.
        for low in range(0, self.n_positions if self.window else 0, CHUNK)[direction]:
            high = min(low + CHUNK, self.n_positions)
            shares = self._share_table(low, high)[direction]
            inside, outside = (shares.copy(), self.weights[None, :]) if pull else (no_shares, shares * self.weights)
            sums = np.empty(high - low)
            scan_heads(
                vector[low:high][direction].copy(), inside, outside, self.rates, self._powers, carry, spill, sums
            )
            out[low:high] += sums[direction]
        for head, weight in enumerate(self.weights if self.prefix > 1 else ()):
            off = self._split(head, np.arange(self.prefix)).off
            if pull:
                out[: self.prefix] += weight * self._upper(head, vector[: self.prefix] * off, pull=True)
            else:
                out[: self.prefix] += weight * off * self._upper(head, vector, pull=False)
        return out
