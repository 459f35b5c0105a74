"""Kernels of logits by distance under interval masks: keys within a reach back, and forward keys in a mutual prefix.

A = lower + upper + diagonal, each row divided by its normaliser, and each part a sum over distances
(docs/theory, section 1). The diagonal is kept apart throughout, so that content offsets of hundreds of nats neither
overflow nor swallow the off-diagonal part. Weights are exp(logit - largest logit), normalisers compensated sums.

Sums over distances, out_t = sum_d weight(d) signal_(t-d), go by divide and conquer without losing tiny entries: the
pairs (later half, earlier half) of a block are a convolution in which every output sees every input, so a Fourier
transform of that pair loses little relative to its smallest output. That is checked; a pair that fails, or straddles
the edge of a window, is cut in four, down to blocks that are summed directly. O(N log^2 N) for kernels of moderate
range, O(N^2) at worst.
"""

import numpy as np
from jaxtyping import Complex128, Float64
from scipy import fft

from posbias.architecture import HeadGroup
from posbias.theory.kernels.base import Kernel
from posbias.theory.kernels.loops import TINY, compensated_sums, correlate_block

Vector = Float64[np.ndarray, "n"]

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


def split_rows(off: Vector, diagonal_logit: float, sink_logit: float) -> tuple[Vector, Vector]:
    """Attention per unit of the off-diagonal weight `off` of each row (0 for none), and of each query to itself.

    Both logits are relative to the unit of `off`. The largest of the three counts as 1, so nothing overflows and no
    digit is lost for offsets of any size.
    """
    top = max(0.0, diagonal_logit, sink_logit)
    unit = np.exp(-top)
    diagonal = np.exp(diagonal_logit - top)
    total = off * unit + diagonal + np.exp(sink_logit - top)
    alone = 1.0 if sink_logit == -np.inf else 1 / (1 + np.exp(np.minimum(sink_logit - diagonal_logit, 700.0)))
    safe = np.where(off > 0, total, 1.0)
    return np.where(off > 0, unit / safe, 0.0), np.where(off > 0, diagonal / safe, alone)


class DistanceKernel(Kernel):
    """Heads of one group whose logits are any function of the distance, equal ones merged."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self.n_positions = n_positions
        self._prefix, window = group.mask.mutual_prefix(n_positions), group.mask.reach(n_positions) - 1
        sides = np.arange(1, window + 1), -np.arange(1, max(self._prefix, 1)), np.zeros(1, dtype=np.int64)
        logits = [group.encoding.logits(side, group.n_heads) for side in sides]
        members: dict[tuple[object, ...], list[int]] = {}
        for head, layer_head in enumerate(group.heads):
            of_head = (side[layer_head].tobytes() for side in logits)
            members.setdefault((group.content[head], group.sinks[head], *of_head), []).append(head)
        query = np.arange(n_positions)
        before, after = np.minimum(query, window), np.maximum(0, self._prefix - 1 - query)
        self._heads: list[tuple[float, Vector, Vector, Correlation, Correlation]] = []
        """Of heads that are alike: share of the layer; each query's attention per unit of weight of other keys, and to
        itself; sums over keys before the query, and after it in a mutual prefix."""
        self.rises_too_far = False
        """True if all keys of some row lie so far below the largest logit that common weights would lose the row."""
        for head, *others in members.values():
            lower, upper, at_query = (side[group.heads[head]] for side in logits)
            seen = [side for side in (lower, upper) if side.size]
            largest = max((side.max() for side in seen), default=at_query[0])  # its weight counts as 1
            self.rises_too_far |= largest - min((side[0] for side in seen), default=largest) > MOST_RISE
            weights = [np.exp(side - largest) for side in (lower, upper)]
            sums = [np.append(0.0, compensated_sums(side)) for side in weights]
            diagonal = float(at_query[0] + group.content[head] - largest)
            rows = split_rows(sums[0][before] + sums[1][after], diagonal, float(group.sinks[head] - largest))
            correlations = Correlation(weights[0], n_positions), Correlation(weights[1], self._prefix)
            self._heads.append(((1 + len(others)) / group.n_heads, *rows, *correlations))

    def pull(self, row: Vector) -> Vector:
        """Every head's pull, weighted."""
        total, prefix = np.zeros(self.n_positions), self._prefix
        for weight, per_unit, itself, lower, upper in self._heads:
            inside = row * per_unit
            off = lower(inside[::-1].copy())[::-1]
            off[:prefix] += upper(inside[:prefix].copy())
            total += weight * (off + itself * row)
        return total
