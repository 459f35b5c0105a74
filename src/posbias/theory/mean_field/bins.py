"""Positions gathered into bins, and kernels K(i, j) stored per pair of bins.

Short contexts use one bin per position, and everything is exact. Long contexts use bins that grow with the position:
kernels at initialisation vary on a logarithmic scale, except that i = j differs from i != j, so both are kept.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError

EXACT_POSITIONS = 512
"""Up to here every position has its own bin, if nothing asks for more."""
MOST_BINS = 2048
"""Kernels of more bins are refused: a matrix has 32 MB then, and a pass over 24 layers takes a minute."""
RELATIVE_WIDTH = 0.02
"""Width of a bin over its position in long contexts; norms then agree to 0.03 % with unit bins (N = 1024)."""
BINS_PER_WINDOW = 16
"""A sliding window is resolved by at least so many bins."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Consecutive groups of positions; group a holds starts[a] ... starts[a] + sizes[a] - 1."""

    sizes: Int64[np.ndarray, "bin"]

    @cached_property
    def starts(self) -> Int64[np.ndarray, "bin"]:
        """First position of every bin."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    @property
    def count(self) -> int:
        """Number of bins."""
        return int(self.sizes.size)

    @property
    def n_positions(self) -> int:
        """Number of positions N."""
        return int(self.sizes.sum())

    @property
    def exact(self) -> bool:
        """Whether every position has its own bin."""
        return self.count == self.n_positions

    def spread(self, values: Float64[np.ndarray, "bin"]) -> Float64[np.ndarray, "n_positions"]:
        """One value per position from one value per bin: linear in log position, the last position apart."""
        if self.exact:
            return values
        centres = (self.starts + (self.sizes - 1) / 2)[:-1]
        positions = np.arange(self.n_positions - 1)
        spread = np.interp(np.log1p(positions), np.log1p(centres), values[:-1])
        return np.append(spread, values[-1])


def unit_bins(n_positions: int) -> Bins:
    """One bin per position."""
    if n_positions < 1:
        raise UsageError(f"mean field needs at least 1 position, got {n_positions}")
    return Bins(np.ones(n_positions, dtype=np.int64))


def growing_bins(n_positions: int, *, relative_width: float = RELATIVE_WIDTH, windows: Collection[int] = ()) -> Bins:
    """Bins as wide as `relative_width` times their position (at least 1), narrower where windows are.

    Args:
        n_positions: Context length N, >= 1.
        relative_width: Width over position, in (0, 1).
        windows: Widths of the sliding windows of the model. A bin is at most a sixteenth of the narrowest; and the
            last position's oldest visible key, where its influence jumps, and the key before it have their own bins.

    Returns:
        Bins that cover 0 ... N-1. The final position, where the gradient starts, has its own.
    """
    widest = max(1, min(windows, default=n_positions * BINS_PER_WINDOW) // BINS_PER_WINDOW)
    edges = {n_positions - window for window in windows if window < n_positions}
    stops = np.array(sorted({edge + step for edge in edges for step in (-1, 0, 1)} | {n_positions - 1}))
    sizes: list[int] = []
    done = 0
    while done < n_positions - 1:
        next_stop = int(stops[np.searchsorted(stops, done, side="right")])
        sizes.append(min(max(1, int(relative_width * done)), widest, next_stop - done))
        done += sizes[-1]
    return Bins(np.array([*sizes, 1], dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A symmetric function of two positions, constant on pairs of bins but for equal positions."""

    block: Float64[np.ndarray, "bin bin"]
    """Value at two different positions of the two bins (with unit bins the diagonal equals `same`)."""
    same: Float64[np.ndarray, "bin"]
    """Value at i = j."""

    def __add__(self, other: "Kernel") -> "Kernel":
        return Kernel(self.block + other.block, self.same + other.same)

    def __mul__(self, other: "Kernel") -> "Kernel":
        return Kernel(self.block * other.block, self.same * other.same)

    def scaled(self, factor: float, *, offset: float = 0.0) -> "Kernel":
        """factor * K + offset."""
        if factor == 1 and offset == 0:
            return self
        return Kernel(self.block * factor + offset, self.same * factor + offset)

    def over(self, scale: Float64[np.ndarray, "bin"]) -> "Kernel":
        """K_ij / (scale_i scale_j)."""
        return Kernel(self.block / scale[:, None] / scale[None, :], self.same / scale**2)

    def averaged(self, bins: Bins) -> Float64[np.ndarray, "bin bin"]:
        """Mean over all pairs of positions of two bins, equal positions included."""
        if bins.exact:
            return self.block
        mean = self.block.copy()
        inner = np.diagonal(self.block)
        np.fill_diagonal(mean, inner + (self.same - inner) / bins.sizes)
        return mean

    def mass(self, bins: Bins) -> Float64[np.ndarray, "bin bin"]:
        """Sum over all pairs of positions of two bins."""
        if bins.exact:
            return self.block
        return np.asarray(self.averaged(bins) * bins.sizes[:, None] * bins.sizes[None, :])


def smooth(block: Float64[np.ndarray, "bin bin"]) -> Kernel:
    """A kernel without anything special at i = j."""
    return Kernel(block, np.diagonal(block).copy())


def from_mass(mass: Float64[np.ndarray, "bin bin"], bins: Bins) -> Kernel:
    """A smooth kernel from its sums over pairs of bins."""
    return smooth(mass if bins.exact else mass / bins.sizes[:, None] / bins.sizes[None, :])
