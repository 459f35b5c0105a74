"""What a kernel is: the mean attention of a layer (or of some of its heads) as an operator on rows and columns.

A pull carries influence from queries to keys, y = x A; a push carries it from keys to queries, y = A v
(docs/theory, section 1). No kernel with a closed positional form builds its N x N matrix to do so.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError


class Kernel(ABC):
    """A non-negative matrix A [query key], rows summing to at most the share of heads it stands for."""

    n_positions: int

    @abstractmethod
    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A for a non-negative row: relative error below 1e-12 per entry, down to entries of 1e-290."""

    @abstractmethod
    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """A @ column for a non-negative column, with the same accuracy."""

    @abstractmethod
    def matrix(self) -> Float64[np.ndarray, "query key"]:
        """A itself, built densely and independently of `pull`: for small checks."""

    @abstractmethod
    def diagonal(self) -> Float64[np.ndarray, "n_positions"]:
        """A_ii: the attention each position pays to itself."""


class SumKernel(Kernel):
    """The sum of several kernels: a layer whose heads do not all share mask and encoding."""

    def __init__(self, parts: Sequence[Kernel]) -> None:
        if len({part.n_positions for part in parts}) != 1:
            raise UsageError(f"kernels of one layer need equal lengths, got {[part.n_positions for part in parts]}")
        self.parts = tuple(parts)
        self.n_positions = parts[0].n_positions

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """The parts' pulls, added."""
        total = self.parts[0].pull(row)
        for part in self.parts[1:]:
            total += part.pull(row)
        return total

    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """The parts' pushes, added."""
        total = self.parts[0].push(column)
        for part in self.parts[1:]:
            total += part.push(column)
        return total

    def matrix(self) -> Float64[np.ndarray, "query key"]:
        """The parts' matrices, added."""
        return np.sum([part.matrix() for part in self.parts], axis=0)  # type: ignore[no-any-return]

    def diagonal(self) -> Float64[np.ndarray, "n_positions"]:
        """The parts' diagonals, added."""
        return np.sum([part.diagonal() for part in self.parts], axis=0)  # type: ignore[no-any-return]
