"""Transposed local maps of a decoder block, signed (power 1) or as energies (power 2).

With power 1 each function applies the transpose of an exact local Jacobian, J'g: composed, they are back-propagation,
by which the tests check them. With power 2 it applies the elementwise square of the same Jacobian, (J o J)'e, which
moves energies of contributions with unrelated directions (docs/theory, section 5).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.models.attention import affine, norm_forward
from posbias.models.families.parts import MixtureParts, MlpParts, Norm
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Energy, Power, Walk

PROBES, PROBE_SEED = 2, 0
"""Random vectors per layer for ||J_mlp||_F^2: with hundreds of channels two already give it to a few percent. They are
part of the method, not of the data: their seed is fixed, so that a prompt always gives the same profile."""

Hidden = Float[Tensor, "position hidden"]
Table = Float[Tensor, "position feature"]


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
        norm: None for the identity.
        values: The norm's input x; None only without a norm.
        energy: Energy at the norm's output; >= 0 for power 2, and so is the result.
        power: 1 signed, 2 energies.
        even: Divide by the mean of sigma over the rows of `values` (positions) instead of each row's own.
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
    whose square keeps the cross term: (t a^2) W_g^2 + (t b^2) W_u^2 + 2 (t a b)(W_g o W_u). If up has an activation of
    its own, its value stands in a and its derivative is a factor of b. `up` and `gate` as `hidden_layer` gives them.
    """
    up_weight = parts.up.to(hidden.dtype)
    if parts.gate is None or gate is None:
        _, slope = value_and_slope(parts.activation, up)
        return (hidden * slope.pow(power)) @ up_weight.pow(power)
    gate_weight = parts.gate.to(hidden.dtype)
    value, slope = value_and_slope(parts.activation, gate)
    if parts.up_activation is not None:
        up, up_slope = value_and_slope(parts.up_activation, up)
        value = value * up_slope
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


def mixture_pull(
    mixture: MixtureParts,
    read: Table,
    chosen: Int[Tensor, "position top"],
    energy: Energy,
    walk: Walk,
) -> Energy:
    """Pull through a mixture of experts, from its output to its input.

    With y = sum_i w_i(x) E_i(x) over the chosen experts i, J = sum_i w_i J_i + sum_f u_f (W_r)_f: the experts' own maps
    and the router's path, which is to a mixture what the key path is to attention, u_f = sum_i (dw_i/dl_f) E_i for the
    logit l_f of each expert. If experts read w_i x, J_i x stands in place of E_i. Maps to a latent that experts read,
    and back, are squared one by one. A shared expert has the weight of its gate. The choice itself is piecewise
    constant. Energies add between experts, and between them and the router; (J o J)' of the router's path is taken by
    products of the chosen experts' outputs. `read` is the mixture's input, after the norm before it; `chosen` are the
    experts that the model gave each token to.
    """
    power = walk.power
    weights, slopes = _weights_and_slopes(mixture, read, chosen)
    stream_read, stream_energy = read, energy
    if mixture.latent is not None and mixture.from_latent is not None:
        read = affine(read, mixture.latent.down, mixture.latent.bias)
        energy = energy @ mixture.from_latent.to(energy.dtype).pow(power)
    results, total = read.new_zeros(*chosen.shape, read.shape[-1]), torch.zeros_like(energy)
    moving = energy.new_zeros(*energy.shape[:-1], chosen.shape[-1])
    for expert, parts in enumerate(mixture.experts):
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        share, arriving = weights[tokens, choices, None], energy[..., tokens, :]
        if mixture.scales_input:
            run = _run_expert(parts, share * read[tokens])
            arriving = _expert_pull(parts, run, arriving, power)
            moving[..., tokens, choices] = (arriving * read[tokens].pow(power)).sum(-1)
            pulled = share.pow(power) * arriving
        else:
            run = _run_expert(parts, read[tokens])
            results[tokens, choices], moving[..., tokens, choices] = run.result, (arriving * run.result).sum(-1)
            pulled = _expert_pull(parts, run, share.pow(power) * arriving, power)
        total[..., tokens, :] += pulled.sqrt() if walk.amplitudes else pulled
    reached = (moving[..., None] * slopes.pow(power)).sum(-2)
    if power == 2 and not mixture.scales_input:  # a sum of squares, which may round below 0
        reached = ((energy[..., None, :] * results @ results.mT) @ slopes * slopes).sum(-2).clamp_min(0)
    through_experts = total.square() if walk.amplitudes else total
    if mixture.latent is not None:
        through_experts = through_experts @ mixture.latent.down.to(energy.dtype).pow(power)
    through_router = reached @ mixture.router.to(energy.dtype).pow(power)
    return walk.add(through_experts, through_router, *_shared_paths(mixture, stream_read, stream_energy, power))


def _weights_and_slopes(
    mixture: MixtureParts, read: Table, chosen: Int[Tensor, "position top"]
) -> tuple[Float[Tensor, "position top"], Float[Tensor, "position top expert"]]:
    """Weights of the chosen experts, and their derivatives by the logits of all."""
    with torch.enable_grad():
        logits = affine(read, mixture.router, mixture.router_bias).detach().requires_grad_(True)
        weights = mixture.weigh(logits, chosen)
        slopes = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in weights.unbind(-1)]
    return weights.detach(), torch.stack(slopes, 1)


class _Run(NamedTuple):
    """One expert on the tokens that it was given."""

    up: Hidden
    gate: Hidden | None
    result: Table


def _run_expert(parts: MlpParts, read: Table) -> _Run:
    up, gate = hidden_layer(parts, read)
    hidden = parts.activation(up if gate is None else gate)
    if gate is not None:
        hidden = hidden * (up if parts.up_activation is None else parts.up_activation(up))
    return _Run(up, gate, affine(hidden, parts.down, parts.down_bias))


def _expert_pull(parts: MlpParts, run: _Run, energy: Energy, power: Power) -> Energy:
    return hidden_pull(parts, run.up, run.gate, energy @ parts.down.to(energy.dtype).pow(power), power)


def _shared_paths(mixture: MixtureParts, read: Table, energy: Energy, power: Power) -> list[Energy]:
    """The paths through the shared expert, if there is one, and through its gate."""
    if mixture.shared is None:
        return []
    run = _run_expert(mixture.shared, read)
    if mixture.shared_gate is None:
        return [_expert_pull(mixture.shared, run, energy, power)]
    gate = affine(read, mixture.shared_gate, None).sigmoid()
    through_gate = (energy * (gate * (1 - gate) * run.result).pow(power)).sum(-1, keepdim=True)
    return [
        _expert_pull(mixture.shared, run, gate.pow(power) * energy, power),
        through_gate @ mixture.shared_gate.to(energy.dtype).pow(power),
    ]


def mlp_pull(layer: LayerDescription, trace: LayerTrace, energy: Energy, walk: Walk) -> Energy:
    """Pull through the MLP branch alone (the stream's own identity path is the caller's).

    It leads from the branch's output, where it is added to the stream, to its input: the stream after attention, or the
    block's input if the branches are parallel. Each batch entry and position has one random sign.
    """
    power, even = walk.power, walk.even_norms
    energy = norm_pull(layer.mlp_post_norm, trace.mlp_branch, energy, power, even=even)
    parts, up, gate = layer.mlp, trace.up, trace.gate
    assert parts is not None
    if isinstance(parts, MixtureParts):
        assert trace.chosen is not None
        pulled = mixture_pull(parts, norm_forward(layer.mlp_norm, trace.middle), trace.chosen, energy, walk)
    else:
        if up is None or (parts.gate is not None and gate is None):
            up, gate = hidden_layer(parts, norm_forward(layer.mlp_norm, trace.middle))
        pulled = hidden_pull(parts, up, gate, energy @ parts.down.to(energy.dtype).pow(power), power)
    pulled = norm_pull(layer.mlp_norm, trace.middle, pulled, power, even=even)
    return walk.signed(pulled, (*pulled.shape[:-1], 1))


def mlp_gain(layer: LayerDescription, trace: LayerTrace, generator: torch.Generator) -> Float[Tensor, "position"]:
    """||J_mlp||_F^2 / d at every position, by random signed vector-Jacobian products."""
    stream = trace.middle
    total = torch.zeros_like(stream[:, 0])
    for _ in range(PROBES):
        probe = torch.randn(stream.shape, generator=generator, dtype=torch.float32).to(stream)
        total += mlp_pull(layer, trace, probe, BACK_PROPAGATION).square().sum(-1)
    return total / (PROBES * stream.shape[1])
