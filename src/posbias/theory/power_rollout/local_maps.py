"""Transposed local maps of a decoder block, signed (power 1) or as energies (power 2), and the paths a pull follows.

With power 1 each function applies the transpose of an exact local Jacobian, J'g: composed, they are back-propagation,
by which the tests check them. With power 2 it applies the elementwise square of the same Jacobian, (J o J)'e, which
moves energies of contributions with unrelated directions (docs/theory, section 5).

Attention is seen again in blocks of queries from what its module read: no matrix larger than heads x block x positions
exists at any time. Besides the value path it is reached through the softmax: moving a key moves the weights of every
query that sees it ("key path").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.models.attention_blocks import AttentionState, KeptAttention, query_blocks, state_of
from posbias.models.layout import AttentionParts, Linear, MlpParts, Norm

Power = Literal[1, 2]
"""1: signed maps, back-propagation; 2: their elementwise squares, energies."""
Energy = Float[Tensor, "*batch position feature"]
"""Energies (power 2, >= 0) or gradients (power 1) in every residual channel."""


@dataclass(frozen=True)
class Walk:
    """One way to walk from the last position down to the input."""

    power: Power = 2
    key: bool = True
    """Follow keys, which move the attention weights, beside the values."""
    query: bool = False
    """Follow queries as well."""


THEORY = Walk()
BACK_PROPAGATION = Walk(power=1, query=True)
"""The exact gradient: signed maps along values, keys and queries."""


@dataclass(frozen=True)
class LayerDescription:
    """One block's maps and facts."""

    parts: AttentionParts
    mlp: MlpParts
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False
    """Both branches read the block's input."""
    rotates: bool = False
    """Queries and keys are turned by the angles that the attention module gets."""
    inputs: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose inputs a trace keeps, by field of `LayerTrace`."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations of one block for one prompt, in the theory's floating type."""

    stream: Float[Tensor, "position feature"]
    """The block's input."""
    middle: Float[Tensor, "position feature"]
    """Input of the MLP branch: the stream after the attention branch was added, or `stream` in parallel blocks."""
    kept: KeptAttention
    """What the attention module read."""
    attention_branch: Float[Tensor, "position feature"] | None = None
    mlp_branch: Float[Tensor, "position feature"] | None = None
    """The branches before their post-norms; None if the family has none."""


def affine(values: Float[Tensor, "*rows in"], of: Linear) -> Float[Tensor, "*rows out"]:
    """y = W x + b in the values' floating type, whatever the model's."""
    return torch.nn.functional.linear(values, of.weight.to(values), None if of.bias is None else of.bias.to(values))


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
    block's input if the branches are parallel. The map into the hidden layer is plain a W_u with a = act'(up); gated,
    with a = act'(gate) up and b = act(gate), it is a W_g + b W_u, whose square keeps the cross term:
    (t a^2) W_g^2 + (t b^2) W_u^2 + 2 (t a b)(W_g o W_u).
    """
    power, parts = walk.power, layer.mlp
    energy = norm_pull(layer.mlp_post_norm, trace.mlp_branch, energy, power)
    hidden, read = energy @ parts.down.weight.to(energy.dtype).pow(power), norm_forward(layer.mlp_norm, trace.middle)
    up, up_weight = affine(read, parts.up), parts.up.weight.to(energy.dtype)
    if parts.gate is None:
        _, slope = value_and_slope(parts.activation, up)
        pulled = (hidden * slope.pow(power)) @ up_weight.pow(power)
    else:
        value, slope = value_and_slope(parts.activation, affine(read, parts.gate))
        slope, gate_weight = slope * up, parts.gate.weight.to(energy.dtype)
        pulled = (hidden * slope.pow(power)) @ gate_weight.pow(power)
        pulled = pulled + (hidden * value.pow(power)) @ up_weight.pow(power)
        if power == 2:  # a sum of squares; the cross term may round below 0
            pulled = (pulled + (2 * hidden * slope * value) @ (gate_weight * up_weight)).clamp_min(0)
    return norm_pull(layer.mlp_norm, trace.middle, pulled, power)


ByHead = Float[Tensor, "*batch head position _feature"]
ByKeyHead = Float[Tensor, "*batch key_head position _feature"]
ByQueryHead = Float[Tensor, "*batch key_head group position _feature"]


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention on one prompt, and what a pull through it undoes."""

    state: AttentionState
    """Queries and keys may have more than `head_dim` features: those behind hold a key bias."""
    cosine: Float[Tensor, "*heads position rotary"] | None
    """Of its rotation; None without."""
    sine: Float[Tensor, "*heads position rotary"] | None
    read: Float[Tensor, "position feature"]


def attention_of(layer: LayerDescription, trace: LayerTrace) -> LayerAttention:
    """The attention of a layer as the dot product sees it, with an intervention that lasts."""
    parts, seen = layer.parts, trace.kept.again()
    cosine = sine = None
    if layer.rotates:
        cosine, sine = (part[0].to(trace.stream) for part in seen.arguments[1]["position_embeddings"])
    state = state_of(seen, trace.stream.dtype)
    shared = len(state.key) // parts.key_heads  # Falcon repeats its keys for every head
    state = replace(
        state,
        query=state.query.reshape(parts.key_heads, -1, *state.query.shape[2:]),
        key=state.key[::shared],
        value=state.value[::shared, :, : parts.value_dim],
    )
    return LayerAttention(state, cosine, sine, trace.kept.read.to(trace.stream))


def attention_pull(layer: LayerDescription, trace: LayerTrace, energy: Energy, walk: Walk) -> Energy:
    """Pull through one attention branch alone (its factor and the stream's own identity path are the caller's).

    r = N_post(e) W_O^p by head; values: Z_j = sum_i A_ij^p r_i; keys: g_j = sum_i B_ij q_i^p with
    B_ij = (scale s_ij A_ij)^p sum_c r_ic (v_jc - o_ic)^p and s the slope of the logits' soft cap (1 without),
    rotation and q/k norm undone; then N_in(Z W_V^p + g W_K^p).
    Logits by position (ALiBi) are constants.
    """
    parts, power, attention = layer.parts, walk.power, attention_of(layer, trace)
    state = attention.state
    energy = norm_pull(layer.attention_post_norm, trace.attention_branch, energy, power)
    received = energy @ parts.output.weight.to(energy.dtype).pow(power)
    by_head = received.reshape(*received.shape[:-1], parts.key_heads, -1, parts.value_dim).movedim(-4, -2)
    values, keys, queries = _pull_blocks(layer, state, by_head, walk)

    reached = _project(values, parts.value.weight, power)
    if walk.key and state.scale != 0:
        keys = _unprepared(keys, attention, parts.key_norm, parts.key, power)
        reached = reached + _project(keys, parts.key.weight, power)
    if walk.query and state.scale != 0:
        queries = _unprepared(queries.flatten(-4, -3), attention, parts.query_norm, parts.query, power)
        reached = reached + _project(queries, parts.query.weight, power)
    return norm_pull(layer.attention_norm, trace.stream, reached, power)


def _pull_blocks(
    layer: LayerDescription, state: AttentionState, received: ByQueryHead, walk: Walk
) -> tuple[ByKeyHead, ByKeyHead, ByQueryHead]:
    """Energies that reach values, keys and queries (as the dot product sees them), summed over blocks of queries."""
    power, scale = walk.power, state.scale
    head_dim = layer.parts.head_dim
    # Every logit's slope, once per key or query path.
    query, key = state.query[..., :head_dim] * scale, state.key[..., :head_dim] * scale
    values = received.new_zeros(*received.shape[:-3], *received.shape[-2:])
    keys, queries = (zeros.new_zeros(*zeros.shape[:-1], head_dim) for zeros in (values, received))
    for block in query_blocks(state):
        weights, rows = block.weights.flatten(-3, -2), received[..., block.queries, :].flatten(-3, -2)
        first = weights if power == 1 else weights.square()
        values[..., block.keys, :] += first.transpose(-1, -2) @ rows
        if scale == 0 or not (walk.key or walk.query):
            continue
        value = state.value[:, block.keys]
        through = _centred(rows, value, weights @ value, power).mul_(first)
        if state.softcap is not None:  # d(capped logit) / d(logit) = 1 - tanh(logit / cap)^2
            logits = state.query[:, :, block.queries].flatten(-3, -2) @ state.key[:, block.keys].transpose(1, 2)
            through.mul_((1 - (logits * (scale / state.softcap)).tanh().square()).pow(power))
        if walk.key:
            sent = query[:, :, block.queries].flatten(-3, -2).pow(power)
            keys[..., block.keys, :] += through.transpose(-1, -2) @ sent
        if walk.query:
            sent = key[:, block.keys].pow(power)
            reached = through @ sent
            queries[..., block.queries, :] = reached.reshape(queries[..., block.queries, :].shape)
    return values, keys, queries


def _centred(
    received: Float[Tensor, "*batch key_head row head_dim"],
    value: Float[Tensor, "key_head key head_dim"],
    output: Float[Tensor, "key_head row head_dim"],
    power: Power,
) -> Float[Tensor, "*batch key_head row key"]:
    """sum_c r_ic (v_jc - o_ic)^power, without forming the differences."""
    if power == 1:
        return (received @ value.transpose(1, 2)).sub_((received * output).sum(-1, keepdim=True))
    weighted = received * output
    of_row, of_key = torch.cat([received, -2 * weighted], -1), torch.cat([value.square(), value], -1)
    constant = (weighted * output).sum(-1, keepdim=True)
    return (of_row @ of_key.transpose(1, 2)).add_(constant).clamp_min_(0)  # a sum of squares, below 0 only by round-off


def _unprepared(energy: ByHead, attention: LayerAttention, norm: Norm | None, of: Linear, power: Power) -> ByHead:
    """Pull from queries or keys as the dot product sees them to their projection's output: RoPE and norm undone."""
    energy = rotary_pull(energy, attention.cosine, attention.sine, power)
    if norm is None:
        return energy
    merged = _merged(energy)
    grouped = merged.reshape(*merged.shape[:-1], -1, norm.gain.shape[-1])
    raw = affine(attention.read, of).reshape(grouped.shape[-3:])
    return norm_pull(norm, raw, grouped, power).reshape(energy.transpose(-3, -2).shape).transpose(-3, -2)


def _project(
    energy: ByHead, weight: Float[Tensor, "features width"], power: Power
) -> Float[Tensor, "*batch position width"]:
    """Pull through a projection of all heads to its input."""
    return _merged(energy) @ weight.to(energy.dtype).pow(power)


def _merged(values: ByHead) -> Float[Tensor, "*batch position features"]:
    """Heads side by side, as the projections see them."""
    return values.transpose(-3, -2).flatten(-2)
