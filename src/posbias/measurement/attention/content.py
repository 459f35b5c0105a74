"""Content logits of one layer and prompt: means over pairs, fine histograms, and the similarity read from these.

The means need no pair at all. The histograms take one pass over blocks of queries: CELLS equal cells from -B to B with
B = max |q| max |k| of the head, which no logit exceeds, so that the range needs no pass of its own.

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

from posbias.models.attention import AttentionState

CELLS = 8192
"""Of the fine histograms: a head whose B is ten times the model's range of logits still has 2 cells for each bin."""

SMALLEST_BOUND = 1e-30
"""B of a head whose logits are all zero, so that its cells have a width."""


@dataclass(frozen=True, eq=False)
class LayerContent:
    """One layer's content logits on one prompt."""

    diagonal: Float64[np.ndarray, "heads n_positions"]
    """Every entry j = i."""
    off_diagonal: Float64[np.ndarray, "heads"]
    """Mean over visible j < i."""
    counts: Int64[np.ndarray, "heads cells"]
    """Of the visible entries j < i."""
    bound: Float64[np.ndarray, "heads"]


@dataclass(frozen=True)
class Pairs:
    """Which pairs of a layer count, and how many queries are looked at together."""

    reach: int
    """Keys a query sees, its own included, >= 2."""
    rows: int


def reduce_content(
    state: AttentionState, *, scale: float, pairs: Pairs, into: Float[Tensor, "heads query key"] | None
) -> LayerContent:
    """Diagonal, mean and histogram of scale * q_i.k_j, without positions; the logits are added `into` where given."""
    key_length = state.key.norm(dim=-1).amax(-1)
    bound = (state.query.norm(dim=-1).amax(-1) * key_length[:, None] * abs(scale)).flatten().clamp_min(SMALLEST_BOUND)
    counts = torch.zeros(len(bound), CELLS, dtype=torch.long, device=bound.device)
    for queries, keys, logits in _content_blocks(state, scale=scale, pairs=pairs):
        counts += count_cells(logits, bound, _hidden(queries, keys, pairs.reach, logits.device))
        if into is not None:
            into[:, queries, keys] += logits
    diagonal = (state.query.double() * state.key.double()[:, None]).sum(-1).flatten(0, 1) * scale
    return LayerContent(
        diagonal=_numpy(diagonal),
        off_diagonal=_numpy(off_diagonal_mean(state, scale=scale, reach=pairs.reach)),
        counts=np.asarray(counts.cpu().numpy()),
        bound=_numpy(bound.double()),
    )


def reduce_mean_content(
    mean: Float[Tensor, "heads n_positions n_positions"], *, pairs: Pairs, diagonal: Float64[np.ndarray, "heads n"]
) -> LayerContent:
    """The same of content logits averaged over prompts; entries no query sees do not matter, `diagonal` is precise."""
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
    return LayerContent(diagonal, _numpy(off_diagonal), np.asarray(counts.cpu().numpy()), _numpy(bound.double()))


def count_cells(
    logits: Float[Tensor, "heads query key"], bound: Float[Tensor, "heads"], hidden: Bool[Tensor, "query key"]
) -> Int64[Tensor, "heads cells"]:
    """How many of the entries that are not hidden fall into each cell."""
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
    """Pairs other than visible j < i."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key >= query) | (key <= query - reach)


def _numpy(values: Float64[Tensor, "*axes"]) -> Float64[np.ndarray, "*axes"]:
    return np.asarray(values.cpu().numpy())


BINS = 199
TAILS = (0.005, 0.995)
"""Quantiles at which the bins begin and end."""
BISECTIONS = 60


@dataclass(frozen=True, eq=False)
class SimilarityNumbers:
    """Of one set of content logits, [diagonal or off-diagonal, layers, heads]."""

    similarity: Float64[np.ndarray, "2 layers heads"]
    outside: Float64[np.ndarray, "2 layers heads"]
    """Share of the entries outside the bins."""
    edges: Float64[np.ndarray, "2"]


def similarity_of(layers: Sequence[LayerContent]) -> SimilarityNumbers:
    """Similarity of all layers and heads over bins that they share.

    Where the bins together are narrower than a fine cell, all entries count as equal: similarity 1, none outside.
    """
    bound = np.stack([layer.bound for layer in layers])
    counts = np.stack([layer.counts for layer in layers])
    cumulative = np.concatenate([np.zeros((*counts.shape[:2], 1)), counts.cumsum(axis=2)], axis=2)
    diagonal = np.stack([layer.diagonal for layer in layers])
    ordered = np.sort(diagonal, axis=None)

    def below(value: float) -> float:
        return float(_counted(cumulative, bound, np.array([value])).sum() + np.searchsorted(ordered, value, "right"))

    total = counts.sum() + ordered.size
    low, high = (_solve(below, share * total, limit=float(bound.max())) for share in TAILS)
    if high - low <= 2 * float(bound.max()) / CELLS:
        ones = np.ones((2, *bound.shape))
        return SimilarityNumbers(ones, 0 * ones, np.array([low, high]))
    edges = np.linspace(low, high, BINS + 1)
    off = np.diff(_counted(cumulative, bound, edges), axis=-1)
    place = np.searchsorted(edges, diagonal, "right") - 1
    own = np.stack([(place == index).sum(axis=-1) for index in range(BINS)], axis=-1).astype(np.float64)
    binned, sizes = np.stack([own, off]), np.stack([np.full(bound.shape, diagonal.shape[-1]), counts.sum(-1)])
    inside = binned.sum(-1)
    return SimilarityNumbers(_concentration(binned, inside), 1 - inside / sizes, np.array([low, high]))


def _counted(
    cumulative: Float64[np.ndarray, "layers heads edges"],
    bound: Float64[np.ndarray, "layers heads"],
    values: Float64[np.ndarray, "values"],
) -> Float64[np.ndarray, "layers heads values"]:
    """How many entries lie below each value, linear within a fine cell."""
    place = np.clip((values / bound[..., None] + 1) * (CELLS / 2), 0, CELLS)
    cell = np.minimum(place.astype(np.int64), CELLS - 1)
    start, stop = (np.take_along_axis(cumulative, index, axis=-1) for index in (cell, cell + 1))
    return np.asarray(start + (stop - start) * (place - cell))


def _solve(below: Callable[[float], float], wanted: float, *, limit: float) -> float:
    """The value below which `wanted` entries lie, by bisection from -limit to limit."""
    low, high = -limit, limit
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if below(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _concentration(
    binned: Float64[np.ndarray, "2 layers heads bins"], inside: Float64[np.ndarray, "2 layers heads"]
) -> Float64[np.ndarray, "2 layers heads"]:
    """1 - entropy / log(BINS); 0 where nothing is inside, as in the published code."""
    share = binned / np.maximum(inside, 1e-300)[..., None]
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1)
    return np.where(inside > 0, 1 - entropy / np.log(BINS), 0.0)
