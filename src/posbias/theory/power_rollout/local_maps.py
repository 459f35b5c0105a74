"""Transposed local maps of a decoder block, signed (power 1) or as energies (power 2).

With power 1 each function applies the transpose of an exact local Jacobian, J'g: composed, they are back-propagation,
by which the tests check them. With power 2 it applies the elementwise square of the same Jacobian, (J o J)'e, which
moves energies of contributions with unrelated directions (docs/theory, section 5).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.layout import MlpParts, Norm
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Energy, Power, Walk

PROBES, PROBE_SEED = 2, 0
"""Random vectors per layer for ||J_mlp||_F^2: with hundreds of channels two already give it to a few percent. They are
part of the method, not of the data: their seed is fixed, so that a prompt always gives the same profile."""

Hidden = Float[Tensor, "position hidden"]
Table = Float[Tensor, "position feature"]


def affine(
    values: Float[Tensor, "*rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None
) -> Float[Tensor, "*rows out"]:
    """y = W x + b in the values' floating type, whatever the model's."""
    dtype = values.dtype
    return torch.nn.functional.linear(values, weight.to(dtype), None if bias is None else bias.to(dtype))


def norm_forward(norm: Norm | None, values: Float[Tensor, "*rows feature"]) -> Float[Tensor, "*rows feature"]:
    """The norm itself; the identity if there is none."""
    if norm is None:
        return values
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    size = (values.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    normed = values * size * norm.gain.to(values)
    return normed if norm.bias is None else normed + norm.bias.to(values)


def norm_pull(
    norm: Norm | None,
    values: Float[Tensor, "... feature"] | None,
    energy: Float[Tensor, "*batch feature"],
    power: Power,
) -> Float[Tensor, "*batch feature"]:
    """Pull `energy` back through a norm that read `values`.

    J = diag(w) P / sigma with m = (x - mean x) / (sigma sqrt(d)) and P = I - 11'/d - mm'; an RMS norm leaves out both
    means. Power 2 is the elementwise square of J, exactly. With u = w^2 e, for an RMS norm
    [u (1 - 2 m^2) + m^2 sum_b m_b^2 u_b] / sigma^2, and for a LayerNorm
    [u (1 - 2/d - 2 m^2) + sum_b (1/d + m m_b)^2 u_b] / sigma^2.

    Args:
        norm: None for the identity.
        values: The norm's input x; None only without a norm.
        energy: Energy at the norm's output; >= 0 for power 2, and so is the result.
        power: 1 signed, 2 energies.
    """
    if norm is None or values is None:
        return energy
    width = values.shape[-1]
    layer_norm = norm.kind == "layer"
    if layer_norm:
        values = values - values.mean(-1, keepdim=True)
    variance = values.square().mean(-1, keepdim=True) + norm.epsilon
    gain = norm.gain.to(values.dtype)
    direction = values * (variance * width).rsqrt()
    if power == 1:
        scaled = gain * energy
        pulled = scaled - direction * (direction * scaled).sum(-1, keepdim=True)
        if layer_norm:
            pulled = pulled - scaled.mean(-1, keepdim=True)
        return pulled * variance.rsqrt()
    scaled = gain.square() * energy
    share = direction.square()
    pulled = scaled * (1 - 2 * share) + share * (share * scaled).sum(-1, keepdim=True)
    if layer_norm:
        crossed = direction * (direction * scaled).sum(-1, keepdim=True)
        pulled = pulled + (2 * crossed - 2 * scaled + scaled.mean(-1, keepdim=True)) / width
    return pulled.clamp_min(0) / variance  # below 0 only by round-off, where one feature carries the whole norm


def gain_and_power(
    norm: Norm | None, values: Float[Tensor, "*places feature"] | None, like: Float[Tensor, "*places feature"]
) -> tuple[Float[Tensor, "*heads feature"], Float[Tensor, "*places"]]:
    """A norm's gain, and the power it divides by at every place; ones without a norm."""
    if norm is None or values is None:
        return like.new_ones(like.shape[-1]), torch.ones_like(like[..., 0])
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    return norm.gain.to(like.dtype), values.square().mean(-1) + norm.epsilon


def even_gain(norm: Norm | None, values: Float[Tensor, "*places feature"] | None) -> Float[Tensor, "*places"] | float:
    """Factor of a stream's norm on an energy spread evenly over its channels: mean w^2 / sigma^2."""
    if norm is None or values is None:
        return 1.0
    gain, size = gain_and_power(norm, values, values)
    return gain.square().mean(-1) / size


def rotary_pull(
    energy: Float[Tensor, "*heads position feature"],
    cosine: Float[Tensor, "*angles position rotary"] | None,
    sine: Float[Tensor, "*angles position rotary"] | None,
    power: Power,
) -> Float[Tensor, "*heads position feature"]:
    """Undo the rotation: its transpose for power 1, cos^2 and half-swapped sin^2 for power 2."""
    if cosine is None or sine is None:
        return energy
    rotary = cosine.shape[-1]
    turned, unturned = energy[..., :rotary], energy[..., rotary:]
    first, second = (turned * sine.pow(power)).chunk(2, -1)
    swapped = torch.cat([second, -first if power == 1 else first], -1)
    return torch.cat([turned * cosine.pow(power) + swapped, unturned], -1)


def hidden_layer(parts: MlpParts, read: Table) -> tuple[Hidden, Hidden | None]:
    """Outputs of the MLP's maps `up` and `gate` (None without a gate), before any activation."""
    gate = None if parts.gate is None else affine(read, parts.gate, parts.gate_bias)
    return affine(read, parts.up, parts.up_bias), gate


def hidden_pull(
    parts: MlpParts,
    up: Hidden,
    gate: Hidden | None,
    hidden: Float[Tensor, "*batch position hidden"],
    power: Power,
) -> Energy:
    """Pull from the hidden layer to the MLP's input: the transpose of the map into it.

    Plain, with a = act'(up): the map is a W_u. Gated, with a = act'(gate) up and b = act(gate): it is a W_g + b W_u,
    whose square keeps the cross term: (t a^2) W_g^2 + (t b^2) W_u^2 + 2 (t a b)(W_g o W_u). `up` and `gate` as
    `hidden_layer` gives them.
    """
    up_weight = parts.up.to(hidden.dtype)
    if parts.gate is None or gate is None:
        _, slope = value_and_slope(parts.activation, up)
        return (hidden * slope.pow(power)) @ up_weight.pow(power)
    gate_weight = parts.gate.to(hidden.dtype)
    value, slope = value_and_slope(parts.activation, gate)
    slope = slope * up
    pulled = (hidden * slope.pow(power)) @ gate_weight.pow(power)
    pulled = pulled + (hidden * value.pow(power)) @ up_weight.pow(power)
    if power == 1:
        return pulled
    pulled = pulled + (2 * hidden * slope * value) @ (gate_weight * up_weight)
    return pulled.clamp_min(0)  # a sum of squares; the cross term may round below 0


def value_and_slope(
    activation: Callable[[Tensor], Tensor], before: Float[Tensor, "*rows hidden"]
) -> tuple[Float[Tensor, "*rows hidden"], Float[Tensor, "*rows hidden"]]:
    """The activation and its derivative, elementwise."""
    with torch.enable_grad():
        leaf = before.detach().requires_grad_(True)
        value = activation(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def mlp_pull(layer: LayerDescription, trace: LayerTrace, energy: Energy, walk: Walk) -> Energy:
    """Pull through the MLP branch alone (the stream's own identity path is the caller's).

    It leads from the branch's output, where it is added to the stream, to its input: the stream after attention, or the
    block's input if the branches are parallel. Each batch entry and position has one random sign.
    """
    power = walk.power
    energy = norm_pull(layer.mlp_post_norm, trace.mlp_branch, energy, power)
    parts, up, gate = layer.mlp, trace.up, trace.gate
    assert parts is not None
    if up is None or (parts.gate is not None and gate is None):
        up, gate = hidden_layer(parts, norm_forward(layer.mlp_norm, trace.middle))
    pulled = hidden_pull(parts, up, gate, energy @ parts.down.to(energy.dtype).pow(power), power)
    pulled = norm_pull(layer.mlp_norm, trace.middle, pulled, power)
    return walk.signed(pulled, (*pulled.shape[:-1], 1))


def mlp_gain(layer: LayerDescription, trace: LayerTrace, generator: torch.Generator) -> Float[Tensor, "position"]:
    """||J_mlp||_F^2 / d at every position, by random signed vector-Jacobian products."""
    stream = trace.middle
    total = torch.zeros_like(stream[:, 0])
    for _ in range(PROBES):
        probe = torch.randn(stream.shape, generator=generator, dtype=torch.float32).to(stream)
        total += mlp_pull(layer, trace, probe, BACK_PROPAGATION).square().sum(-1)
    return total / (PROBES * stream.shape[1])
