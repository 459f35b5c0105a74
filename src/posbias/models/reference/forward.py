"""The reference transformer as a pure function of stacked weights: logits of the wanted rows, and attention maps.

Written with a member axis throughout: `stream` is [member, batch, position, feature] and each weight [member, ...]; a
single model is a stack of one. The last layer computes only the rows that are asked for.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from posbias.errors import UsageError
from posbias.models.reference.attention import Stream, Weights, attention, branch, linear, rows_of
from posbias.models.reference.config import ReferenceShape
from posbias.models.reference.recurrence import linear_branch

Inputs = Int[Tensor, "member batch position"] | Float[Tensor, "member batch position feature"]
Rows = Float[Tensor, "member batch row feature"]
Chosen = tuple[int, ...] | None
"""Rows that are wanted; None: all."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def forward(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Float[Tensor, "member batch row output"]:
    """Logits of the positions `rows`, each in 0 ... N - 1, for every member of a stack of one shape.

    Parameters and constants are those of `draw_parameters` and `constants_of`, each with a leading member axis; inputs
    are token ids, or vectors if the shape has no vocabulary, of N positions.

    Raises:
        UsageError: inputs of another length or sort, or a row outside them.
    """
    return read_out(shape, parameters, hidden_states(shape, parameters, constants, inputs, rows=rows))


def hidden_states(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Rows:
    """The stream of some positions after the last layer and norm: what the readout reads. Arguments as `forward`."""
    _check(shape, inputs, rows)
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    for layer in range(shape.depth):
        weights, fixed = of_layer(parameters, layer), of_constants(constants, layer)
        stream = layer_output(shape, weights, fixed, stream, rows=rows if layer == shape.depth - 1 else None)
    return normalise(shape, parameters, "final", stream) if shape.norm == "pre" else stream


def attention_maps(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs
) -> Float[Tensor, "layer member batch head query key"]:
    """Attention of every layer and head, for small models: all of them are kept. Arguments as `forward`.

    Returns:
        Rows sum to 1 and are 0 if the mask hides the key.

    Raises:
        UsageError: a layer is linear and has no attention.
    """
    refuse_linear_layers(shape.linear_layers)
    _check(shape, inputs, (0,))
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    maps = []
    for weights, fixed, below in layer_inputs(shape, parameters, constants, stream):
        layer_maps = attention(shape, weights, fixed, entered(shape, weights, "attention", below))
        maps.append(layer_maps.expand(-1, inputs.shape[1], -1, -1, -1))
    return torch.stack(maps)


def refuse_linear_layers(linear: Sequence[bool]) -> None:
    """Refuse to take them for attention."""
    layers = ", ".join(str(layer) for layer, is_linear in enumerate(linear) if is_linear)
    if layers:
        raise UsageError(
            f"attention of this reference model: its layers {layers} are linear ones (recurrent), which have no "
            "attention matrix; allowed are models with attention in every layer"
        )


def layer_inputs(
    shape: ReferenceShape, parameters: Weights, constants: Weights, stream: Stream
) -> Iterator[tuple[Weights, Weights, Stream]]:
    """Weights, constants and input of every layer, from below; `stream` is what enters the first."""
    for layer in range(shape.depth):
        weights, fixed = of_layer(parameters, layer), of_constants(constants, layer)
        yield weights, fixed, stream
        stream = layer_output(shape, weights, fixed, stream)


def embedded(shape: ReferenceShape, parameters: Weights, inputs: Inputs) -> Stream:
    """The vectors of the inputs, before anything is added to them."""
    if shape.vocabulary_size is None:
        return inputs
    members = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return parameters["embedding"][members, inputs]


def entrance(shape: ReferenceShape, parameters: Weights, constants: Weights, vectors: Stream) -> Stream:
    """The input of the first layer: embeddings, normalised if configured, plus vectors of position."""
    if shape.embedding_norm:
        vectors = normalise(shape, parameters, "embedding", vectors)
    if shape.adds_positions:
        vectors = vectors + constants["positions"][:, None]
    if shape.learned_positions is not None:
        vectors = vectors + parameters["positions"][:, None, : shape.n_positions]
    return vectors


def layer_output(
    shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> Rows:
    """One layer, of its wanted rows only (None: all)."""
    passing, added = split(shape, weights, constants, stream, rows=rows)
    stream = added if passing is None else passing + added
    if shape.norm == "post":
        stream = normalise(shape, weights, "attention", stream)
    if shape.mlp_width:
        stream = with_mlp(shape, weights, constants, stream)
    return stream @ weights["rotation"][:, None] if shape.rotate_stream else stream


def split(
    shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> tuple[Rows | None, Rows]:
    """The part of the stream that the residual keeps (None: nothing), and the part that attention, or the linear layer
    in its place, adds to it."""
    entering = entered(shape, weights, "attention", stream)
    if "step" in weights:
        added = linear_branch(shape, weights, constants, entering, rows=rows)
    else:
        added = branch(shape, weights, entering, attention(shape, weights, constants, entering, rows=rows))
    if shape.residual == "none":
        return None, added
    passing = stream if rows is None else rows_of(stream, rows, dim=2)
    if shape.residual == "scaled":
        return scaled(constants["kept"], passing), scaled(constants["added"], added)
    return passing, added


def of_constants(constants: Weights, layer: int) -> dict[str, Tensor]:
    """The constants of one layer."""
    return {name: value[:, layer] for name, value in constants.items() if name != "positions"}


def of_layer(tensors: Weights, layer: int) -> dict[str, Tensor]:
    """The weights of one layer under their short names."""
    prefix = f"blocks.{layer}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def normalise(shape: ReferenceShape, weights: Weights, name: str, stream: Stream) -> Stream:
    """The norm called `name`."""
    gain = weights[f"{name}_gain"][:, None, None]
    if shape.normalisation == "rms":
        power = stream.square().mean(dim=-1, keepdim=True)
        return gain * stream * torch.rsqrt(power + shape.norm_epsilon)
    shift = weights[f"{name}_shift"][:, None, None]
    return functional.layer_norm(stream, (shape.width,), eps=shape.norm_epsilon) * gain + shift


def entered(shape: ReferenceShape, weights: Weights, name: str, stream: Stream) -> Stream:
    """The input of a branch: the stream, normalised if norms come first."""
    return normalise(shape, weights, name, stream) if shape.norm == "pre" else stream


def with_mlp(shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream) -> Stream:
    """The stream after the layer's MLP and its residual."""
    inner = entered(shape, weights, "mlp", stream)
    activation = ACTIVATIONS[shape.activation]
    up = linear(inner, weights["up"], weights.get("up_bias"))
    gate = linear(inner, weights["gate"], weights.get("gate_bias")) if shape.gated_mlp else None
    hidden = activation(up) if gate is None else activation(gate) * up
    update = linear(hidden, weights["down"], weights.get("down_bias"))
    if shape.residual == "scaled":
        stream = scaled(constants["mlp_kept"], stream) + update
    else:
        stream = update if shape.residual == "none" else stream + update
    return normalise(shape, weights, "mlp", stream) if shape.norm == "post" else stream


def scaled(factor: Float[Tensor, "member"], stream: Stream) -> Stream:
    """Each member's stream times its own number."""
    return factor[:, None, None, None] * stream


def read_out(shape: ReferenceShape, parameters: Weights, hidden: Rows) -> Float[Tensor, "member batch row output"]:
    """Logits of the outputs."""
    if shape.readout == "linear":
        return linear(hidden, parameters["unembedding"].transpose(1, 2))
    for layer in range(shape.readout_layers + 1):
        hidden = functional.relu(hidden) if layer else hidden
        hidden = linear(hidden, parameters[f"readout.{layer}.weight"], parameters[f"readout.{layer}.bias"])
    return hidden


def _check(shape: ReferenceShape, inputs: Inputs, rows: tuple[int, ...]) -> None:
    vectors = shape.vocabulary_size is None
    expected = "[member, batch, position, feature] of numbers" if vectors else "[member, batch, position] of token ids"
    if inputs.ndim != 3 + vectors or inputs.is_floating_point() != vectors:
        raise UsageError(f"inputs must be {expected}, got {list(inputs.shape)} of {inputs.dtype}")
    if inputs.shape[2] != shape.n_positions:
        raise UsageError(f"inputs have {inputs.shape[2]} positions, the shape {shape.n_positions}")
    if not rows or not all(0 <= row < shape.n_positions for row in rows):
        raise UsageError(f"rows must be positions within 0 ... {shape.n_positions - 1}, at least one, got {list(rows)}")
