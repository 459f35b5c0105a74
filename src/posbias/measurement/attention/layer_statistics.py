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

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.measurement.attention.statistics import MeanSimilarity, PrefixMonotonicity
from posbias.models.attention_blocks import AttentionBlock, AttentionState, block_ranges, hide, query_blocks

CELLS = 8192
"""Cells of the fine histograms: a head whose B is ten times the model's range of logits has 2 cells for each bin."""

HIDDEN = CELLS + 1
"""Slot of the entries that do not count; the slot before it is the upper bound's own."""
SMALLEST_BOUND = 1e-30
"""B of a head whose logits are all zero, so that its cells have a width."""
SHIFT_FEATURES = 4
"""Features that add half the cells to a logit, as many as keep rows aligned in memory."""
MOST_COUNTED = 255
"""Heads whose entries above a threshold are counted in one byte."""
BINS = 199
TAILS = (0.005, 0.995)
"""Quantiles at which the bins begin and end."""
SECTIONS, DIVISIONS = 64, 9
"""Parts of an interval that holds a quantile, and how often it is divided: to 64^-9 of the range."""
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
        # Of the keys before a query alone; what rounding alone can give is no rise.
        rise = torch.threshold(rise.tril_(queries.start - keys.start - 1), ROUND_OFF, 0.0)
        self._violations += rise.count_nonzero()
        self._rise += rise.sum()
        self._below = torch.ones(self._n_positions, dtype=mass.dtype, device=mass.device)
        self._below[: keys.start] = 0
        self._below[keys] = mass[0]

    def result(self) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
        """Share of violated triples and their mean rise."""
        triples = (self._n_positions - 1) * (self._n_positions - 2) // 2
        return self._violations / triples, self._rise / self._violations.clamp_min(1)


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
        results.append(torch.stack(watch.result()))
    return PrefixMonotonicity(*torch.stack(results, 1).numpy(force=True))


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

    def add(self, part: AttentionBlock, mass: Float64[Tensor, "query key"]) -> None:
        """Add a block of queries, `mass` the prefix sums of its mean over heads."""
        queries = torch.arange(part.queries.start, part.queries.stop, device=self.bounds.device)
        cell_of_query = torch.searchsorted(self.bounds, queries, right=True)
        edges = (self.bounds.clamp(part.keys.start, part.keys.stop) - part.keys.start).to(mass.device)
        squares = part.weights.square().mean((0, 1)).double().cumsum(-1)
        self.mean.index_add_(0, cell_of_query - 1, _between(mass, edges).to(self.mean))
        self.squared.index_add_(0, cell_of_query - 1, _between(squares, edges).to(self.squared))


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one layer's attention on one prompt; `AttentionStatistics` has the definitions."""

    distance: Float64[Tensor, "heads"]
    entropy: Float64[Tensor, "heads"]
    sinks: Float64[Tensor, "thresholds n_positions"]
    """Mean over heads."""
    learned_sink: Float64[Tensor, "heads"] | None
    violated: Float64[Tensor, ""]
    gap: Float64[Tensor, ""]
    row_error: Float64[Tensor, ""]


def reduce_layer(
    state: AttentionState, *, thresholds: Sequence[float], block: int | None, kernels: KernelSums
) -> LayerStatistics:
    """Form one layer's attention on one prompt, keep its sums and add its kernels.

    Every query but the first must see at least 2 keys; `thresholds` are those of the sink score, `block` the most
    queries at a time. Nothing is read back from an accelerator.
    """
    n_positions, device = state.key.shape[1], state.key.device
    position, first = torch.arange(n_positions, device=device), state.first.to(device)
    visible = (position - first).double() + 1
    # The first query sees itself alone: its entropy is 0 of log 1 = 0 and it is left out.
    entropy_weights = torch.where(visible > 1, 1 / visible.log(), 0.0)
    distance = torch.zeros(state.query.shape[:2], dtype=torch.float64, device=device)
    entropy = torch.zeros_like(distance)
    counts = torch.zeros(len(thresholds), n_positions, dtype=torch.float64, device=device)
    sink_mass = None if state.sinks is None else torch.zeros_like(distance)
    prefix = PrefixWatch(n_positions, device)
    row_error = torch.zeros((), dtype=torch.float64, device=device)
    for part in query_blocks(state, block=block):
        weights, start, rows = part.weights, part.queries.start, part.queries.stop - part.queries.start
        # sum_j A_ij (i - j), with distances counted from the block's first query so that small ones stay precise.
        back = start - torch.arange(part.keys.start, part.keys.stop, dtype=weights.dtype, device=device)
        moment, total = (weights @ torch.stack([back, torch.ones_like(back)], 1)).unbind(-1)
        if part.sink is None or sink_mass is None:
            row_error = torch.maximum(row_error, (total - 1).abs().max())
        else:
            row_error = torch.maximum(row_error, (total + part.sink - 1).abs().max())
            sink_mass += part.sink.sum(-1, dtype=torch.float64)
            moment = moment / total.clamp_min(torch.finfo(total.dtype).tiny)
        distance += moment.sum(-1, dtype=torch.float64) + rows * (rows - 1) / 2
        entropy += (_row_entropy(part.among_keys()).double() * entropy_weights[part.queries]).sum(-1)
        for row, threshold in zip(counts, thresholds, strict=True):
            for heads in torch.split((weights > threshold).view(torch.uint8).flatten(0, 1), MOST_COUNTED):
                row[part.keys] += heads.sum(0, dtype=torch.uint8).sum(0)
        mean = weights.mean((0, 1))
        mass = prefix_mass(mean)
        prefix.add(mass, part.queries, part.keys)
        if part.sink is not None:  # summed, not 1 less the sink: a small rest keeps its digits
            mass = mass * mean.double().sum(-1, keepdim=True)
        kernels.add(part, mass)
    queries_of_key = torch.searchsorted(first, position, right=True) - position
    violated, gap = prefix.result()
    return LayerStatistics(
        distance=(distance / n_positions).flatten(),
        entropy=(entropy / (visible > 1).sum()).flatten(),
        sinks=counts / (state.heads * queries_of_key),
        learned_sink=None if sink_mass is None else (sink_mass / n_positions).flatten(),
        violated=violated,
        gap=gap,
        row_error=row_error,
    )


def _row_entropy(weights: Float[Tensor, "*rows key"]) -> Float[Tensor, "*rows"]:
    """-sum_j A_ij log A_ij; zeros add nothing."""
    if weights.is_cpu:  # there `entr` takes four times as long
        logarithms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_()
        return -logarithms.mul_(weights).sum(-1)
    entropy: Tensor = torch.special.entr(weights).sum(-1)
    return entropy


def _between(running: Float64[Tensor, "*rows key"], edges: Int64[Tensor, "edges"]) -> Float64[Tensor, "*rows cells"]:
    """Sums over the keys between neighbouring edges, from running sums."""
    return torch.nn.functional.pad(running, (1, 0))[..., edges].diff(dim=-1)


@dataclass(frozen=True, eq=False)
class LayerContent:
    """One layer's content logits on one prompt."""

    diagonal: Float64[Tensor, "heads n_positions"]
    """All entries j = i."""
    off_diagonal: Float64[Tensor, "heads"]
    """Mean over visible j < i."""
    counts: Float64[Tensor, "heads cells"]
    """Histogram of the visible entries j < i."""
    bound: Float64[Tensor, "heads"]


def reduce_content(
    state: AttentionState, *, block: int | None, into: Float[Tensor, "heads query key"] | None
) -> LayerContent:
    """Diagonal, mean and histogram of scale * q_i.k_j before rotation; the logits are added `into` if given.

    Queries are scaled by head so that logits are counted in cells, and four more features add half the cells: what a
    product gives is a cell, once truncated. What is not finite is counted as zero, and shows in the bound.
    """
    scale = state.scale
    key_length = state.key.norm(dim=-1).amax(-1)
    bound = (state.query.norm(dim=-1).amax(-1) * key_length[:, None] * abs(scale)).clamp_min(SMALLEST_BOUND)
    finite = bound.isfinite()[..., None, None]
    unit = CELLS * scale / (2 * bound[..., None, None])
    query = torch.nn.functional.pad(torch.where(finite, state.query * unit, 0), (0, SHIFT_FEATURES), value=1.0)
    key = torch.where(finite.all(1), state.key, 0)
    key = torch.nn.functional.pad(key, (0, SHIFT_FEATURES), value=CELLS / 2 / SHIFT_FEATURES).transpose(1, 2)
    heads = bound.numel()
    counts = torch.zeros(heads, HIDDEN + 1, dtype=torch.float64, device=bound.device)
    for queries, keys in block_ranges(heads, state.first, device=bound.device, block=block):
        shape = (heads, queries.stop - queries.start, keys.stop - keys.start)
        cells = (query[:, :, queries].flatten(1, 2) @ key[..., keys]).to(torch.int64).view(shape)
        add_cells(counts, cells, queries, keys, first=state.first)
        if into is not None:
            logits = (state.query[:, :, queries] * scale).flatten(1, 2) @ state.key[:, keys].transpose(1, 2)
            into[:, queries, keys] += logits.view(shape).to(into)
    diagonal = (state.query.double() * state.key.double()[:, None]).sum(-1).flatten(0, 1) * scale
    return LayerContent(
        diagonal=diagonal,
        off_diagonal=off_diagonal_mean(state),
        counts=in_cells(counts),
        bound=bound.double().flatten(),
    )


def reduce_mean_content(
    mean: Float[Tensor, "heads n_positions n_positions"],
    *,
    first: Int64[Tensor, "n_positions"],
    block: int | None,
    diagonal: Float64[Tensor, "heads n_positions"],
) -> LayerContent:
    """Diagonal, mean and histogram of content logits averaged over prompts; entries that no query sees do not matter.

    `diagonal` has the precise values at j = i.
    """
    heads, device = len(mean), mean.device
    ranges = partial(block_ranges, heads, first, device=device, block=block)
    bound, total = diagonal.abs().amax(1).to(mean), torch.zeros(heads, dtype=torch.float64, device=device)
    for queries, keys in ranges():
        logits = mean[:, queries, keys].clone()
        hide(logits, queries, keys, first=first, value=0.0, itself=True)
        bound = torch.maximum(bound, logits.abs().amax((1, 2)))
        total += logits.sum((1, 2), dtype=torch.float64)
    bound = bound.clamp_min(SMALLEST_BOUND)
    unit = (CELLS / (2 * bound))[:, None, None]
    counts = torch.zeros(heads, HIDDEN + 1, dtype=torch.float64, device=device)
    for queries, keys in ranges():
        cells = (mean[:, queries, keys] * unit + CELLS / 2).clamp(0, CELLS).to(torch.int64)
        add_cells(counts, cells, queries, keys, first=first)
    return LayerContent(diagonal, total / _visible_pairs(first), in_cells(counts), bound.double())


def add_cells(
    counts: Float64[Tensor, "heads slots"],
    cells: Int64[Tensor, "heads query key"],
    queries: slice,
    keys: slice,
    *,
    first: Int64[Tensor, "n_positions"],
) -> None:
    """Count the visible entries j < i of every head by their cell; the slot HIDDEN takes the others."""
    hide(cells, queries, keys, first=first, value=HIDDEN, itself=True)
    one = torch.ones(1, 1, dtype=counts.dtype, device=counts.device)
    counts.scatter_add_(1, cells.flatten(1), one.expand(len(cells), cells[0].numel()))


def in_cells(counts: Float64[Tensor, "heads slots"]) -> Float64[Tensor, "heads cells"]:
    """Counts by cell: what lies at the upper bound, or beyond it by rounding, belongs to the last."""
    counts[:, CELLS - 1] += counts[:, CELLS]
    return counts[:, :CELLS]


def off_diagonal_mean(state: AttentionState) -> Float64[Tensor, "heads"]:
    """Mean of scale * q_i.k_j over visible j < i, from running sums of keys; some query sees a key before its own.

    sum_{j < i} q_i.k_j = q_i . (K_{i-1} - K_{f-1}), K the cumulative sum, f the first visible key: order N d, no pair
    is formed.
    """
    before = torch.nn.functional.pad(state.key.double().cumsum(1), (0, 0, 1, 0))  # before[i] = k_0 + ... + k_(i-1)
    earlier = before[:, :-1]
    if bool(state.first.any()):
        earlier = earlier - before[:, state.first.to(before.device)]
    total = torch.einsum("kgic,kic->kg", state.query.double(), earlier)
    return total.flatten() * (state.scale / _visible_pairs(state.first))


def _visible_pairs(first: Int64[Tensor, "n_positions"]) -> int:
    """Pairs j < i that are seen."""
    return int((np.arange(len(first)) - first.numpy()).sum())


def similarity_of(layers: Sequence[LayerContent]) -> tuple[dict[str, Float64[Tensor, "layers heads"]], Tensor]:
    """Similarity of all layers and heads over bins that they share, by field of `MeanSimilarity`, and the outer edges.

    If the bins together are narrower than a fine cell, all entries count as equal: similarity 1, none outside.
    """
    device = layers[0].bound.device  # a model's layers may lie on several
    bound, counts, diagonal = (
        torch.stack([getattr(layer, name).to(device) for layer in layers]) for name in ("bound", "counts", "diagonal")
    )
    cumulative = torch.nn.functional.pad(counts.cumsum(2), (1, 0))
    ordered = diagonal.flatten().sort().values

    def below(values: Float64[Tensor, "values"]) -> Float64[Tensor, "values"]:
        return _counted(cumulative, bound, values).sum((0, 1)) + torch.searchsorted(ordered, values, right=True)

    # Both quantiles at once, between the largest bounds: the one section of many that holds a quantile is divided next.
    wanted = torch.tensor(TAILS, dtype=torch.float64, device=device) * (counts.sum() + ordered.numel())
    limit = bound.max()
    low, high = -limit.expand(2), limit.expand(2)
    steps = torch.linspace(0, 1, SECTIONS + 1, dtype=torch.float64, device=device)
    for _ in range(DIVISIONS):
        ends = low[:, None] + (high - low)[:, None] * steps
        short = (below(ends.flatten()).view_as(ends) < wanted[:, None]).sum(1, keepdim=True)
        section = (short - 1).clamp(0, SECTIONS - 1)
        low, high = ends.gather(1, section)[:, 0], ends.gather(1, section + 1)[:, 0]
    outer = (low + high) / 2
    width = outer[1] - outer[0]
    edges = outer[0] + width * torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=device)
    off = _counted(cumulative, bound, edges).diff(dim=-1)
    on = torch.zeros(*bound.shape, BINS + 2, dtype=torch.float64, device=device)
    on.scatter_add_(2, torch.searchsorted(edges, diagonal, right=True), torch.ones_like(diagonal))
    binned = torch.stack([on[..., 1:-1], off])
    sizes = torch.stack([torch.full_like(bound, diagonal.shape[-1]), counts.sum(-1)])
    inside = binned.sum(-1)
    # 1 - entropy / log(BINS); 0 where nothing is inside, as in the published code.
    entropy = torch.special.entr(binned / inside.clamp_min(1e-300)[..., None]).sum(-1)
    similarity = torch.where(inside > 0, 1 - entropy / np.log(BINS), 0.0)
    narrow = width <= 2 * limit / CELLS
    values = (*similarity.masked_fill(narrow, 1.0), *(1 - inside / sizes).masked_fill(narrow, 0.0))
    return dict(zip((part.name for part in fields(MeanSimilarity)), values, strict=True)), outer


def _counted(
    cumulative: Float64[Tensor, "layers heads edges"],
    bound: Float64[Tensor, "layers heads"],
    values: Float64[Tensor, "values"],
) -> Float64[Tensor, "layers heads values"]:
    """Number of entries below each value, linear within a fine cell."""
    place = ((values / bound[..., None] + 1) * (CELLS / 2)).clamp(0, CELLS)
    cell = place.long().clamp(max=CELLS - 1)
    start, stop = cumulative.gather(-1, cell), cumulative.gather(-1, cell + 1)
    return start + (stop - start) * (place - cell)
