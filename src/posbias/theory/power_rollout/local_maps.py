"""Transposed local maps of a decoder block, signed (power 1) or as energies (power 2).

With power 1 each function applies the transpose of an exact local Jacobian, J'g: composed, they are back-propagation,
which is how the tests check them. With power 2 it applies the elementwise square of the same Jacobian, (J o J)'e: what
becomes of energies when contributions have unrelated directions (docs/theory, section 5).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import norm_forward
from posbias.models.families import MixtureParts, Norm
from posbias.theory.power_rollout.description import LayerDescription
from posbias.theory.power_rollout.hidden_maps import hidden_layer, hidden_pull
from posbias.theory.power_rollout.mixture_maps import mixture_pull
from posbias.theory.power_rollout.trace import LayerTrace
from posbias.theory.power_rollout.walk import Power, Walk


def norm_pull(
    norm: Norm | None,
    values: Float[Tensor, "... feature"] | None,
    energy: Float[Tensor, "*batch feature"],
    power: Power,
    *,
    even: bool = False,
) -> Float[Tensor, "*batch feature"]:
    """Pull `energy` back through a norm that read `values`.

    J = diag(w) P / sigma with m = (x - mean x) / (sigma sqrt(d)) and P = I - 11'/d - mm'; an RMS norm leaves out both
    means. Power 2 is the elementwise square of J, exactly. With u = w^2 e, for an RMS norm
    [u (1 - 2 m^2) + m^2 sum_b m_b^2 u_b] / sigma^2, and for a LayerNorm
    [u (1 - 2/d - 2 m^2) + sum_b (1/d + m m_b)^2 u_b] / sigma^2.

    Args:
        norm: The norm, or None for the identity.
        values: What the norm read, x; `energy` may have more leading dimensions, a batch. None only without a norm.
        energy: At the norm's output; >= 0 for power 2.
        power: 1 signed, 2 energies.
        even: Divide by the mean of sigma over the rows of `values` (positions) instead of each row's own.

    Returns:
        At the norm's input; >= 0 for power 2.
    """
    if norm is None or values is None:
        return energy
    width = values.shape[-1]
    layer_norm = norm.kind == "layer"
    if layer_norm:
        values = values - values.mean(-1, keepdim=True)
    variance = values.square().mean(-1, keepdim=True) + norm.epsilon
    divisor = variance.sqrt().mean().square() if even else variance
    gain = norm.gain.to(values.dtype)
    direction = values * (variance * width).rsqrt()
    if power == 1:
        scaled = gain * energy
        pulled = scaled - direction * (direction * scaled).sum(-1, keepdim=True)
        if layer_norm:
            pulled = pulled - scaled.mean(-1, keepdim=True)
        return pulled * divisor.rsqrt()
    scaled = gain.square() * energy
    share = direction.square()
    pulled = scaled * (1 - 2 * share) + share * (share * scaled).sum(-1, keepdim=True)
    if layer_norm:
        crossed = direction * (direction * scaled).sum(-1, keepdim=True)
        pulled = pulled + (2 * crossed - 2 * scaled + scaled.mean(-1, keepdim=True)) / width
    return pulled.clamp_min(0) / divisor  # below 0 only by round-off, where one feature carries the whole norm


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
    layer: LayerDescription, trace: LayerTrace, energy: Float[Tensor, "*batch position feature"], walk: Walk
) -> Float[Tensor, "*batch position feature"]:
    """Pull through the MLP branch alone (the stream's own identity path is the caller's).

    Args:
        layer: The block's maps.
        trace: The block's activations.
        energy: At the branch's output, where it is added to the stream.
        walk: Signed or energies; with random signs, one for each batch entry and position.

    Returns:
        At the branch's input: the stream after attention, or the block's input where the branches are parallel.
    """
    power, even = walk.power, walk.even_norms
    energy = norm_pull(layer.mlp_post_norm, trace.mlp_branch, energy, power, even=even)
    pulled = _branch_pull(layer, trace, energy, walk)
    pulled = norm_pull(layer.mlp_norm, trace.middle, pulled, power, even=even)
    return walk.signed(pulled, (*pulled.shape[:-1], 1))


def _branch_pull(
    layer: LayerDescription, trace: LayerTrace, energy: Float[Tensor, "*batch position feature"], walk: Walk
) -> Float[Tensor, "*batch position feature"]:
    """Through the MLP itself, between its norms."""
    parts = layer.mlp
    if isinstance(parts, MixtureParts):
        assert trace.chosen is not None
        return mixture_pull(parts, norm_forward(layer.mlp_norm, trace.middle), trace.chosen, energy, walk)
    up, gate = trace.up, trace.gate
    if up is None or (parts.gate is not None and gate is None):
        up, gate = hidden_layer(parts, norm_forward(layer.mlp_norm, trace.middle))
    hidden = energy @ parts.down.to(energy.dtype).pow(walk.power)
    return hidden_pull(parts, up, gate, hidden, walk.power)
