"""Attention of a reference transformer on stacked weights, for all positions or only the wanted rows.

Every tensor has a leading member axis, so that one matrix product per map serves all members. Where nothing stands
between two maps their product may be formed first: q.k = x (W_Q W_K^T) x'^T when heads are not rotary, and
sum_j a_j (x_j W_V) = (sum_j a_j x_j) W_V. For one row of the last layer this leaves almost no work; without it a step
of the networks in benchmarks/train takes 1.6 to 2.2 times as long. A key's bias shifts all logits of a row alike and
drops out of the softmax; a value's bias passes through, as rows sum to 1.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor

from posbias.models.reference.config import ReferenceShape

Weights = Mapping[str, Tensor]
Stream = Float[Tensor, "member batch position feature"]
Rows = Float[Tensor, "member batch row feature"]
Maps = Float[Tensor, "member #batch head row position"]


def linear(
    inputs: Stream,
    weight: Float[Tensor, "member feature output"],
    bias: Float[Tensor, "member output"] | None = None,
) -> Float[Tensor, "member batch position output"]:
    """x W + b with each member's own W and b."""
    flat = inputs.flatten(1, 2)
    product = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return product.reshape(*inputs.shape[:3], weight.shape[2])


def rows_of(values: Inexact[Tensor, "..."], rows: tuple[int, ...], *, dim: int) -> Inexact[Tensor, "..."]:
    """Some positions of one axis: a view if they follow each other, as the last one alone does."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values.narrow(dim, rows[0], len(rows))
    return values.index_select(dim, torch.tensor(rows, device=values.device))


def branch(shape: ReferenceShape, weights: Weights, inputs: Stream, maps: Maps) -> Rows:
    """Attention's addition to the stream: mean_h A_h x, mean_h A_h x W, sum_h A_h x V_h O_h, or A_h x V_h joined."""
    if shape.values != "gaussian":
        mean = maps.mean(dim=2) @ inputs
        return linear(mean, weights["value"]) if shape.values == "orthogonal" else mean
    carried = _carried(shape, weights, inputs, maps)
    if not shape.output_map:
        return carried.flatten(3)
    return linear(carried.flatten(3), weights["output"].flatten(1, 2), weights.get("output_bias"))


def _carried(
    shape: ReferenceShape, weights: Weights, inputs: Stream, maps: Maps
) -> Float[Tensor, "member batch row head head_feature"]:
    """The values that each head brings to each row."""
    bias = weights.get("value_bias")
    if not _merges_values(shape, n_rows=maps.shape[3]):
        values = shared(shape, heads_of(inputs, weights["value"], bias))
        return (maps @ values).transpose(2, 3)
    # [member, head, batch * row, feature], so that each head's map is one product.
    members, batch, heads, rows = len(inputs), inputs.shape[1], *maps.shape[2:4]
    whole = (maps.flatten(2, 3) @ inputs).view(members, batch, heads, rows, -1).transpose(1, 2)
    carried = (whole.flatten(2, 3) @ weights["value"]).view(members, heads, batch, rows, -1)
    if bias is not None:
        carried = carried + bias[:, :, None, None]
    return carried.permute(0, 2, 3, 1, 4)


def attention(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None = None
) -> Maps:
    """Row-stochastic matrices A_h of a layer, from what the branch reads; one for the whole batch without content.

    `rows` are the query positions wanted; None: all.
    """
    bias = logit_bias(shape, weights, constants["bias"], rows=rows)[:, None]
    if shape.attention != "content":
        return torch.softmax(bias, dim=-1)
    query, key = queries_and_keys(shape, weights, constants, inputs, rows=rows)
    return torch.softmax(query @ key.transpose(-1, -2) + bias, dim=-1)


def logit_bias(
    shape: ReferenceShape,
    weights: Weights,
    fixed: Float[Tensor, "member head position position"],
    *,
    rows: tuple[int, ...] | None = None,
) -> Float[Tensor, "member head row position"]:
    """Bias on the logits of a layer's chosen rows: the architecture's `fixed` one plus the trained one."""
    bias = fixed if rows is None else rows_of(fixed, rows, dim=2)
    if shape.trained_key_bias is None:
        return bias
    trained, n_positions = weights["trained_key_bias"], shape.n_positions
    beyond = n_positions - shape.trained_key_bias
    if beyond > 0:
        trained = torch.cat((trained, trained[..., -1:].expand(-1, -1, beyond)), dim=2)
    return bias + trained[:, :, None, :n_positions]


def queries_and_keys(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None
) -> tuple[
    Float[Tensor, "member batch head row head_feature"], Float[Tensor, "member batch #head position head_feature"]
]:
    """Queries / sqrt(head_dim) of the chosen rows, and keys: two factors of the logits."""
    stream_rows = inputs if rows is None else rows_of(inputs, rows, dim=2)
    if _merges_queries(shape, n_rows=stream_rows.shape[2]):
        return merged_queries(shape, weights, stream_rows), inputs[:, :, None]
    scale = 1 / math.sqrt(shape.head_dim)
    weight, bias = map_of(shape, weights, "query")
    key = shared(shape, heads_of(inputs, *map_of(shape, weights, "key")))
    if shape.rotary:
        turn = torch.complex(constants["cosine"], constants["sine"])[:, None]
        aside = scale * (turn if rows is None else rows_of(turn, rows, dim=3))
        return turned(heads_of(stream_rows, weight, bias), aside), turned(key, turn)
    return heads_of(stream_rows, weight * scale, None if bias is None else bias * scale), key


def map_of(
    shape: ReferenceShape, weights: Weights, name: str
) -> tuple[Float[Tensor, "member head feature head_feature"], Float[Tensor, "member head head_feature"] | None]:
    """Weight and bias of queries or keys; if they are turned, the two features of each pair side by side."""
    weight, bias = weights[name], weights.get(f"{name}_bias")
    if not shape.rotary:
        return weight, bias
    return _paired(weight), None if bias is None else _paired(bias)


def _paired(features: Float[Tensor, "*any feature"]) -> Float[Tensor, "*any feature"]:
    """Features k and k + half next to each other: no product of a query with a key changes."""
    halves = features.reshape(*features.shape[:-1], 2, -1)
    return halves.transpose(-1, -2).flatten(-2)


def merged_queries(
    shape: ReferenceShape, weights: Weights, stream_rows: Rows
) -> Float[Tensor, "member batch head row feature"]:
    """(x W_Q + b) W_K^T / sqrt(head_dim), as wide as the stream."""
    back = weights["key"].transpose(2, 3) / math.sqrt(shape.head_dim)
    query_key = weights["query"] @ back
    bias = weights.get("query_bias")
    return heads_of(stream_rows, query_key, None if bias is None else (bias[:, :, None] @ back)[:, :, 0])


def heads_of(
    inputs: Stream,
    weight: Float[Tensor, "member head feature head_feature"],
    bias: Float[Tensor, "member head head_feature"] | None,
) -> Float[Tensor, "member batch head position head_feature"]:
    """x W + b for each head, all heads in one product."""
    heads = weight.shape[1]
    joined = linear(inputs, weight.transpose(1, 2).flatten(2), None if bias is None else bias.flatten(1))
    return joined.view(*inputs.shape[:3], heads, -1).transpose(2, 3)


def shared(
    shape: ReferenceShape, vectors: Float[Tensor, "member batch shared position head_feature"]
) -> Float[Tensor, "member batch head position head_feature"]:
    """Keys or values spread over the heads that share them."""
    if shape.key_value_heads == shape.heads:
        return vectors
    return vectors.repeat_interleave(shape.heads // shape.key_value_heads, dim=2)


def turned(
    vectors: Float[Tensor, "member batch head position feature"],
    turn: Complex[Tensor, "member one head position pair"],
) -> Float[Tensor, "member batch head position feature"]:
    """Rotary positions: neighbouring features as one complex number, turned by its angle."""
    pairs = torch.view_as_complex(vectors.reshape(*vectors.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def _merges_queries(shape: ReferenceShape, *, n_rows: int) -> bool:
    """Tell whether x (W_Q W_K^T) x'^T takes fewer products than (x W_Q) (x' W_K)^T."""
    n, d, e = shape.n_positions, shape.width, shape.head_dim
    if shape.rotary or shape.key_value_heads != shape.heads:
        return False
    return n_rows * d * d + n_rows * n * d < (n_rows + n) * d * e + n_rows * n * e


def _merges_values(shape: ReferenceShape, *, n_rows: int) -> bool:
    """Tell whether (A x) W_V takes fewer products than A (x W_V)."""
    n, d, e = shape.n_positions, shape.width, shape.head_dim
    if shape.key_value_heads != shape.heads:
        return False
    return n_rows * (n * d + d * e) < n * d * e + n_rows * n * e
