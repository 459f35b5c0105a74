"""A network in which nothing stands between the layers' maps, computed as one that mixes positions and little else.

Without residual, norm, MLP or biases a layer of one head is x <- A x V, and (A x) V = A (x V): V commutes with every
mixing of positions. So it waits: the next layer's queries and keys take it into their weights, (x V) W = x (V W), and
what is left over is applied to the few rows that are read. No map of values is ever applied at all positions. The last
layer sees the mixing P below it through products with vectors alone, sum_j a_j (P x)_j = (a P) x, so P x is not formed
either. The same numbers up to rounding.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.reference.attention import attention, merged_queries, mix
from posbias.models.reference.config import ReferenceShape
from posbias.models.reference.layers import Weights, linear, rows_of
from posbias.models.reference.products import dots

Layer = tuple[Weights, Weights]
"""Weights and constants of one layer."""
Stream = Float[Tensor, "member batch position feature"]
Rows = Float[Tensor, "member batch row feature"]
Square = Float[Tensor, "member feature feature"]


def folds(shape: ReferenceShape) -> bool:
    """Whether the maps of values can wait until the end."""
    alone = shape.residual == "none" and shape.norm == "none" and not shape.mlp_width and not shape.rotate_stream
    return shape.merges and alone and not shape.biases and shape.heads == 1 and shape.values == "gaussian"


def folded_rows(shape: ReferenceShape, layers: Sequence[Layer], inputs: Stream, *, rows: tuple[int, ...]) -> Rows:
    """Rows of the stream after the last layer.

    Args:
        shape: One that `folds`.
        layers: Weights and constants of every layer, from below.
        inputs: The stream before the first layer.
        rows: Positions wanted, at least one.
    """
    stream, mixing, waiting = inputs, None, None
    for weights, constants in layers[:-1]:
        stream = stream if mixing is None else mix(shape, mixing, stream)
        mixing = attention(shape, _after(waiting, weights), constants, stream, rows=None)[:, :, 0]
        waiting = _carried_on(shape, waiting, weights)
    weights, constants = layers[-1]
    last = _after(waiting, weights)
    if mixing is not None and _seen_through(shape, n_rows=len(rows)):
        found = _through(shape, (last, constants), mixing, stream, rows=rows)
    else:
        stream = stream if mixing is None else mix(shape, mixing, stream)
        found = attention(shape, last, constants, stream, rows=rows)[:, :, 0]
        found = mix(shape, found, stream)
    return linear(found, _carried_on(shape, waiting, weights))


def _through(
    shape: ReferenceShape,
    layer: Layer,
    mixing: Float[Tensor, "member #batch position position"],
    inputs: Stream,
    *,
    rows: tuple[int, ...],
) -> Rows:
    """Rows of a layer over the stream `mixing @ inputs`."""
    weights, constants = layer
    logits = rows_of(constants["bias"], rows, dim=2)
    if shape.attention == "content":
        query = merged_queries(shape, weights, mix(shape, rows_of(mixing, rows, dim=2).contiguous(), inputs))[:, :, 0]
        logits = logits + mix(shape, mixing, dots(inputs, query)).transpose(2, 3)
    return mix(shape, mix(shape, torch.softmax(logits, dim=-1), mixing), inputs)


def _seen_through(shape: ReferenceShape, *, n_rows: int) -> bool:
    """Whether the rows take fewer products with the mixing unformed; rotary keys turn after it."""
    n, d = shape.n_positions, shape.width
    return not shape.rotary and n_rows * (4 * n * d + 2 * n * n) < n * n * d + n_rows * 2 * n * d


def _after(waiting: Square | None, weights: Weights) -> Weights:
    """Weights of a layer that take in the map before them."""
    if waiting is None or "query" not in weights:
        return weights
    return {name: waiting[:, None] @ weights[name] for name in ("query", "key")}


def _carried_on(shape: ReferenceShape, waiting: Square | None, weights: Weights) -> Square:
    """What waits after a layer: its map of values joins."""
    own = weights["value"][:, 0]
    if shape.output_map:
        own = own @ weights["output"][:, 0]
    return own if waiting is None else waiting @ own
