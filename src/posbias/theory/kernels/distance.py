"""Any encoding that depends on the distance alone (RoPE with constant content ...).

Weights are exp(logit - largest logit); running normalisers are compensated sums (docs/theory, section 1). Sums over
distances, out_t = sum_d weight(d) signal_(t-d), go by divide and conquer without losing tiny entries: the pairs (later
half, earlier half) of a block are a convolution in which every output sees every input, so a Fourier transform of that
pair loses little relative to its smallest output. That is checked each time; a pair that fails, or that straddles the
edge of a window, is cut in four, down to blocks that are summed directly. O(N log^2 N) for kernels of moderate range,
O(N^2) at worst.
"""

import numpy as np
from jaxtyping import Complex128, Float64, Int64
from scipy import fft

from posbias.architecture import HeadGroup
from posbias.theory.kernels.interval import IntervalKernel, Shares, Side, split_rows
from posbias.theory.kernels.loops import TINY, compensated_sums, correlate_block

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
