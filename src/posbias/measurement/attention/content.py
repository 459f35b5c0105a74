"""Content logits of one layer and prompt: means over pairs, and fine histograms from which similarity is read.

The means need no pair at all. The histograms take one pass over blocks of queries: CELLS equal cells from -B to B with
B = max |q| max |k| of the head, which no logit exceeds, so that the range needs no pass of its own.
"""

from collections.abc import Iterator
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
    """B of every head."""


@dataclass(frozen=True)
class Pairs:
    """Which pairs of a layer count, and how many queries are looked at together."""

    reach: int
    """Keys a query sees, its own included, >= 2."""
    rows: int
    """Most queries in a block."""


def reduce_content(
    state: AttentionState, *, scale: float, pairs: Pairs, into: Float[Tensor, "heads query key"] | None
) -> LayerContent:
    """Diagonal, mean and histogram of scale * q_i.k_j.

    Args:
        state: Queries and keys without positions.
        scale: The model's own.
        pairs: Of the layer.
        into: Where to add the logits themselves, or None.
    """
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
    """The same of content logits that were averaged over prompts and kept.

    Args:
        mean: Mean content logits; entries that no query sees do not matter.
        pairs: Of the layer.
        diagonal: Its diagonal, in full precision.
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
    """Mean of scale * q_i.k_j over visible j < i, from running sums of keys.

    sum_{j < i} q_i.k_j = q_i . (K_{i-1} - K_{i-reach}), K the cumulative sum: order N d, no pair is formed.

    Args:
        state: Queries and keys without positions.
        scale: The model's own.
        reach: Keys a query sees, its own included, >= 2.
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
