"""One layer's attention on one prompt, reduced in blocks of queries to sums per head, counts and kernels in cells.

Sums are kept in float64 whatever the weights' precision (docs/theory, section 6). Prefix-monotonicity, on the fly or of
kernels that were kept: F_i(k) = sum_{j <= k} A_ij is compared with F_i+1(k) for k < i; at k = i the mass is 1, which
nothing can exceed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.measurement.attention.statistics import PrefixMonotonicity
from posbias.models.attention import AttentionBlock, AttentionLayer, AttentionState, query_blocks

ROUND_OFF = 1e-6
"""Prefix masses are sums of softmaxes computed in float32; a rise below this is not a violation."""


class PrefixWatch:
    """Violations within one kernel whose rows arrive in blocks, last rows first; only one row is kept."""

    def __init__(self, n_positions: int, device: torch.device) -> None:
        self._n_positions = n_positions
        self._below: Tensor | None = None
        """F of the row under the next block, all keys."""
        self._violations = torch.zeros((), dtype=torch.float64, device=device)
        self._rise = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, mass: Float64[Tensor, "query key"], queries: slice, keys: slice) -> None:
        """Compare the rows of a block with each other, and its last row with the first of the block before.

        Args:
            mass: F of the block's queries at its keys; rows end at 1.
            queries: Positions of the rows; the block given before starts where this one stops.
            keys: Positions of the columns; to the left of them F is 0.
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

    Args:
        kernels: Lower triangular, at least 3 positions, rows up to a factor: a row is divided by its sum in float64,
            which takes out both the number of prompts summed and the softmax's own round-off.
    """
    n_positions = kernels.shape[-1]
    everything = slice(0, n_positions)
    violated, gap = [], []
    for kernel in kernels:
        watch = PrefixWatch(n_positions, kernel.device)
        watch.add(prefix_mass(kernel), everything, everything)
        share, rise = watch.result()
        violated.append(share)
        gap.append(rise)
    return PrefixMonotonicity(np.array(violated), np.array(gap))


def prefix_mass(rows: Float[Tensor, "*rows key"]) -> Float64[Tensor, "*rows key"]:
    """Cumulative sums over keys in float64, every row divided by its sum."""
    mass = rows.double().cumsum(-1)
    return mass / mass[..., -1:]


@dataclass(frozen=True, eq=False)
class KernelSums:
    """Where one layer's kernels are added up, in cells of neighbouring positions."""

    bounds: Int64[Tensor, "edges"]
    """First position of each cell, and N."""
    mean: Float[Tensor, "cells cells"]
    squared: Float[Tensor, "cells cells"]
    by_head: Float[Tensor, "heads cells cells"] | None

    def add(self, part: AttentionBlock, mass: Float64[Tensor, "query key"]) -> None:
        """Add a block of queries, `mass` the prefix sums of its mean over heads."""
        cell_of_query = torch.searchsorted(self.bounds, torch.arange(*_ends(part.queries)).to(self.bounds), right=True)
        edges = self.bounds.clamp(*_ends(part.keys)) - part.keys.start
        squares = part.weights.square().mean((0, 1)).double().cumsum(-1)
        self.mean.index_add_(0, cell_of_query - 1, _between(mass, edges).to(self.mean))
        self.squared.index_add_(0, cell_of_query - 1, _between(squares, edges).to(self.squared))
        if self.by_head is not None:
            heads = _between(part.weights.flatten(0, 1).double().cumsum(-1), edges)
            self.by_head.index_add_(1, cell_of_query - 1, heads.to(self.by_head))


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What one layer's attention on one prompt amounts to; `AttentionStatistics` has the definitions."""

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
    """Recompute one layer's attention on one prompt and keep its sums.

    Args:
        layer: Every query but the first must see at least 2 keys.
        state: Queries and keys as the dot product sees them.
        thresholds: Of the sink score.
        block: Most queries at a time.
        kernels: Where to add the layer's kernels.
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
    taken = None if layer.parts.sinks is None else torch.zeros_like(distance)
    prefix = PrefixWatch(n_positions, device)
    row_error = 0.0
    for part in query_blocks(layer.parts, state, reach=layer.reach, block=block):
        weights, among_keys = part.weights, part.among_keys()
        distance += _distances(part, among_keys).sum(-1)
        entropy += (_entropies(among_keys) * entropy_weights[part.queries]).sum(-1)
        for row, threshold in zip(counts, thresholds, strict=True):
            row[part.keys] += (weights > threshold).to(weights.dtype).sum((0, 1, 2))
        rows = weights.sum(-1) - 1
        if part.sink is not None and taken is not None:
            rows += part.sink
            taken += part.sink.double().sum(-1)
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
        distance=_by_head(distance / n_positions),
        entropy=_by_head(entropy / (visible > 1).sum()),
        sinks=np.asarray((counts / (layer.parts.heads * queries_of_key)).cpu().numpy()),
        learned_sink=None if taken is None else _by_head(taken / n_positions),
        violated=violated,
        gap=gap,
        row_error=row_error,
    )


def _entropies(weights: Float[Tensor, "key_head group query key"]) -> Float64[Tensor, "key_head group query"]:
    """-sum_j A_ij log A_ij; zeros add nothing."""
    logarithms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_()
    rows: Tensor = logarithms.mul_(weights).sum(-1).double().neg_()
    return rows


def _distances(
    part: AttentionBlock, weights: Float[Tensor, "key_head group query key"]
) -> Float64[Tensor, "key_head group query"]:
    """sum_j A_ij (i - j), with distances counted from the block's first query so that small ones stay precise."""
    start = part.queries.start
    back = start - torch.arange(part.keys.start, part.keys.stop, dtype=weights.dtype, device=weights.device)
    offset = torch.arange(part.queries.stop - start, dtype=torch.float64, device=weights.device)
    distances: Tensor = (weights @ back).double() + offset
    return distances


def _between(running: Float64[Tensor, "*rows key"], edges: Int64[Tensor, "edges"]) -> Float64[Tensor, "*rows cells"]:
    """Sums over the keys between neighbouring edges, from running sums."""
    return torch.nn.functional.pad(running, (1, 0))[..., edges].diff(dim=-1)


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _by_head(values: Float64[Tensor, "key_head group"]) -> Float64[np.ndarray, "heads"]:
    return np.asarray(values.flatten().cpu().numpy())
