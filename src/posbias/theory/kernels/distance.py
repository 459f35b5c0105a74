"""Kernels of logits by distance under interval masks: keys within a reach back, and forward keys in a mutual prefix.

A = lower + upper + diagonal, each row divided by its normaliser, and each part a sum over distances
(docs/theory, section 1). The diagonal is kept apart throughout, so that content offsets of hundreds of nats neither
overflow nor swallow the off-diagonal part.

Linear encodings (none, ALiBi, decay) take O(N) per head: weights rate^distance, hence a one-term recurrence
y_j = z_j + rate y_{j+1}. Weights are taken relative to distance 1, so that the off-diagonal weight of a row lies
between 1 and N whatever the slope. Without a window all heads run inside one loop over positions, and the normaliser is
tabulated only as long as it still changes.

Any other function of the distance (RoPE with constant content ...): weights are exp(logit - largest logit), running
normalisers compensated sums. Sums over distances, out_t = sum_d weight(d) signal_(t-d), go by divide and conquer
without losing tiny entries: the pairs (later half, earlier half) of a block are a convolution in which every output
sees every input, so a Fourier transform of that pair loses little relative to its smallest output. That is checked; a
pair that fails, or straddles the edge of a window, is cut in four, down to blocks that are summed directly.
O(N log^2 N) for kernels of moderate range, O(N^2) at worst.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Complex128, Float64, Int64
from scipy import fft

from posbias.architecture import HeadGroup
from posbias.errors import UsageError
from posbias.theory.kernels.base import Kernel
from posbias.theory.kernels.loops import BLOCK, TINY, compensated_sums, correlate_block, scan_heads, scan_window

Side = Literal["lower", "upper"]
"""Keys before the query, or after it."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The split of each row of one head: its off-diagonal part, and its diagonal."""

    off: Float64[np.ndarray, "n"]
    """Attention per unit of off-diagonal weight: 1 / normaliser."""
    diagonal: Float64[np.ndarray, "n"]
    """Attention of each query to itself."""


def split_rows(off: Float64[np.ndarray, "n"], diagonal_logit: float, sink_logit: float) -> Shares:
    """Normalise rows of off-diagonal weight `off` (0 for none) with a diagonal and a sink key, in log space.

    Both logits are relative to the unit of `off`. The largest of the three counts as 1, so nothing overflows and no
    digit is lost for offsets of any size.
    """
    top = max(0.0, diagonal_logit, sink_logit)
    unit = np.exp(-top)
    diagonal = np.exp(diagonal_logit - top)
    total = off * unit + diagonal + np.exp(sink_logit - top)
    alone = 1.0 if sink_logit == -np.inf else 1 / (1 + np.exp(np.minimum(sink_logit - diagonal_logit, 700.0)))
    safe = np.where(off > 0, total, 1.0)
    return Shares(np.where(off > 0, unit / safe, 0.0), np.where(off > 0, diagonal / safe, alone))


class IntervalKernel(Kernel):
    """Heads of one group, equal ones merged; each unique head h carries `weights[h]` of its layer."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self.group = group
        self.n_positions = n_positions
        self.window = group.mask.reach(n_positions) - 1
        """Keys seen before the query's own position."""
        self.prefix = group.mask.mutual_prefix(n_positions)
        self.members: tuple[np.ndarray, ...] = self._unique_heads()
        """Heads of the group that each unique head stands for."""
        self.weights = np.array([len(member) for member in self.members]) / group.n_heads

    @abstractmethod
    def _unique_heads(self) -> tuple[Int64[np.ndarray, "members"], ...]:
        """The group's heads, equal ones together."""

    @abstractmethod
    def shares(self, head: int) -> Shares:
        """The split of the rows of a unique head."""

    @abstractmethod
    def scan(self, head: int, side: Side, signal: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """out_t = sum over d >= 1 of weight(d) signal_(t-d): distances on one side of the query, along the array."""

    def _lower(self, head: int, signal: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "n"]:
        if self.window == 0:
            return np.zeros_like(signal)
        if pull:
            return self.scan(head, "lower", signal[::-1].copy())[::-1]
        return self.scan(head, "lower", signal)

    def _upper(self, head: int, signal: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "prefix"]:
        inner = signal[: self.prefix]
        if pull:
            return self.scan(head, "upper", inner.copy())
        return self.scan(head, "upper", inner[::-1].copy())[::-1]

    def apply_head(self, head: int, vector: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "n"]:
        """row @ A_head for one unique head (`pull`), or A_head @ column."""
        shares = self.shares(head)
        inside = vector * shares.off if pull else vector
        off = self._lower(head, inside, pull=pull).copy()
        if self.prefix > 1:
            off[: self.prefix] += self._upper(head, inside, pull=pull)
        return np.asarray((off if pull else off * shares.off) + shares.diagonal * vector)

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """Every head's pull, weighted."""
        return np.asarray(
            sum(weight * self.apply_head(head, row, pull=True) for head, weight in enumerate(self.weights))
        )

    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """Every head's push, weighted."""
        pushed = (weight * self.apply_head(head, column, pull=False) for head, weight in enumerate(self.weights))
        return np.asarray(sum(pushed))


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


MOST_RISE = 60.0
"""Nats by which a far key's logit may exceed a near one's. Rows that see near keys only have weights that far below the
largest; times a signal they must stay above `loops.TINY`, so signals keep their accuracy down to 1e-274."""

LEAF = 256
"""Blocks up to this size are summed directly."""

ACCEPTED = 5e-13
"""Largest estimated relative error of a transformed pair; half the contract of 1e-12 that kernels keep."""

SAFETY = 8.0
"""Factor on the typical round-off eps log2(n) |weight| |signal| / sqrt(n) of a transformed pair of length n."""

WIDE = 1e7
"""Weights that differ by more than this within a pair are cut without trying a transform."""


class Correlation:
    """Repeated sums over distances with one set of weights; transforms of the weights are kept."""

    def __init__(self, weights: Float64[np.ndarray, "window"], n_positions: int) -> None:
        """`weights[d - 1]` >= 0 is the weight of distance d; distances past the last are not seen."""
        visible = np.flatnonzero(weights[: n_positions - 1])
        self._weights = weights[: visible[-1] + 1 if visible.size else 0]
        self._unbounded = len(self._weights) == n_positions - 1
        self._spectra: dict[tuple[int, int], np.ndarray | None] = {}
        self._sizes: dict[tuple[int, int], float] = {}

    def __call__(self, signal: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """out_t = sum over 1 <= d <= window of weight(d) signal_(t-d), for a non-negative signal."""
        out = np.zeros_like(signal)
        window = len(self._weights)
        for start in range(0, len(signal), LEAF):
            end = min(start + LEAF, len(signal))
            correlate_block(signal, self._weights, window, (start, end, start, end), out)
        half = LEAF
        while half < len(signal):
            for start in range(0, len(signal) - half, 2 * half):
                self._pair(signal, out, (start + half, start, half))
            half *= 2
        return out

    def _pair(
        self, signal: Float64[np.ndarray, "n"], out: Float64[np.ndarray, "n"], pair: tuple[int, int, int]
    ) -> None:
        """Add to the outputs from `later` the sums over the inputs from `earlier`, both blocks of `size` positions."""
        later, earlier, size = pair
        if later >= len(signal) or later - earlier - size + 1 > len(self._weights):
            return
        inputs = signal[earlier : earlier + size]
        if inputs.max() < TINY:
            return
        if size <= LEAF:
            block = (later, min(later + size, len(signal)), earlier, earlier + size)
            correlate_block(signal, self._weights, len(self._weights), block, out)
            return
        if self._transformed(inputs, out[later : later + size], (size, (later - earlier) // size)):
            return
        half = size // 2
        for target in (later, later + half):
            for source in (earlier, earlier + half):
                self._pair(signal, out, (target, source, half))

    def _transformed(
        self, inputs: Float64[np.ndarray, "size"], out: Float64[np.ndarray, "m"], key: tuple[int, int]
    ) -> bool:
        """Add the pair's convolution by Fourier transform; False, and nothing added, if it would lose accuracy."""
        spectrum = self._spectrum(key)
        if spectrum is None:
            return False
        length = 2 * key[0]
        sums = fft.irfft(fft.rfft(inputs, length) * spectrum, length)[key[0] : key[0] + len(out)]
        scale = self._sizes[key] * float(np.linalg.norm(inputs)) / np.sqrt(length)
        error = SAFETY * np.finfo(np.float64).eps * np.log2(length) * scale
        if error > ACCEPTED * sums.min():
            return False
        out += sums
        return True

    def _spectrum(self, key: tuple[int, int]) -> Complex128[np.ndarray, "frequency"] | None:
        """Transform of the weights a pair of blocks (size, gap in blocks) needs; None if it is not worth trying."""
        if key not in self._spectra:
            size, gap = key
            first, last = (gap - 1) * size, (gap + 1) * size
            needed = self._weights[first : last - 1]
            # Without a window, weights are missing only for outputs past the end of the context.
            whole = self._unbounded or last - 1 <= len(self._weights)
            usable = whole and needed.size > 0 and 0 < needed.max() <= WIDE * needed.min()
            self._spectra[key] = fft.rfft(np.append(0.0, needed), 2 * size) if usable else None
            self._sizes[key] = float(np.linalg.norm(needed))
        return self._spectra[key]


def rises_too_far(group: HeadGroup, n_positions: int) -> bool:
    """True if all keys of some row lie so far below the largest logit that common weights would lose the row."""
    prefix, window = group.mask.mutual_prefix(n_positions), group.mask.reach(n_positions) - 1
    sides = [np.arange(1, window + 1), -np.arange(1, max(prefix, 1))]
    logits = [group.encoding.logits(side, group.n_heads)[group.heads] for side in sides if side.size]
    if not logits:
        return False
    largest = np.max([side.max(axis=1) for side in logits], axis=0)
    nearest = np.min([side[:, 0] for side in logits], axis=0)
    return bool(np.any(largest - nearest > MOST_RISE))


class DistanceKernel(IntervalKernel):
    """Heads whose logits are any function of the distance."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        prefix, window = group.mask.mutual_prefix(n_positions), group.mask.reach(n_positions) - 1
        # Read through the encoding, whose heads may share memory: `group.logits` would copy them all.
        self._before = group.encoding.logits(np.arange(1, window + 1), group.n_heads)
        self._after = group.encoding.logits(-np.arange(1, max(prefix, 1)), group.n_heads)
        self._at_query = group.encoding.logits(np.zeros(1, dtype=np.int64), group.n_heads)[:, 0]
        super().__init__(group, n_positions)
        self._sums: dict[tuple[int, Side], Correlation] = {}
        self._shares: dict[int, Shares] = {}

    def _unique_heads(self) -> tuple[Int64[np.ndarray, "members"], ...]:
        members: dict[tuple[object, ...], list[int]] = {}
        for head, layer_head in enumerate(self.group.heads):
            logits = (side[layer_head].tobytes() for side in (self._before, self._after, self._at_query))
            members.setdefault((self.group.content[head], self.group.sinks[head], *logits), []).append(head)
        return tuple(map(np.array, members.values()))

    def _unit(self, head: int) -> float:
        """The logit whose weight counts as 1: the largest off the diagonal."""
        layer_head = self.group.heads[self.members[head][0]]
        logits = [side[layer_head].max() for side in (self._before, self._after) if side.shape[1]]
        return float(max(logits, default=self._at_query[layer_head]))

    def side_weights(self, head: int, side: Side) -> Float64[np.ndarray, "distances"]:
        """exp(logit - unit) at distances 1, 2, ... on one side of the query."""
        layer_head = self.group.heads[self.members[head][0]]
        logits = self._before if side == "lower" else self._after
        return np.asarray(np.exp(logits[layer_head] - self._unit(head)))

    def shares(self, head: int) -> Shares:
        """Normalisers from running sums of the weights; kept."""
        if head not in self._shares:
            first = self.members[head][0]
            query = np.arange(self.n_positions)
            before = np.append(0.0, compensated_sums(self.side_weights(head, "lower")))
            after = np.append(0.0, compensated_sums(self.side_weights(head, "upper")))
            off = before[np.minimum(query, self.window)] + after[np.maximum(0, self.prefix - 1 - query)]
            unit = self._unit(head)
            diagonal = float(self._at_query[self.group.heads[first]] + self.group.content[first] - unit)
            self._shares[head] = split_rows(off, diagonal, float(self.group.sinks[first]) - unit)
        return self._shares[head]

    def scan(self, head: int, side: Side, signal: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """Divide and conquer over distances."""
        key = (head, side)
        if key not in self._sums:
            self._sums[key] = Correlation(self.side_weights(head, side), len(signal))
        return self._sums[key](signal)
