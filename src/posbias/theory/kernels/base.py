"""`Kernel`: the mean attention of a layer (or of some of its heads) as an operator on rows.

A pull carries influence from queries to keys, y = x A (docs/theory, section 1). No kernel with a closed positional form
builds its N x N matrix to do so. Attention as a matrix is here, too, the independent check of every pull: rows are
softmax(logits) over the visible keys, taken in log space with numpy alone; and, by such rows, the kernel of encodings
that depend on both positions, in O(N^2).
"""

from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posbias.architecture import HeadGroup
from posbias.errors import UsageError

BLOCK_ENTRIES = 1_000_000
"""Logits held at a time (8 MB)."""


class Kernel(ABC):
    """A non-negative matrix A [query key], rows summing to at most the share of heads it stands for."""

    @abstractmethod
    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A for a non-negative row: relative error below 1e-12 per entry, down to entries of 1e-290."""


def masked_softmax(
    visible: Bool[np.ndarray, "query key"], logits: Float64[np.ndarray, "query key"], sink: float = -np.inf
) -> Float64[np.ndarray, "query key"]:
    """softmax over the visible keys of each row, with an extra key of logit `sink` that takes its share (not returned).

    Raises:
        UsageError: a query sees no key at all.
    """
    blind = np.flatnonzero(~visible.any(axis=1))
    if blind.size:
        raise UsageError(f"query {blind[0]} sees no key; every row of a mask needs at least one")
    masked = np.where(visible, logits, -np.inf)
    top = np.maximum(masked.max(axis=1, keepdims=True), sink)
    weights = np.exp(masked - top)
    return weights / (weights.sum(axis=1, keepdims=True) + np.exp(sink - top))  # type: ignore[no-any-return]


def dense_heads(
    group: HeadGroup, n_positions: int, queries: Int64[np.ndarray, "query"] | None = None
) -> Float64[np.ndarray, "group query key"]:
    """The attention matrix of every head of a group, or some of its rows, content and sinks included."""
    visible = group.mask.visible(n_positions, queries)
    logits = group.logits_of_rows(np.arange(n_positions) if queries is None else queries, n_positions)
    return np.stack([masked_softmax(visible, head, sink) for head, sink in zip(logits, group.sinks, strict=True)])


class AbsoluteKernel(Kernel):
    """Heads whose logits are any function of query and key position."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self._group, self._n_positions = group, n_positions

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A, a block of queries at a time."""
        group, n_positions, total = self._group, self._n_positions, np.zeros_like(row)
        size = max(1, BLOCK_ENTRIES // (n_positions * len(group.heads)))
        for start in range(0, n_positions, size):
            queries = np.arange(start, min(start + size, n_positions))
            total += row[queries] @ dense_heads(group, n_positions, queries).sum(axis=0)
        return total / group.n_heads
