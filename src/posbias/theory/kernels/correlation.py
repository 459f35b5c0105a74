"""Sums over distances for any kernel, out_t = sum_d weight(d) signal_(t-d), without losing tiny entries.

Divide and conquer: the pairs (later half, earlier half) of a block are a convolution in which every output sees every
input, so a Fourier transform of that pair loses little relative to its smallest output. That is checked each time; a
pair that fails, or that straddles the edge of a window, is cut in four, down to blocks that are summed directly.
O(N log^2 N) for kernels of moderate range, O(N^2) at worst.
"""

import numpy as np
from jaxtyping import Complex128, Float64
from scipy import fft

from posbias.theory.kernels.loops import TINY, correlate_block

LEAF = 256
"""Blocks up to this size are summed directly."""

ACCEPTED = 5e-13
"""Largest estimated relative error of a transformed pair; half the contract of 1e-12 that kernels keep."""

SAFETY = 8.0
"""Times the root-mean-square round-off eps log2(n) |weight| |signal| / sqrt(n) of a transformed pair of length n."""

WIDE = 1e7
"""Weights that differ by more than this within a pair are cut without trying a transform."""


class Correlation:
    """Repeated sums over distances with one set of weights; transforms of the weights are kept."""

    def __init__(self, weights: Float64[np.ndarray, "window"], n_positions: int) -> None:
        """`weights[d - 1]` >= 0 is the weight of distance d; distances past the last are not seen."""
        seen = np.flatnonzero(weights[: n_positions - 1])
        self._weights = weights[: seen[-1] + 1 if seen.size else 0]
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
        """Add what the inputs from `earlier` send to the outputs from `later`, both blocks of `size` positions."""
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
        """Add the pair's convolution by Fourier transform; False, and nothing added, where it would lose accuracy."""
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
        """Transform of the weights a pair of blocks (size, gap in blocks) needs; None where it is not worth trying."""
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
