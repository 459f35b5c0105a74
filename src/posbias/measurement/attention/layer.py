"""One layer's attention on one prompt, reduced in blocks of queries to sums per head, counts and kernels in cells.

Sums are kept in float64 whatever the weights' precision (docs/theory, section 6). Prefix-monotonicity, on the fly or of
kernels that were kept: F_i(k) = sum_{j <= k} A_ij is compared with F_i+1(k) for k < i; at k = i the mass is 1, which
nothing can exceed.

Of content logits the means over pairs need no pair at all; histograms take one pass over blocks of queries: CELLS equal
cells from -B to B with B = max |q| max |k| of the head, which no logit exceeds: the range needs no pass of its own.

Similarity is how concentrated the entries of each head are within the range of the whole model: 1 - entropy / log(BINS)
over equal bins between two quantiles of all entries of all heads (`Similarity`); a quantile is off by less than a fine
cell, and a cell that straddles an edge is divided in proportion.

Source: arXiv 2602.16837, appendix E, and its notebook attention_stats. There the quantiles are those of a random
million of entries, among them those above the diagonal, which no query sees.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posbias.measurement.attention.statistics import MeanSimilarity, PrefixMonotonicity
from posbias.models.attention import AttentionBlock, AttentionLayer, AttentionState, query_blocks

CELLS = 8192
"""Cells of the fine histograms: a head whose B is ten times the model's range of logits has 2 cells for each bin."""

SMALLEST_BOUND = 1e-30
"""B of a head whose logits are all zero, so that its cells have a width."""
BINS = 199
TAILS = (0.005, 0.995)
"""Quantiles at which the bins begin and end."""
BISECTIONS = 60
ROUND_OFF = 1e-6
"""Prefix masses are sums of softmaxes computed in float32; a rise below this is not a violation."""


class PrefixWatch:
    """Counts violations within one kernel whose rows arrive in blocks, last rows first; only one row is kept."""

    def __init__(self, n_positions: int, device: torch.device) -> None:
        self._n_positions = n_positions
        self._below: Tensor | None = None
        """F of the row under the next block, all keys."""
        self._violations = torch.zeros((), dtype=torch.float64, device=device)
        self._rise = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, mass: Float64[Tensor, "query key"], queries: slice, keys: slice) -> None:
        """Compare the rows of a block with each other, and its last row with the first of the block before.

        `mass` is F of the block's queries at its keys; rows end at 1, and are 0 to the left of the keys. The block
        given before starts where this one stops.
        """
        below = mass[1:]
        if self._below is not None:
            below = torch.cat([below, self._below[None, keys]])
        rise = below - mass[: len(below)]
        query = torch.arange(queries.start, queries.start + len(rise), device=mass.device)
        key = torch.arange(keys.start, keys.stop, device=mass.device)
        rise = rise * ((rise > ROUND_OFF) & (key < query[:, None]))
        self._violations += (rise > 0).sum()
        self._rise += rise.sum()
        self._below = torch.ones(self._n_positions, dtype=mass.dtype, device=mass.device)
        self._below[: keys.start] = 0
        self._below[keys] = mass[0]

    def result(self) -> tuple[float, float]:
        """Share of violated triples and their mean rise."""
        violations = float(self._violations)
        triples = (self._n_positions - 1) * (self._n_positions - 2) // 2
        return violations / triples, float(self._rise) / violations if violations else 0.0


def prefix_monotonicity(kernels: Float[Tensor, "layers n_positions n_positions"]) -> PrefixMonotonicity:
    """Violations of F_i+1(k) <= F_i(k), F_i(k) = sum_{j <= k} A_ij, over all k < i.

    Kernels are lower triangular, of at least 3 positions, with rows up to a factor: a row is divided by its sum in
    float64, which takes out both the number of prompts summed and the softmax's own round-off.
    """
    n_positions = kernels.shape[-1]
    everything = slice(0, n_positions)
    results = []
    for kernel in kernels:
        watch = PrefixWatch(n_positions, kernel.device)
        watch.add(prefix_mass(kernel), everything, everything)
        results.append(watch.result())
    return PrefixMonotonicity(*np.array(results).T)


def prefix_mass(rows: Float[Tensor, "*rows key"]) -> Float64[Tensor, "*rows key"]:
    """Cumulative sums over keys in float64, every row divided by its sum."""
    mass = rows.double().cumsum(-1)
    return mass / mass[..., -1:]


@dataclass(frozen=True, eq=False)
class KernelSums:
    """Sums of one layer's kernels, in cells of neighbouring positions."""

    bounds: Int64[Tensor, "edges"]
    """First position of each cell, and N."""
    mean: Float[Tensor, "cells cells"]
    squared: Float[Tensor, "cells cells"]
    by_head: Float[Tensor, "heads cells cells"] | None

    def add(self, part: AttentionBlock, mass: Float64[Tensor, "query key"]) -> None:
        """Add a block of queries, `mass` the prefix sums of its mean over heads."""
        queries = torch.arange(part.queries.start, part.queries.stop).to(self.bounds)
        cell_of_query = torch.searchsorted(self.bounds, queries, right=True)
        edges = self.bounds.clamp(part.keys.start, part.keys.stop) - part.keys.start
        squares = part.weights.square().mean((0, 1)).double().cumsum(-1)
        self.mean.index_add_(0, cell_of_query - 1, _between(mass, edges).to(self.mean))
        self.squared.index_add_(0, cell_of_query - 1, _between(squares, edges).to(self.squared))
        if self.by_head is not None:
            heads = _between(part.weights.flatten(0, 1).double().cumsum(-1), edges)
            self.by_head.index_add_(1, cell_of_query - 1, heads.to(self.by_head))


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one layer's attention on one prompt; `AttentionStatistics` has the definitions."""

    distance: Float64[np.ndarray, "heads"]
    entropy: Float64[np.ndarray, "heads"]
    sinks: Float64[np.ndarray, "thresholds n_positions"]
    """Mean over heads."""
    learned_sink: Float64[np.ndarray, "heads"] | None
    violated: float
    gap: float
    row_error: float


def reduce_layer(
    layer: AttentionLayer, state: AttentionState, *, thresholds: Sequence[float], block: int, kernels: KernelSums
) -> LayerStatistics:
    """Recompute one layer's attention on one prompt, keep its sums and add its kernels.

    Every query but the first must see at least 2 keys; `state` is as the dot product sees it, `thresholds` are those of
    the sink score, `block` the most queries at a time.
    """
    n_positions, device = state.key.shape[1], state.key.device
    position = torch.arange(n_positions, dtype=torch.float64, device=device)
    reach = n_positions if layer.reach is None else layer.reach
    visible = (position + 1).clamp(max=reach)
    # The first query sees itself alone: its entropy is 0 of log 1 = 0 and it is left out.
    entropy_weights = torch.where(visible > 1, 1 / visible.log(), 0.0)
    distance = torch.zeros(state.query.shape[:2], dtype=torch.float64, device=device)
    entropy = torch.zeros_like(distance)
    counts = torch.zeros(len(thresholds), n_positions, dtype=torch.float64, device=device)
    sink_mass = None if layer.parts.sinks is None else torch.zeros_like(distance)
    prefix = PrefixWatch(n_positions, device)
    row_error = 0.0
    for part in query_blocks(layer.parts, state, reach=layer.reach, block=block):
        weights, among_keys = part.weights, part.among_keys()
        # sum_j A_ij (i - j), with distances counted from the block's first query so that small ones stay precise.
        start = part.queries.start
        back = start - torch.arange(part.keys.start, part.keys.stop, dtype=weights.dtype, device=device)
        offset = torch.arange(part.queries.stop - start, dtype=torch.float64, device=device)
        distance += ((among_keys @ back).double() + offset).sum(-1)
        # -sum_j A_ij log A_ij; zeros add nothing.
        logarithms = among_keys.clamp_min(torch.finfo(among_keys.dtype).tiny).log_()
        entropies = logarithms.mul_(among_keys).sum(-1).double().neg_()
        entropy += (entropies * entropy_weights[part.queries]).sum(-1)
        for row, threshold in zip(counts, thresholds, strict=True):
            row[part.keys] += (weights > threshold).to(weights.dtype).sum((0, 1, 2))
        rows = weights.sum(-1) - 1
        if part.sink is not None and sink_mass is not None:
            rows += part.sink
            sink_mass += part.sink.double().sum(-1)
        row_error = max(row_error, float(rows.abs().max()))
        mean = weights.mean((0, 1))
        mass = prefix_mass(mean)
        prefix.add(mass, part.queries, part.keys)
        if part.sink is not None:  # summed, not 1 less the sink: a small rest keeps its digits
            mass = mass * mean.double().sum(-1, keepdim=True)
        kernels.add(part, mass)
    queries_of_key = (n_positions - position).clamp(max=reach)
    violated, gap = prefix.result()
    return LayerStatistics(
        distance=(distance / n_positions).flatten().numpy(force=True),
        entropy=(entropy / (visible > 1).sum()).flatten().numpy(force=True),
        sinks=(counts / (layer.parts.heads * queries_of_key)).numpy(force=True),
        learned_sink=None if sink_mass is None else (sink_mass / n_positions).flatten().numpy(force=True),
        violated=violated,
        gap=gap,
        row_error=row_error,
    )


def _between(running: Float64[Tensor, "*rows key"], edges: Int64[Tensor, "edges"]) -> Float64[Tensor, "*rows cells"]:
    """Sums over the keys between neighbouring edges, from running sums."""
    return torch.nn.functional.pad(running, (1, 0))[..., edges].diff(dim=-1)


@dataclass(frozen=True, eq=False)
class LayerContent:
    """One layer's content logits on one prompt."""

    diagonal: Float64[np.ndarray, "heads n_positions"]
    """All entries j = i."""
    off_diagonal: Float64[np.ndarray, "heads"]
    """Mean over visible j < i."""
    counts: Int64[np.ndarray, "heads cells"]
    """Histogram of the visible entries j < i."""
    bound: Float64[np.ndarray, "heads"]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a layer that count, and the number of queries that are looked at together."""

    reach: int
    """Keys a query sees, its own included, >= 2."""
    rows: int


def reduce_content(
    state: AttentionState, *, scale: float, pairs: Pairs, into: Float[Tensor, "heads query key"] | None
) -> LayerContent:
    """Diagonal, mean and histogram of scale * q_i.k_j, without positions; the logits are added `into` if given."""
    key_length = state.key.norm(dim=-1).amax(-1)
    bound = (state.query.norm(dim=-1).amax(-1) * key_length[:, None] * abs(scale)).flatten().clamp_min(SMALLEST_BOUND)
    counts = torch.zeros(len(bound), CELLS, dtype=torch.long, device=bound.device)
    for queries, keys, logits in _content_blocks(state, scale=scale, pairs=pairs):
        counts += count_cells(logits, bound, _hidden(queries, keys, pairs.reach, logits.device))
        if into is not None:
            into[:, queries, keys] += logits
    diagonal = (state.query.double() * state.key.double()[:, None]).sum(-1).flatten(0, 1) * scale
    return LayerContent(
        diagonal=diagonal.numpy(force=True),
        off_diagonal=off_diagonal_mean(state, scale=scale, reach=pairs.reach).numpy(force=True),
        counts=counts.numpy(force=True),
        bound=bound.double().numpy(force=True),
    )


def reduce_mean_content(
    mean: Float[Tensor, "heads n_positions n_positions"], *, pairs: Pairs, diagonal: Float64[np.ndarray, "heads n"]
) -> LayerContent:
    """Diagonal, mean and histogram of content logits averaged over prompts; entries that no query sees do not matter.

    `diagonal` has the precise values at j = i.
    """
    n_positions = mean.shape[-1]
    everything = slice(0, n_positions)
    visible = ~_hidden(everything, everything, pairs.reach, mean.device)
    below = torch.where(visible, mean, 0)
    bound = torch.maximum(below.amax((1, 2)), -below.amin((1, 2)))
    bound = torch.maximum(bound, torch.as_tensor(np.abs(diagonal).max(1)).to(below))
    bound = bound.clamp_min(SMALLEST_BOUND)
    counts = torch.zeros(len(mean), CELLS, dtype=torch.long, device=mean.device)
    for start in range(0, n_positions, pairs.rows):
        rows = slice(start, min(start + pairs.rows, n_positions))
        counts += count_cells(mean[:, rows], bound, ~visible[rows])
    off_diagonal = below.sum((1, 2), dtype=torch.float64) / visible.sum()
    numbers = (values.numpy(force=True) for values in (off_diagonal, counts, bound.double()))
    return LayerContent(diagonal, *numbers)


def count_cells(
    logits: Float[Tensor, "heads query key"], bound: Float[Tensor, "heads"], hidden: Bool[Tensor, "query key"]
) -> Int64[Tensor, "heads cells"]:
    """Number of entries in each cell, hidden ones apart."""
    width = 2 * bound / CELLS
    cell = ((logits + bound[:, None, None]) / width[:, None, None]).to(torch.int32).clamp_(0, CELLS - 1)
    cell.masked_fill_(hidden, CELLS)
    return torch.stack([torch.bincount(head.flatten(), minlength=CELLS + 1)[:CELLS] for head in cell])


def off_diagonal_mean(state: AttentionState, *, scale: float, reach: int) -> Float64[Tensor, "heads"]:
    """Mean of scale * q_i.k_j over visible j < i, from running sums of keys; `reach` >= 2 counts a query's own key.

    sum_{j < i} q_i.k_j = q_i . (K_{i-1} - K_{i-reach}), K the cumulative sum: order N d, no pair is formed.
    """
    query, key = state.query.double(), state.key.double()
    before = torch.nn.functional.pad(key.cumsum(1), (0, 0, 1, 0))  # before[i] = k_0 + ... + k_(i-1)
    index = torch.arange(key.shape[1], device=key.device)
    first = (index - reach + 1).clamp(min=0)
    earlier = before[:, index] - before[:, first]
    pairs = int((index - first).sum())
    total = (query * earlier[:, None]).sum((-1, -2))
    mean: Tensor = total.flatten() * scale / pairs
    return mean


def _content_blocks(
    state: AttentionState, *, scale: float, pairs: Pairs
) -> Iterator[tuple[slice, slice, Float[Tensor, "heads query key"]]]:
    """Queries, keys and their logits; keys outside a block's range are seen by none of its queries."""
    n_positions = state.key.shape[1]
    for start in range(0, n_positions, pairs.rows):
        stop = min(start + pairs.rows, n_positions)
        first = max(0, start - pairs.reach + 1)
        query = (state.query[:, :, start:stop] * scale).flatten(1, 2)
        logits = query @ state.key[:, first:stop].transpose(1, 2)
        yield slice(start, stop), slice(first, stop), logits.reshape(-1, stop - start, stop - first)


def _hidden(queries: slice, keys: slice, reach: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """All pairs except visible j < i."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key >= query) | (key <= query - reach)


def similarity_of(layers: Sequence[LayerContent]) -> tuple[MeanSimilarity, Float64[np.ndarray, "2"]]:
    """Similarity of all layers and heads over bins that they share, and the outer edges of these.

    If the bins together are narrower than a fine cell, all entries count as equal: similarity 1, none outside.
    """
    bound = np.stack([layer.bound for layer in layers])
    counts = np.stack([layer.counts for layer in layers])
    cumulative = np.concatenate([np.zeros((*counts.shape[:2], 1)), counts.cumsum(axis=2)], axis=2)
    diagonal = np.stack([layer.diagonal for layer in layers])
    ordered = np.sort(diagonal, axis=None)

    def below(value: float) -> float:
        return float(_counted(cumulative, bound, np.array([value])).sum() + np.searchsorted(ordered, value, "right"))

    total = counts.sum() + ordered.size
    limit = float(bound.max())
    low, high = (_solve(below, share * total, limit=limit) for share in TAILS)
    if high - low <= 2 * limit / CELLS:
        return MeanSimilarity(*np.ones((2, *bound.shape)), *np.zeros((2, *bound.shape))), np.array([low, high])
    edges = np.linspace(low, high, BINS + 1)
    off = np.diff(_counted(cumulative, bound, edges), axis=-1)
    place = np.searchsorted(edges, diagonal, "right") - 1
    on = np.stack([(place == index).sum(axis=-1) for index in range(BINS)], axis=-1).astype(np.float64)
    binned, sizes = np.stack([on, off]), np.stack([np.full(bound.shape, diagonal.shape[-1]), counts.sum(-1)])
    inside = binned.sum(-1)
    # 1 - entropy / log(BINS); 0 where nothing is inside, as in the published code.
    share = binned / np.maximum(inside, 1e-300)[..., None]
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1)
    similarity = np.where(inside > 0, 1 - entropy / np.log(BINS), 0.0)
    return MeanSimilarity(*similarity, *(1 - inside / sizes)), np.array([low, high])


def _counted(
    cumulative: Float64[np.ndarray, "layers heads edges"],
    bound: Float64[np.ndarray, "layers heads"],
    values: Float64[np.ndarray, "values"],
) -> Float64[np.ndarray, "layers heads values"]:
    """Number of entries below each value, linear within a fine cell."""
    place = np.clip((values / bound[..., None] + 1) * (CELLS / 2), 0, CELLS)
    cell = np.minimum(place.astype(np.int64), CELLS - 1)
    start, stop = (np.take_along_axis(cumulative, index, axis=-1) for index in (cell, cell + 1))
    return np.asarray(start + (stop - start) * (place - cell))


def _solve(below: Callable[[float], float], count: float, *, limit: float) -> float:
    """The value below which `count` entries lie, by bisection from -limit to limit."""
    low, high = -limit, limit
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if below(middle) < count:
            low = middle
        else:
            high = middle
    return (low + high) / 2
