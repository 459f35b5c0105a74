"""Linear layers with matrix states as kernels: decays, and corrections of what a key already finds (delta rule).

S_t = S_{t-1} diag(kept_t) (I - erased_t k_t k_t') + written_t v_t k_t' and o_t = S_t q_t, hence o = A v with
A_tj = written_j k_j' diag(kept_{j+1}) (I - erased_{j+1} k_{j+1} k_{j+1}') ... (I - erased_t k_t k_t') q_t. Without
erasure it is gated linear attention and Mamba 2 (written: the step); with erased = written gated DeltaNet; `kept` by
channel gives Kimi Delta Attention. A is lower triangular, with entries of both signs.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float64
from numba import njit

from posbias.errors import UsageError


@njit(cache=True, nogil=True)
@no_type_check
def _scan(query, key, kept, written, erased, row, out):
    """out_j = written_j k_j . w_j, from the end: w gathers row_t q_t, loses what k erases, and decays."""
    width, step = key.shape[1], 1 if kept.shape[1] > 1 else 0
    carried = np.zeros(width)
    for position in range(row.size - 1, -1, -1):
        met = 0.0
        for channel in range(width):
            carried[channel] += row[position] * query[position, channel]
            met += key[position, channel] * carried[channel]
        out[position] = written[position] * met
        for channel in range(width):
            left = carried[channel] - erased[position] * met * key[position, channel]
            carried[channel] = kept[position, channel * step] * left


@dataclass(frozen=True, eq=False)
class StateKernel:
    """One head of a linear layer as a signed matrix A [query key]: outputs are A times values."""

    query: Float64[np.ndarray, "n_positions feature"]
    key: Float64[np.ndarray, "n_positions feature"]
    kept: Float64[np.ndarray, "n_positions gates"]
    """Share of the state that each position keeps, in [0, 1]: one for all channels of the keys, or one for each."""
    written: Float64[np.ndarray, "n_positions"]
    """Factor of what is written."""
    erased: Float64[np.ndarray, "n_positions"]
    """Factor of what a key finds and takes away first."""

    def __post_init__(self) -> None:
        if self.kept.shape[1] not in (1, self.key.shape[1]):
            raise UsageError(f"kept must have 1 gate or {self.key.shape[1]}, one per channel; got {self.kept.shape[1]}")
        if not np.all((self.kept >= 0) & (self.kept <= 1)):
            raise UsageError("kept must lie in [0, 1]")

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A in O(n_positions features) time and O(features) memory beside the result."""
        out = np.empty(len(row))
        _scan(self.query, self.key, self.kept, self.written, self.erased, row, out)
        return out

    def row(self, query: int) -> Float64[np.ndarray, "n_positions"]:
        """What one position reads of every position's values."""
        unit = np.zeros(len(self.key))
        unit[query] = 1.0
        return self.pull(unit)
