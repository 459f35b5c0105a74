"""Transposed local maps of stacked reference transformers, signed (power 1) or as energies (power 2).

The same walk as for Hugging Face models (attention.py, local_maps.py, diagonal.py) on dense attention and with a member
axis. Where heads carry the stream itself (values `identity`, `orthogonal`) they agree on its direction, so that
the value path squares their mean attention (docs/theory, section 5).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.reference import ReferenceShape
from posbias.models.reference.attention import linear, map_of
from posbias.models.reference.forward import ACTIVATIONS, normalise
from posbias.theory.power_rollout.local_maps import norm_pull
from posbias.theory.power_rollout.reference_layers import StackLayer, StackTrace, norm_of
from posbias.theory.power_rollout.walk import Power, Walk

Energy = Float[Tensor, "*probe member batch position feature"]
ByHead = Float[Tensor, "*probe member batch head position head_dim"]


@torch.no_grad()
def stack_start(trace: StackTrace, covector: Float[Tensor, "*probe member batch feature"], power: Power) -> Energy:
    """From the last position's final state to the stream above the last layer, zero at every other position."""
    last = covector[..., None, :]
    if trace.shape.norm == "pre":
        final = norm_of(trace.shape, trace.parameters, "final")
        last = norm_pull(final, trace.final_stream[:, :, None], last, power)
    stream = last.new_zeros(*last.shape[:-2], trace.shape.n_positions, last.shape[-1])
    stream[..., -1:, :] = last
    return stream


@torch.no_grad()
def stack_pull(trace: StackTrace, energy: Energy, walk: Walk) -> Energy:
    """Pull from the stream above the last layer to the vectors entering the network.

    Args:
        trace: Members on their inputs.
        energy: Energies (power 2, >= 0) or gradients (power 1) at the stream above the last layer.
        walk: Which paths are followed, with which power.

    Returns:
        At the vectors: energies of each input up to a common factor for power 2, the gradient for power 1.
    """
    for layer in reversed(trace.layers):
        energy = stack_pull_layer(trace.shape, layer, energy, walk)
        if walk.power == 2:
            energy = energy / energy.sum((-2, -1), keepdim=True)  # only the shape matters, and depth would overflow
    return stack_pull_to_input(trace, energy, walk)


@torch.no_grad()
def stack_pull_to_input(trace: StackTrace, energy: Energy, walk: Walk) -> Energy:
    """From the stream below the first layer to the vectors entering the network."""
    if trace.shape.embedding_norm:
        embedding = norm_of(trace.shape, trace.parameters, "embedding")
        energy = norm_pull(embedding, trace.vectors, energy, walk.power, even=walk.even_norms)
    return energy


@torch.no_grad()
def stack_diagonal(trace: StackTrace, walk: Walk) -> Float[Tensor, "member batch position"]:
    """Square roots of the energies that reach each input position; not normalised."""
    gradient = torch.ones_like(trace.state) if trace.score_gradient is None else trace.score_gradient
    return stack_pull(trace, stack_start(trace, gradient.square(), 2), walk).double().sum(-1).sqrt()


@torch.no_grad()
def stack_pull_layer(shape: ReferenceShape, layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through one layer, the stream's own path included."""
    power, even, post = walk.power, walk.even_norms, shape.norm == "post"
    if shape.rotate_stream:
        energy = energy @ back(layer.weights["rotation"], power)
    if shape.mlp_width:
        if post:
            energy = norm_pull(layer.norm(shape, "mlp"), layer.mlp_sum, energy, power, even=even)
        if walk.mlp:
            update = mlp_pull(shape, layer, energy, walk)
            energy = _meet(shape, layer.constants["mlp_kept"], energy, update, walk)
    if post:
        energy = norm_pull(layer.norm(shape, "attention"), layer.attention_sum, energy, power, even=even)
    added = attention_pull(shape, layer, energy, walk)
    if shape.residual == "scaled":
        added = _times(layer.constants["added"], added, power)
    return _meet(shape, layer.constants["kept"], energy, added, walk)


def _meet(shape: ReferenceShape, kept: Float[Tensor, "member"], energy: Energy, branch: Energy, walk: Walk) -> Energy:
    """What the stream carries below a branching: its own path, where there is one, and what came by the branch."""
    if shape.residual == "none":
        return walk.add(branch)
    identity = _times(kept, energy, walk.power) if shape.residual == "scaled" else energy
    return walk.meet(identity, branch)


def mlp_pull(shape: ReferenceShape, layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through the MLP branch alone; with random signs one for each batch entry and position.

    Plain: t a with a = act'(up); gated: a = act'(gate) up and b = act(gate), whose square keeps the cross term.
    """
    weights, power = layer.weights, walk.power
    inner = layer.middle
    if shape.norm == "pre":
        inner = normalise(shape, layer.weights, "mlp", inner)
    up = linear(inner, weights["up"], weights.get("up_bias"))
    hidden = energy @ back(weights["down"], power)
    if shape.gated_mlp:
        value, slope = _activation(shape, linear(inner, weights["gate"], weights.get("gate_bias")))
        slope = slope * up
        pulled = (hidden * slope.pow(power)) @ back(weights["gate"], power)
        pulled = pulled + (hidden * value.pow(power)) @ back(weights["up"], power)
        if power == 2:
            pulled = pulled + (2 * hidden * slope * value) @ back(weights["gate"] * weights["up"], 1)
            pulled = pulled.clamp_min(0)  # a sum of squares; the cross term may round below 0
    else:
        pulled = (hidden * _activation(shape, up)[1].pow(power)) @ back(weights["up"], power)
    if shape.norm == "pre":
        pulled = norm_pull(layer.norm(shape, "mlp"), layer.middle, pulled, power, even=walk.even_norms)
    return walk.signed(pulled, (*pulled.shape[:-1], 1))


def attention_pull(shape: ReferenceShape, layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through the attention branch alone, without the residual's factors.

    r = W_O'(e) by head; values: Z_j = sum_i A_ij^p r_i; keys: g_j = sum_i B_ij q_i^p with
    B_ij = (s A_ij / sqrt(head_dim))^p sum_c r_ic (v_jc - o_ic)^p, s = 1 / heads where heads carry the stream itself.
    """
    found, power = layer.attention, walk.power
    carries_stream = shape.values != "gaussian"
    received = sent_by_heads(shape, layer, energy, power)
    if walk.even_heads and not carries_stream:
        received = received * _evening(shape, layer)
    first = (found.weights.mean(2, keepdim=True) if carries_stream else found.weights).pow(power)
    values = _gathered(first, received, walk)
    paths = [values[..., 0, :, :] if carries_stream else _projected(values, layer.weights["value"], walk)]
    if found.query is not None and found.key is not None and (walk.key or walk.query):
        share = 1 / (math.sqrt(shape.head_dim) * (shape.heads if carries_stream else 1))
        through = _centred(received, found.value, found.weights @ found.value, power)
        through = through * (share * found.weights).pow(power)
        if walk.key:
            keys = unturned(shape, layer, _gathered(through, found.query.pow(power), walk), power)
            paths.append(_projected(keys, map_of(shape, layer.weights, "key")[0], walk))
        if walk.query:
            sent = found.key.pow(power)
            reached = through.sqrt() @ sent.sqrt() if walk.amplitudes else through @ sent
            reached = walk.signed(reached.square() if walk.amplitudes else reached, (*reached.shape[:-1], 1))
            queries = unturned(shape, layer, reached, power)
            paths.append(_projected(queries, map_of(shape, layer.weights, "query")[0], walk))
    total = walk.add(*paths)
    if shape.norm == "pre":
        total = norm_pull(layer.norm(shape, "attention"), layer.stream, total, power, even=walk.even_norms)
    return total


def sent_by_heads(shape: ReferenceShape, layer: StackLayer, energy: Energy, power: Power) -> ByHead:
    """What reaches each head's mixed values from the branch's output; one carrier where heads carry the stream."""
    if shape.values == "identity":
        return energy[..., None, :, :]
    if shape.values == "orthogonal":
        return (energy @ back(layer.weights["value"], power))[..., None, :, :]
    if shape.output_map:
        return energy[..., None, :, :] @ back(layer.weights["output"], power)
    return energy.reshape(*energy.shape[:-1], shape.heads, -1).transpose(-3, -2)


def unturned(shape: ReferenceShape, layer: StackLayer, energy: ByHead, power: Power) -> ByHead:
    """Undo the rotation of neighbouring features: its transpose for power 1, cos^2 and swapped sin^2 for power 2."""
    if not shape.rotary:
        return energy
    cosine, sine = (layer.constants[name][:, None].pow(power) for name in ("cosine", "sine"))
    first, second = energy.reshape(*energy.shape[:-1], -1, 2).unbind(-1)
    opposite = -first if power == 1 else first
    return torch.stack([cosine * first + sine * second, cosine * second + sine * opposite], -1).flatten(-2)


def back(weight: Float[Tensor, "member *head feature output"], power: Power) -> Float[Tensor, "member one *back"]:
    """A map x W transposed, elementwise to a power, with an axis for the batch."""
    return weight.pow(power).transpose(-1, -2)[:, None]


def _gathered(
    transfer: Float[Tensor, "*probe member batch carrier query key"],
    rows: Float[Tensor, "*rows member batch carrier query feature"],
    walk: Walk,
) -> Float[Tensor, "*found member batch carrier key feature"]:
    """What the queries' `rows` send to each key."""
    if walk.amplitudes:
        return (transfer.sqrt().transpose(-1, -2) @ rows.sqrt()).square()
    probes = max(transfer.shape[:-3], rows.shape[:-3], key=len)
    return walk.signed(transfer, (*probes, *transfer.shape[-3:])).transpose(-1, -2) @ rows


def _projected(by_head: ByHead, weight: Float[Tensor, "member group feature head_dim"], walk: Walk) -> Energy:
    """Through the maps of all heads to what they read; heads that share a map are summed first."""
    by_group = by_head.reshape(*by_head.shape[:-3], weight.shape[1], -1, *by_head.shape[-2:])
    grouped = by_group.sqrt().sum(-3).square() if walk.amplitudes else by_group.sum(-3)
    pulled = grouped @ back(weight, walk.power)
    total: Tensor = pulled.sqrt().sum(-3).square() if walk.amplitudes else pulled.sum(-3)
    return total


def _centred(
    received: Float[Tensor, "*probe member batch carrier position feature"],
    value: Float[Tensor, "member batch carrier position feature"],
    output: Float[Tensor, "member batch head position feature"],
    power: Power,
) -> Float[Tensor, "*probe member batch head position position"]:
    """sum_c r_ic (v_jc - o_ic)^power, without forming the differences."""
    across = value.transpose(-1, -2)
    if power == 1:
        return received @ across - (received * output).sum(-1, keepdim=True)
    weighted = received * output
    squares = received @ across.square() - 2 * weighted @ across + (weighted * output).sum(-1, keepdim=True)
    return squares.clamp_min(0)  # a sum of squares, below 0 only by round-off


def _evening(shape: ReferenceShape, layer: StackLayer) -> Float[Tensor, "member one head one one"]:
    """What gives every head the layer's mean value gain, 1' W_O^2 W_V^2 N_in^2 1 with the norm's gain."""
    value = layer.weights["value"].square()
    if shape.norm == "pre":
        value = value * layer.weights["attention_gain"].square()[:, None, :, None]
    read = value.sum(-2).repeat_interleave(shape.heads // shape.key_value_heads, dim=1)
    sent = layer.weights["output"].square().sum(-1) if shape.output_map else torch.ones_like(read)
    gains = (sent * read).sum(-1)
    even = torch.where(gains > 0, gains.mean(-1, keepdim=True) / gains, torch.ones_like(gains))
    return even[:, None, :, None, None]


def _activation(
    shape: ReferenceShape, values: Float[Tensor, "member batch position hidden"]
) -> tuple[Float[Tensor, "member batch position hidden"], Float[Tensor, "member batch position hidden"]]:
    """The activation and its derivative, elementwise."""
    with torch.enable_grad():
        leaf = values.detach().requires_grad_(True)
        value = ACTIVATIONS[shape.activation](leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def _times(factor: Float[Tensor, "member"], energy: Energy, power: Power) -> Energy:
    return factor.pow(power)[:, None, None, None] * energy
