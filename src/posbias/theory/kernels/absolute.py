"""Encodings that depend on both positions: the softmax row by row, pulled and pushed a block of queries at a time.

O(N^2) time like any dense product, but never more than `BLOCK_ENTRIES` logits in memory.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from posbias.architecture import HeadGroup
from posbias.theory.kernels.base import Kernel
from posbias.theory.kernels.dense import dense_group, masked_softmax

BLOCK_ENTRIES = 1_000_000
"""Logits held at a time (8 MB)."""


class AbsoluteKernel(Kernel):
    """Heads whose logits are any function of query and key position."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self.n_positions = n_positions
        self._group = group
        group.encoding.pair_logits(np.array([n_positions - 1]), np.array([0]), group.n_heads)

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A."""
        total = np.zeros(self.n_positions)
        for queries, weights in self._blocks():
            total += row[queries] @ weights
        return total

    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """A @ column."""
        return np.concatenate([weights @ column for _, weights in self._blocks()])

    def matrix(self) -> Float64[np.ndarray, "query key"]:
        """Softmax of the logits, densely."""
        return dense_group(self._group, self.n_positions)

    def diagonal(self) -> Float64[np.ndarray, "n_positions"]:
        """Read off the blocks."""
        return np.concatenate([weights[np.arange(len(weights)), queries] for queries, weights in self._blocks()])

    def _blocks(self) -> Iterator[tuple[np.ndarray, Float64[np.ndarray, "block n_positions"]]]:
        """Queries and their rows of the group's part of the layer's mean attention."""
        group, n_positions = self._group, self.n_positions
        size = max(1, BLOCK_ENTRIES // (n_positions * len(group.heads)))
        for start in range(0, n_positions, size):
            queries = np.arange(start, min(start + size, n_positions))
            logits = group.logits_of_rows(queries, n_positions)
            visible = group.mask.visible(n_positions, queries)
            rows = [masked_softmax(visible, head, sink) for head, sink in zip(logits, group.sinks, strict=True)]
            yield queries, np.sum(rows, axis=0) / group.n_heads
