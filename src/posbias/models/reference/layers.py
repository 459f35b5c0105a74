"""The parts of a reference transformer's layer as functions of stacked weights: maps, norms, MLP, residual.

Every tensor has a leading member axis: `stream` is [member, batch, position, feature] and each weight [member, ...], so
one matrix product per map serves all members.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.nn import functional

from posbias.models.reference.config import ReferenceShape

Stream = Float[Tensor, "member batch position feature"]
Weights = Mapping[str, Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def of_layer(tensors: Weights, layer: int) -> dict[str, Tensor]:
    """The weights of one layer under their short names."""
    prefix = f"blocks.{layer}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def linear(
    inputs: Float[Tensor, "member batch position feature"],
    weight: Float[Tensor, "member feature output"],
    bias: Float[Tensor, "member output"] | None = None,
) -> Float[Tensor, "member batch position output"]:
    """x W + b with each member's own W and b."""
    flat = inputs.flatten(1, 2)
    product = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return product.reshape(*inputs.shape[:3], weight.shape[2])


def normalise(
    shape: ReferenceShape, weights: Weights, name: str, stream: Stream
) -> Float[Tensor, "member batch position feature"]:
    """The norm called `name`."""
    gain = weights[f"{name}_gain"][:, None, None]
    if shape.normalisation == "rms":
        power = stream.square().mean(dim=-1, keepdim=True)
        return gain * stream * torch.rsqrt(power + shape.norm_epsilon)
    shift = weights[f"{name}_shift"][:, None, None]
    return functional.layer_norm(stream, (shape.width,), eps=shape.norm_epsilon) * gain + shift


def entered(
    shape: ReferenceShape, weights: Weights, name: str, stream: Stream
) -> Float[Tensor, "member batch position feature"]:
    """What a branch reads: the stream, normalised where norms come first."""
    return normalise(shape, weights, name, stream) if shape.norm == "pre" else stream


def with_mlp(
    shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream
) -> Float[Tensor, "member batch position feature"]:
    """The stream after the layer's MLP and its residual."""
    inner = entered(shape, weights, "mlp", stream)
    activation = ACTIVATIONS[shape.activation]
    up = linear(inner, weights["up"], weights.get("up_bias"))
    if shape.gated_mlp:
        hidden = activation(linear(inner, weights["gate"], weights.get("gate_bias"))) * up
    else:
        hidden = activation(up)
    update = linear(hidden, weights["down"], weights.get("down_bias"))
    if shape.residual == "scaled":
        stream = scaled(constants["mlp_kept"], stream) + update
    else:
        stream = update if shape.residual == "none" else stream + update
    return normalise(shape, weights, "mlp", stream) if shape.norm == "post" else stream


def scaled(
    factor: Float[Tensor, "member"], stream: Float[Tensor, "member batch position feature"]
) -> Float[Tensor, "member batch position feature"]:
    """Each member's stream times its own number."""
    return factor[:, None, None, None] * stream


def rows_of(values: Inexact[Tensor, "..."], rows: tuple[int, ...], *, dim: int) -> Inexact[Tensor, "..."]:
    """Some positions of one axis: a view where they follow each other, as the last one alone does."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values.narrow(dim, rows[0], len(rows))
    return values.index_select(dim, torch.tensor(rows, device=values.device))


def read_out(
    shape: ReferenceShape, parameters: Weights, hidden: Float[Tensor, "member batch row feature"]
) -> Float[Tensor, "member batch row output"]:
    """Logits of the outputs."""
    if shape.readout == "linear":
        return linear(hidden, parameters["unembedding"].transpose(1, 2))
    for layer in range(shape.readout_layers):
        hidden = functional.relu(
            linear(hidden, parameters[f"readout.{layer}.weight"], parameters[f"readout.{layer}.bias"])
        )
    last = shape.readout_layers
    return linear(hidden, parameters[f"readout.{last}.weight"], parameters[f"readout.{last}.bias"])
