"""The reference transformer as a pure function of stacked weights: logits of the wanted rows, and attention maps.

Written with a member axis throughout, as one matrix product per map over all members; a single model is a stack of one.
The last layer computes only the rows that are asked for.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.reference.attention import attention, branch
from posbias.models.reference.config import ReferenceShape
from posbias.models.reference.folding import folded_rows, folds
from posbias.models.reference.layers import Weights, entered, normalise, of_layer, read_out, rows_of, scaled, with_mlp

Inputs = Int[Tensor, "member batch position"] | Float[Tensor, "member batch position feature"]


def forward(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Float[Tensor, "member batch row output"]:
    """Logits of some positions for every member of a stack.

    Args:
        shape: Equal for all members.
        parameters: As `draw_parameters` makes them, each with a leading member axis.
        constants: As `constants_of` makes them, likewise.
        inputs: Token ids, or vectors where the shape has no vocabulary; N positions.
        rows: Positions whose outputs are wanted, each in 0 ... N - 1.

    Raises:
        UsageError: inputs of another length or sort, or a row outside them.
    """
    return read_out(shape, parameters, hidden_states(shape, parameters, constants, inputs, rows=rows))


def hidden_states(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Float[Tensor, "member batch row feature"]:
    """The stream of some positions after the last layer and norm: what the readout reads. Arguments as `forward`."""
    _check(shape, inputs, rows)
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    layers = [(of_layer(parameters, layer), of_constants(constants, layer)) for layer in range(shape.depth)]
    if folds(shape):
        return folded_rows(shape, layers, stream, rows=rows)
    for layer, (weights, fixed) in enumerate(layers):
        wanted = rows if layer == shape.depth - 1 else None
        stream = layer_output(shape, weights, fixed, stream, rows=wanted)
    return normalise(shape, parameters, "final", stream) if shape.norm == "pre" else stream


def attention_maps(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs
) -> Float[Tensor, "layer member batch head query key"]:
    """Attention of every layer and head, for small models: all of them are kept. Arguments as `forward`.

    Returns:
        Rows sum to 1 and are 0 where the mask hides the key.
    """
    _check(shape, inputs, (0,))
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    maps = []
    for layer in range(shape.depth):
        weights, fixed = of_layer(parameters, layer), of_constants(constants, layer)
        seen = entered(shape, weights, "attention", stream)
        found = attention(shape, weights, fixed, seen, rows=None)
        maps.append(found.expand(-1, inputs.shape[1], -1, -1, -1))
        stream = layer_output(shape, weights, fixed, stream, rows=None)
    return torch.stack(maps)


def embedded(
    shape: ReferenceShape, parameters: Weights, inputs: Inputs
) -> Float[Tensor, "member batch position feature"]:
    """The vectors of the inputs, before anything is added to them."""
    if shape.vocabulary_size is None:
        return inputs
    members = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return parameters["embedding"][members, inputs]


def entrance(
    shape: ReferenceShape,
    parameters: Weights,
    constants: Weights,
    vectors: Float[Tensor, "member batch position feature"],
) -> Float[Tensor, "member batch position feature"]:
    """What enters the first layer: embeddings, normalised where configured, plus vectors of position."""
    if shape.embedding_norm:
        vectors = normalise(shape, parameters, "embedding", vectors)
    if shape.adds_positions:
        vectors = vectors + constants["positions"][:, None]
    if shape.learned_positions is not None:
        vectors = vectors + parameters["positions"][:, None, : shape.n_positions]
    return vectors


def layer_output(
    shape: ReferenceShape,
    weights: Weights,
    constants: Weights,
    stream: Float[Tensor, "member batch position feature"],
    *,
    rows: tuple[int, ...] | None,
) -> Float[Tensor, "member batch row feature"]:
    """One layer, of its wanted rows only (None: all)."""
    kept, added = split(shape, weights, constants, stream, rows=rows)
    stream = added if kept is None else kept + added
    if shape.norm == "post":
        stream = normalise(shape, weights, "attention", stream)
    if shape.mlp_width:
        stream = with_mlp(shape, weights, constants, stream)
    return stream @ weights["rotation"][:, None] if shape.rotate_stream else stream


def split(
    shape: ReferenceShape,
    weights: Weights,
    constants: Weights,
    stream: Float[Tensor, "member batch position feature"],
    *,
    rows: tuple[int, ...] | None,
) -> tuple[Float[Tensor, "member batch row feature"] | None, Float[Tensor, "member batch row feature"]]:
    """What the residual keeps of the stream (None: nothing), and what attention adds to it."""
    seen = entered(shape, weights, "attention", stream)
    added = branch(shape, weights, seen, attention(shape, weights, constants, seen, rows=rows))
    if shape.residual == "none":
        return None, added
    kept = stream if rows is None else rows_of(stream, rows, dim=2)
    if shape.residual == "scaled":
        return scaled(constants["kept"], kept), scaled(constants["added"], added)
    return kept, added


def of_constants(constants: Weights, layer: int) -> dict[str, Tensor]:
    """The constants of one layer."""
    return {name: value[:, layer] for name, value in constants.items() if name != "positions"}


def _check(shape: ReferenceShape, inputs: Inputs, rows: tuple[int, ...]) -> None:
    vectors = shape.vocabulary_size is None
    expected = "[member, batch, position, feature] of numbers" if vectors else "[member, batch, position] of token ids"
    if inputs.ndim != 3 + vectors or inputs.is_floating_point() != vectors:
        raise UsageError(f"inputs must be {expected}, got {list(inputs.shape)} of {inputs.dtype}")
    if inputs.shape[2] != shape.n_positions:
        raise UsageError(f"inputs have {inputs.shape[2]} positions, the shape {shape.n_positions}")
    if not rows or not all(0 <= row < shape.n_positions for row in rows):
        raise UsageError(f"rows must be positions within 0 ... {shape.n_positions - 1}, at least one, got {list(rows)}")
