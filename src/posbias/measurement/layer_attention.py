"""One layer's attention on one prompt, reduced to a few numbers per head in blocks of queries (docs/theory, section 6).

Sums are kept in float64 whatever the weights' precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.models.attention import (
    AttentionBlock,
    AttentionInput,
    AttentionLayer,
    AttentionState,
    project_attention,
    query_blocks,
    rotated,
)


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What one layer's attention on one prompt amounts to; `AttentionStatistics` has the definitions."""

    distance: Float64[np.ndarray, "heads"]
    entropy: Float64[np.ndarray, "heads"]
    content: Float64[np.ndarray, "heads"]
    sinks: Float64[np.ndarray, "thresholds n_positions"]
    """Mean over heads."""
    row_error: float


def reduce_layer(
    layer: AttentionLayer,
    given: AttentionInput,
    *,
    thresholds: Sequence[float],
    block: int,
    kernel: Float[Tensor, "n_positions n_positions"] | None,
) -> LayerStatistics:
    """Recompute one layer's attention on one prompt and keep its sums.

    Args:
        layer: Every query but the first must see at least 2 keys.
        given: What its attention module read.
        thresholds: Of the sink score.
        block: Most queries at a time.
        kernel: Where to add the mean over heads, or None.
    """
    unrotated = project_attention(layer.parts, given.read)
    state = rotated(unrotated, given.cosine, given.sine)
    n_positions, device = len(given.read), given.read.device
    position = torch.arange(n_positions, dtype=torch.float64, device=device)
    reach = n_positions if layer.reach is None else layer.reach
    visible = (position + 1).clamp(max=reach)
    # The first query sees itself alone: its entropy is 0 of log 1 = 0 and it is left out.
    entropy_weights = torch.where(visible > 1, 1 / visible.log(), 0.0)
    distance = torch.zeros(state.query.shape[:2], dtype=torch.float64, device=device)
    entropy = torch.zeros_like(distance)
    counts = torch.zeros(len(thresholds), n_positions, dtype=torch.float64, device=device)
    row_error = 0.0
    for part in query_blocks(layer.parts, state, reach=layer.reach, block=block):
        weights = part.weights
        distance += _distances(part).sum(-1)
        rows = torch.special.entr(weights).sum(-1).double()
        entropy += (rows * entropy_weights[part.queries]).sum(-1)
        for row, threshold in zip(counts, thresholds, strict=True):
            row[part.keys] += (weights > threshold).flatten(0, 2).sum(0)
        row_error = max(row_error, float((weights.sum(-1) - 1).abs().max()))
        if kernel is not None:
            kernel[part.queries, part.keys] += weights.mean((0, 1))
    queries_of_key = (n_positions - position).clamp(max=reach)
    return LayerStatistics(
        distance=_by_head(distance / n_positions),
        entropy=_by_head(entropy / (visible > 1).sum()),
        content=_by_head(content_logits(unrotated, scale=layer.parts.scale, reach=reach)),
        sinks=np.asarray((counts / (layer.parts.heads * queries_of_key)).cpu().numpy()),
        row_error=row_error,
    )


def content_logits(state: AttentionState, *, scale: float, reach: int) -> Float64[Tensor, "key_head group"]:
    """Mean of scale * q_i.k_j at j = i less its mean at visible j < i, from running sums of keys.

    sum_{j < i} q_i.k_j = q_i . (K_{i-1} - K_{i-reach}), K the cumulative sum: order N d, no pair is formed.

    Args:
        state: Queries and keys without encoding.
        scale: The model's own.
        reach: Keys a query sees, its own included, >= 2.
    """
    query, key = state.query.double(), state.key.double()
    n_positions = key.shape[1]
    own = (query * key[:, None]).sum(-1).mean(-1)
    before = torch.nn.functional.pad(key.cumsum(1), (0, 0, 1, 0))  # before[i] = k_0 + ... + k_(i-1)
    index = torch.arange(n_positions, device=key.device)
    first = (index - reach + 1).clamp(min=0)
    earlier = before[:, index] - before[:, first]
    pairs = int((index - first).sum())
    others = (query * earlier[:, None]).sum((-1, -2)) / pairs
    return (own - others) * scale


def _distances(part: AttentionBlock) -> Float64[Tensor, "key_head group query"]:
    """sum_j A_ij (i - j), with distances counted from the block's first query so that small ones stay precise."""
    weights, start = part.weights, part.queries.start
    back = start - torch.arange(part.keys.start, part.keys.stop, dtype=weights.dtype, device=weights.device)
    offset = torch.arange(part.queries.stop - start, dtype=torch.float64, device=weights.device)
    distances: Tensor = (weights @ back).double() + offset
    return distances


def _by_head(values: Float64[Tensor, "key_head group"]) -> Float64[np.ndarray, "heads"]:
    return np.asarray(values.flatten().cpu().numpy())
