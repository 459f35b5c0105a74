"""Key biases and slopes in O(N) per head: causal attention as a walk over positions (docs/theory, sections 1 and 7).

Linear encodings (none, ALiBi, decay) fall off by rate^distance, so that a pull is a recurrence with one term. With a
key bias attention w_j / W_i is a product of shares r_j = w_j / W_j: a pull carries the mass of queries behind for the
keys up to here, of which key j keeps r_j and passes 1 - r_j on. Nothing is subtracted, and no weight of a key bias is
ever formed, so that biases of hundreds of nats neither overflow nor lose a digit. Windows and mutual prefixes sum
weights instead; there entries below 1e-290 times the largest ratio of two weights may be lost.
"""

from functools import cached_property

import numpy as np
from jaxtyping import Float64

from posbias.architecture import HeadGroup
from posbias.architecture.keys import GammaKey, KeyEncoding
from posbias.theory.kernels.base import Kernel
from posbias.theory.kernels.distance import split_rows
from posbias.theory.kernels.loops import BLOCK, carry_heads, scan_window, sweep_gamma, sweep_linear

CHUNK = 2**14
"""Entries of a table, positions times heads, per call of the compiled loops: the tables stay in the cache."""

Vector = Float64[np.ndarray, "n_positions"]
Table = Float64[np.ndarray, "n heads"]


class KeyKernel(Kernel):
    """Heads of one group with a key bias or slopes, equal ones merged."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self.n_positions = n_positions
        self._group, slopes = group, group.linear_slopes()
        self._window = group.mask.reach(n_positions) - 1
        self._prefix = group.mask.mutual_prefix(n_positions)
        self._encoding = group.encoding if isinstance(group.encoding, KeyEncoding) else None
        columns = self._encoding.parameters(group.n_heads)[group.heads] if self._encoding else np.asarray(slopes)
        keys = np.column_stack([columns, group.content, group.sinks])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        self.layer_heads = tuple(group.heads[inverse.ravel() == unique] for unique in range(len(first)))
        """Heads of the layer that each unique head stands for."""
        self.weights = np.array([len(members) for members in self.layer_heads]) / group.n_heads
        """Each unique head's share of the layer."""
        self._heads, self._content, self._sinks = group.heads[first], group.content[first], group.sinks[first]
        self._bare = not np.any(self._content) and bool(np.all(self._sinks == -np.inf))
        self._slopes = np.zeros(len(first)) if slopes is None else slopes[first]
        if self._encoding:
            self._shares = self._encoding.key_shares(self._heads.tolist(), n_positions, group.n_heads)
        mutual = self._prefix if self._prefix > 1 else 0
        self._apart = n_positions if self._window < n_positions - 1 or (self._encoding and mutual) else mutual
        """Queries walked head by head: those of a mutual prefix; all, with a window or if keys have biases, too."""
        gamma = isinstance(self._encoding, GammaKey) and not np.any(self._encoding.slope)
        self.exponents = keys[first, 0] if gamma and not self._apart and self._bare else None
        """Of gamma keys without slope, of causal heads without content and sinks."""

    def pull(self, row: Vector) -> Vector:
        """All heads in one walk from the last position down; windows and mutual prefixes head by head."""
        out, apart = np.zeros(self.n_positions), self._apart
        if not self._encoding and apart < row.size:
            # Queries of a mutual prefix see nothing behind it; those behind it are causal.
            causal = np.append(np.zeros(apart), row[apart:]) if apart else row
            sweep_linear(causal, self._slopes, self._content, self._sinks, self.weights, out)
        elif self.exponents is not None:
            sweep_gamma(row, self.exponents, self.weights, out)
        elif not apart:
            # What is carried down is the part of the queries behind for the keys up to here.
            carried, length = np.zeros(len(self.weights)), max(CHUNK // len(self.weights), 1)
            for low in reversed(range(0, self.n_positions, length)):
                part = slice(low, min(low + length, self.n_positions))
                carry_heads(row[part], self._tables(part.start, part.stop), self.weights, carried, out[part])
        for head, weight in enumerate(self.weights if apart else ()):
            keys, queries, diagonal = self._rows(head, apart)
            sums = self._visible_sums(head, queries * row[:apart], pull=True)
            out[:apart] += weight * (keys * sums + diagonal * row[:apart])
        return out

    @cached_property
    def _biases(self) -> Float64[np.ndarray, "heads n_positions"]:
        """Key biases of the unique heads."""
        assert self._encoding is not None
        return np.asarray(self._encoding.key_logits(self.n_positions, self._group.n_heads)[self._heads])

    def _tables(self, low: int, high: int) -> tuple[Table, Table, Table, Table]:
        """Tables by position and unique head: r, 1 - r, and a query's attention to earlier keys and to itself."""
        share, remainder = self._shares(low, high)
        if self._bare:
            return share, remainder, remainder, share
        sinks = np.full_like(share, -np.inf)
        if np.any(self._sinks > -np.inf):
            # A sink stands at a logit of its own, so it needs the weights themselves: ln W = b - ln r.
            sinks = self._sinks - self._biases[:, low:high].T + np.log(share)
        top = np.maximum(np.maximum(self._content, 0.0), sinks)
        earlier, itself = remainder * np.exp(-top), share * np.exp(self._content - top)
        total = earlier + itself + np.exp(sinks - top)
        return share, remainder, earlier / total, itself / total

    def _rows(self, head: int, count: int) -> tuple[Vector, Vector, Vector]:
        """One unique head, so many queries: the keys' weights, each query's factor on them, and the share of itself."""
        content, sink, slope = self._content[head], self._sinks[head], self._slopes[head]
        if not self._encoding:
            query = np.arange(count)
            sums = np.expm1(-slope * query) / np.expm1(-slope) if slope > 0 else query.astype(np.float64)
            seen = sums[np.minimum(query, self._window)] + sums[np.maximum(0, self._prefix - 1 - query)]
            return np.ones(count), *split_rows(seen, content + slope, sink + slope)
        bias = self._biases[head]
        top = bias.max()
        weights = np.exp(bias - top)
        with np.errstate(divide="ignore"):
            off = np.log(self._visible_sums(head, weights, pull=False)) + top
        diagonal = bias + content
        most = np.maximum(np.maximum(off, diagonal), sink)
        total = np.exp(off - most) + np.exp(diagonal - most) + np.exp(sink - most)
        return weights, np.where(off > -np.inf, np.exp(top - most) / total, 0.0), np.exp(diagonal - most) / total

    def _sums(self, head: int, signal: Vector, window: int, *, forward: bool) -> Vector:
        """Sums over positions within a window before each, or after it (`forward`), by rate^(distance - 1)."""
        out, window, slope = np.zeros_like(signal), min(window, signal.size), self._slopes[head]
        if window < 1 or signal.size < 2:
            return out
        low, high = np.arange(BLOCK + 1), BLOCK * np.arange(window // BLOCK + 1)
        walked = signal[::-1].copy() if forward else signal
        scan_window(walked, np.exp(-slope), window, np.exp(-slope * low), np.exp(-slope * high), out)
        return out[::-1] if forward else out

    def _visible_sums(self, head: int, values: Vector, *, pull: bool) -> Vector:
        """Sum over the keys that each query sees, itself apart; or (`pull`) over the queries that see each key."""
        sums = self._sums(head, values, self._window, forward=pull).copy()
        if self._prefix > 1:
            sums[: self._prefix] += self._sums(head, values[: self._prefix], self._prefix - 1, forward=not pull)
        return sums
