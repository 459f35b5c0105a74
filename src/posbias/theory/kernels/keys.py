"""Key biases in O(N) per head: attention w_j / W_i is a product of shares r_j = w_j / W_j (docs/theory, section 7).

A causal pull walks from the last position to the first and carries the mass of queries behind for the keys up to here:
key j keeps r_j of it and passes 1 - r_j on. Nothing is subtracted, and no weight is ever formed, so that biases of
hundreds of nats neither overflow nor lose a digit. Windows and mutual prefixes sum weights instead; there entries below
1e-290 times the largest ratio of two weights may be lost.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture import HeadGroup
from posbias.architecture.keys import GammaKey, KeyEncoding
from posbias.errors import UsageError
from posbias.theory.kernels.base import Kernel
from posbias.theory.kernels.loops import BLOCK, carry_heads, scan_window, sweep_gamma

CHUNK = 2**14
"""Entries of a table, positions times heads, per call of the compiled loops: the tables stay in the cache."""

Vector = Float64[np.ndarray, "n_positions"]
Table = Float64[np.ndarray, "n heads"]


class KeyKernel(Kernel):
    """Heads of one group with a key bias, equal ones merged."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        if not isinstance(group.encoding, KeyEncoding):
            raise UsageError(f"encoding {group.encoding} is no key bias")
        self.n_positions = n_positions
        self._group, self.encoding, self.n_heads = group, group.encoding, group.n_heads
        self._window = group.mask.reach(n_positions) - 1
        self._prefix = group.mask.mutual_prefix(n_positions)
        parameters = self.encoding.parameters(group.n_heads)[group.heads]
        keys = np.column_stack([parameters, group.content, group.sinks])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        self.layer_heads = tuple(group.heads[inverse.ravel() == unique] for unique in range(len(first)))
        """Heads of the layer that each unique head stands for."""
        self._heads = group.heads[first]
        self._shares = group.encoding.key_shares(self._heads.tolist(), n_positions, group.n_heads)
        self._content, self._sinks = group.content[first], group.sinks[first]
        self._bare = not np.any(self._content) and bool(np.all(self._sinks == -np.inf))
        gamma = isinstance(group.encoding, GammaKey) and group.encoding.smooth
        self.walked = keys[first, 0] if gamma and self._bare and self._causal else None
        """Exponents of causal gamma keys without slope, content and sinks."""
        self.weights = np.array([len(members) for members in self.layer_heads]) / group.n_heads
        """Each unique head's share of the layer."""

    def pull(self, row: Vector) -> Vector:
        """All heads in one sweep from the last position down; windows and prefixes head by head."""
        return self._sweep(row, pull=True) if self._causal else self._over_heads(row, pull=True)

    def push(self, column: Vector) -> Vector:
        """All heads in one sweep from the first position up; windows and prefixes head by head."""
        return self._sweep(column, pull=False) if self._causal else self._over_heads(column, pull=False)

    def _sweep(self, vector: Vector, *, pull: bool) -> Vector:
        """Carries, down, the part of the queries behind for the keys up to here; up, the mean over the keys before."""
        out, carried = np.zeros(self.n_positions), np.zeros(len(self.weights))
        if self.walked is not None:
            sweep_gamma(vector, self.walked, self.weights, out, pull)
            return out
        length = max(CHUNK // len(self.weights), 1)
        chunks = [(low, min(low + length, self.n_positions)) for low in range(0, self.n_positions, length)]
        for low, high in reversed(chunks) if pull else chunks:
            share, remainder, earlier, itself = self._tables(low, high)
            tables = (share, remainder, earlier, itself) if pull else (earlier, remainder, share, itself)
            carry_heads(vector[low:high], tables, self.weights, carried, out[low:high], pull)
        return out

    def unique_heads(self) -> Iterator[tuple[Int64[np.ndarray, "members"], "KeyKernel"]]:
        """Heads of the layer that are alike, with the attention of one of them."""
        for head, members in zip(self._heads, self.layer_heads, strict=True):
            index = int(np.flatnonzero(self._group.heads == head)[0])
            chosen = slice(index, index + 1)
            parts = {name: getattr(self._group, name)[chosen] for name in ("heads", "content", "sinks")}
            single = KeyKernel(replace(self._group, **parts), self.n_positions)
            single.weights = np.ones(1)
            yield members, single

    @property
    def _causal(self) -> bool:
        return self._window >= self.n_positions - 1 and self._prefix < 2

    @cached_property
    def _biases(self) -> Float64[np.ndarray, "heads n_positions"]:
        """Key biases of the unique heads."""
        return np.asarray(self.encoding.key_logits(self.n_positions, self._group.n_heads)[self._heads])

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

    def _rows(self, head: int) -> tuple[Vector, Vector, Vector]:
        """One unique head: the keys' weights, each query's factor on them, and its attention to itself."""
        bias = self._biases[head]
        top = bias.max()
        weights = np.exp(bias - top)
        with np.errstate(divide="ignore"):
            off = np.log(self._visible_sums(weights, pull=False)) + top
        diagonal = bias + self._content[head]
        most = np.maximum(np.maximum(off, diagonal), self._sinks[head])
        total = np.exp(off - most) + np.exp(diagonal - most) + np.exp(self._sinks[head] - most)
        return weights, np.where(off > -np.inf, np.exp(top - most) / total, 0.0), np.exp(diagonal - most) / total

    def _visible_sums(self, values: Vector, *, pull: bool) -> Vector:
        """Sum over the keys that each query sees, itself apart; or (`pull`) over the queries that see each key."""

        def before(signal: Vector, window: int) -> Vector:
            out = np.zeros_like(signal)
            if window > 0 and signal.size > 1:
                window = min(window, signal.size)
                scan_window(signal, 1.0, window, np.ones(BLOCK + 1), np.ones(window // BLOCK + 1), out)
            return out

        def after(signal: Vector, window: int) -> Vector:
            return before(signal[::-1].copy(), window)[::-1]

        backward, forward = (after, before) if pull else (before, after)
        sums = backward(values, self._window).copy()
        if self._prefix > 1:
            sums[: self._prefix] += forward(values[: self._prefix].copy(), self._prefix - 1)
        return sums

    def _over_heads(self, vector: Vector, *, pull: bool) -> Vector:
        total = np.zeros(self.n_positions)
        for head, weight in enumerate(self.weights):
            keys, queries, diagonal = self._rows(head)
            inside, outside = (queries, keys) if pull else (keys, queries)
            total += weight * (outside * self._visible_sums(inside * vector, pull=pull) + diagonal * vector)
        return total
