"""Transposed local maps of a decoder block, signed (power 1) or as energies (power 2).

With power 1 each function applies the transpose of an exact local Jacobian, J'g: composed, they are back-propagation,
which is how the tests check them. With power 2 it applies the elementwise square of the same Jacobian, (J o J)'e: what
becomes of energies when contributions have unrelated directions (docs/theory, section 5).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import affine, norm_forward
from posbias.models.families.base import Norm
from posbias.theory.power_rollout.description import LayerDescription
from posbias.theory.power_rollout.trace import LayerTrace

Power = Literal[1, 2]


def norm_pull(
    norm: Norm | None, values: Float[Tensor, "*rows feature"], energy: Float[Tensor, "*rows feature"], power: Power
) -> Float[Tensor, "*rows feature"]:
    """Pull `energy` back through an RMS norm that read `values`.

    J = diag(w) (I - m m') / sigma with m = x / (sigma sqrt(d)). Power 2, the elementwise square of J, with u = w^2 e:
    [u (1 - 2 m^2) + m^2 sum_b m_b^2 u_b] / sigma^2.

    Args:
        norm: The norm, or None for the identity.
        values: What the norm read, x.
        energy: At the norm's output; >= 0 for power 2.
        power: 1 signed, 2 energies.

    Returns:
        At the norm's input; >= 0 for power 2.
    """
    if norm is None:
        return energy
    width = values.shape[-1]
    variance = values.square().mean(-1, keepdim=True) + norm.epsilon
    gain = norm.gain.to(values.dtype)
    if power == 1:
        scaled = gain * energy
        direction = values * (variance * width).rsqrt()
        return (scaled - direction * (direction * scaled).sum(-1, keepdim=True)) * variance.rsqrt()
    scaled = gain.square() * energy
    share = values.square() / (variance * width)
    pulled = scaled * (1 - 2 * share) + share * (share * scaled).sum(-1, keepdim=True)
    return pulled.clamp_min(0) / variance  # below 0 only by round-off, where one feature carries the whole norm


def rotary_pull(
    energy: Float[Tensor, "*heads position feature"],
    cosine: Float[Tensor, "position rotary"] | None,
    sine: Float[Tensor, "position rotary"] | None,
    power: Power,
) -> Float[Tensor, "*heads position feature"]:
    """Undo the rotation: its transpose for power 1, cos^2 and half-swapped sin^2 for power 2."""
    if cosine is None or sine is None:
        return energy
    rotary = cosine.shape[-1]
    turned, rest = energy[..., :rotary], energy[..., rotary:]
    first, second = (turned * sine.pow(power)).chunk(2, -1)
    swapped = torch.cat([second, -first if power == 1 else first], -1)
    return torch.cat([turned * cosine.pow(power) + swapped, rest], -1)


def mlp_pull(
    layer: LayerDescription, trace: LayerTrace, energy: Float[Tensor, "position feature"], power: Power
) -> Float[Tensor, "position feature"]:
    """Pull through the gated MLP branch alone (the stream's own identity path is the caller's).

    With a = act'(gate) up and b = act(gate), the hidden layer's map is a W_g + b W_u; its square keeps the cross term:
    (t a^2) W_g^2 + (t b^2) W_u^2 + 2 (t a b)(W_g o W_u).

    Args:
        layer: The block's maps.
        trace: The block's activations.
        energy: At the branch's output, where it is added to the stream.
        power: 1 signed, 2 energies.

    Returns:
        At the branch's input, the stream after attention.
    """
    parts = layer.mlp
    if parts.gate is None:
        raise TypeError(f"layer {layer.index} has a plain MLP; the families of SUPPORTED are gated")
    gate_weight, up_weight, down_weight = (weight.to(energy.dtype) for weight in (parts.gate, parts.up, parts.down))
    read = norm_forward(layer.mlp_norm, trace.middle)
    value, slope = _activation(layer, affine(read, gate_weight, parts.gate_bias))
    slope = slope * affine(read, up_weight, parts.up_bias)
    if trace.mlp_branch is not None:
        energy = norm_pull(layer.mlp_post_norm, trace.mlp_branch, energy, power)
    hidden = energy @ down_weight.pow(power)
    if power == 1:
        pulled = (hidden * slope) @ gate_weight + (hidden * value) @ up_weight
    else:
        pulled = (hidden * slope.square()) @ gate_weight.square() + (hidden * value.square()) @ up_weight.square()
        pulled += (2 * hidden * slope * value) @ (gate_weight * up_weight)
        pulled = pulled.clamp_min(0)  # a sum of squares; the cross term may round below 0
    return norm_pull(layer.mlp_norm, trace.middle, pulled, power)


def _activation(
    layer: LayerDescription, gate: Float[Tensor, "position hidden"]
) -> tuple[Float[Tensor, "position hidden"], Float[Tensor, "position hidden"]]:
    """The activation and its derivative, elementwise."""
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_(True)
        value = layer.mlp.activation(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope
