"""Stacked reference transformers in the power rollout: what a pass leaves behind, and the pulls through it.

Reference models are small and computed together, so that every tensor has a member axis and attention is kept as
matrices [member, batch, head, query, key]. The same walk as for Hugging Face models (attention.py, local_maps.py,
prompt_trace.py) on dense attention. Where heads carry the stream itself (values `identity`, `orthogonal`)
they agree on its direction, so that the value path squares their mean attention (docs/theory, section 5).
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.errors import RunError
from posbias.models.families import Norm
from posbias.models.reference import ReferenceShape
from posbias.models.reference.attention import Weights, attention, branch, heads_of, linear, map_of, shared, turned
from posbias.models.reference.forward import (
    ACTIVATIONS,
    entered,
    entrance,
    normalise,
    of_constants,
    of_layer,
    read_out,
    scaled,
    with_mlp,
)
from posbias.theory.power_rollout.local_maps import (
    PROBES,
    even_gain,
    gain_and_power,
    joint_pull,
    norm_pull,
    value_and_slope,
)
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Power, Walk

PROBE_SEED = 0
"""The probes are part of the method, not of the data: fixed, so that a prompt always gives the same profile."""

Stream = Float[Tensor, "member batch position feature"]
Energy = Float[Tensor, "*probe member batch position feature"]
ByHead = Float[Tensor, "*probe member batch head position head_dim"]
Energies = Float[Tensor, "member batch position"]


@dataclass(frozen=True)
class StackAttention:
    """One layer's attention, and what enters it."""

    weights: Float[Tensor, "member batch head query key"]
    """Rows sum to 1."""
    value: Float[Tensor, "member batch carrier position carried"]
    """What a head carries from each position, before any output map; the stream itself as one carrier where values are
    not `gaussian`."""
    query: Float[Tensor, "member batch head position head_dim"] | None
    """As the dot product sees it; None where content plays no part."""
    key: Float[Tensor, "member batch head position head_dim"] | None


@dataclass(frozen=True)
class StackLayer:
    """One layer: its weights, its constants and its activations."""

    shape: ReferenceShape
    weights: dict[str, Tensor]
    """Under their short names, [member, ...]."""
    constants: dict[str, Tensor]
    stream: Stream
    """The layer's input."""
    attention: StackAttention
    attention_sum: Stream
    """The stream with the attention branch added, before any norm of it."""
    middle: Stream
    """What the MLP branch starts from."""
    mlp_sum: Stream
    """The stream with the MLP branch added, before any norm of it."""

    def branch_norm(self, name: str) -> Norm | None:
        """The norm that a branch reads through, where there is one."""
        return norm_of(self.shape, self.weights, name) if self.shape.norm == "pre" else None

    def stream_norm(self, name: str) -> Norm | None:
        """The norm of the stream with a branch added, where there is one."""
        return norm_of(self.shape, self.weights, name) if self.shape.norm == "post" else None


@dataclass(frozen=True)
class StackTrace:
    """Stacked members on their inputs."""

    shape: ReferenceShape
    vectors: Stream
    """What enters the networks, before anything is added to it."""
    embedding_norm: Norm | None
    layers: list[StackLayer]
    final_stream: Float[Tensor, "member batch one feature"]
    """The last position's stream above the last layer."""
    final_norm: Norm | None
    state: Float[Tensor, "member batch feature"]
    """The last position's final state, which the readout reads."""
    score_gradient: Float[Tensor, "member batch feature"] | None
    """Gradient of the target's score by the final state; None for the target "jacobian"."""


def norm_of(shape: ReferenceShape, weights: Weights, name: str) -> Norm:
    """A norm of every member as numbers, gains [member, 1, 1, feature]."""
    shift = weights.get(f"{name}_shift")
    return Norm(
        kind="rms" if shape.normalisation == "rms" else "layer",
        gain=weights[f"{name}_gain"][:, None, None],
        bias=None if shift is None else shift[:, None, None],
        epsilon=shape.norm_epsilon,
    )


@torch.no_grad()
def trace_stack(
    shape: ReferenceShape, parameters: Weights, constants: Weights, vectors: Stream, *, target: str = "jacobian"
) -> StackTrace:
    """Run stacked members forward and keep what the pulls need.

    Args:
        shape: Equal for all members.
        parameters: As `draw_parameters` makes them, each with a leading member axis.
        constants: As `constants_of` makes them, likewise.
        vectors: Embedded inputs.
        target: "jacobian", or "probability" or "logprob" of the likeliest output.

    Raises:
        RunError: an output is not finite.
    """
    shape = replace(shape, merges=False)
    stream, layers = entrance(shape, parameters, constants, vectors), []
    for layer in range(shape.depth):
        kept, stream = _layer(shape, of_layer(parameters, layer), of_constants(constants, layer), stream)
        layers.append(kept)
    final = stream[:, :, -1:]
    state = normalise(shape, parameters, "final", final) if shape.norm == "pre" else final
    if not bool(state.isfinite().all()):
        raise RunError("the model's last state is not finite on a prompt; check its weights for overflow")
    return StackTrace(
        shape,
        vectors,
        norm_of(shape, parameters, "embedding") if shape.embedding_norm else None,
        layers,
        final,
        norm_of(shape, parameters, "final") if shape.norm == "pre" else None,
        state[:, :, 0],
        None if target == "jacobian" else _score_gradient(shape, parameters, state, target),
    )


def _layer(
    shape: ReferenceShape, weights: dict[str, Tensor], constants: dict[str, Tensor], stream: Stream
) -> tuple[StackLayer, Stream]:
    seen = entered(shape, weights, "attention", stream)
    found = _attention(shape, weights, constants, seen)
    total = branch(shape, weights, seen, found.weights)
    if shape.residual == "scaled":
        total = scaled(constants["kept"], stream) + scaled(constants["added"], total)
    elif shape.residual == "added":
        total = stream + total
    middle = normalise(shape, weights, "attention", total) if shape.norm == "post" else total
    after = middle
    if shape.mlp_width:
        # The norm after the sum is left to the pull, which needs what it reads.
        after = with_mlp(shape if shape.norm == "pre" else replace(shape, norm="none"), weights, constants, middle)
    mlp_sum = after
    if shape.mlp_width and shape.norm == "post":
        after = normalise(shape, weights, "mlp", after)
    kept = StackLayer(shape, weights, constants, stream, found, total, middle, mlp_sum)
    return kept, after @ weights["rotation"][:, None] if shape.rotate_stream else after


def _attention(
    shape: ReferenceShape, weights: dict[str, Tensor], constants: dict[str, Tensor], seen: Stream
) -> StackAttention:
    maps = attention(shape, weights, constants, seen, rows=None).expand(-1, seen.shape[1], -1, -1, -1)
    if shape.values == "gaussian":
        value = shared(shape, heads_of(seen, weights["value"], weights.get("value_bias")))
    else:
        value = seen[:, :, None]  # before an orthogonal map, which comes after the mean over heads
    if shape.attention != "content":
        return StackAttention(maps, value, None, None)
    query = heads_of(seen, *map_of(shape, weights, "query"))
    key = shared(shape, heads_of(seen, *map_of(shape, weights, "key")))
    if shape.rotary:
        turn = torch.complex(constants["cosine"], constants["sine"])[:, None]
        query, key = turned(query, turn), turned(key, turn)
    return StackAttention(maps, value, query, key)


def _score_gradient(
    shape: ReferenceShape, parameters: Weights, state: Float[Tensor, "member batch one feature"], target: str
) -> Float[Tensor, "member batch feature"]:
    with torch.enable_grad():
        leaf = state.detach().requires_grad_(True)
        best = read_out(shape, parameters, leaf).log_softmax(-1).amax(-1)
        (gradient,) = torch.autograd.grad((best if target == "logprob" else best.exp()).sum(), leaf)
    found: Tensor = gradient[:, :, 0]
    return found


def stack_start(trace: StackTrace, covector: Float[Tensor, "*probe member batch feature"], power: Power) -> Energy:
    """From the last position's final state to the stream above the last layer, zero at every other position."""
    last = norm_pull(trace.final_norm, trace.final_stream, covector[..., None, :], power)
    stream = last.new_zeros(*last.shape[:-2], trace.shape.n_positions, last.shape[-1])
    stream[..., -1:, :] = last
    return stream


def stack_pull_to_input(trace: StackTrace, energy: Energy, walk: Walk) -> Energy:
    """From the stream below the first layer to the vectors entering the network."""
    return norm_pull(trace.embedding_norm, trace.vectors, energy, walk.power, even=walk.even_norms)


@torch.no_grad()
def stack_diagonal(trace: StackTrace, walk: Walk) -> Energies:
    """Square roots of the energies that reach each input position in the diagonal form; not normalised."""
    gradient = torch.ones_like(trace.state) if trace.score_gradient is None else trace.score_gradient
    energy = stack_start(trace, gradient.square(), 2)
    for layer in reversed(trace.layers):
        energy = stack_pull_layer(layer, energy, walk)
        energy = energy / energy.sum((-2, -1), keepdim=True)  # only the shape matters, and depth would overflow
    return stack_pull_to_input(trace, energy, walk).double().sum(-1).sqrt()


def stack_pull_layer(layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through one layer, the stream's own path included."""
    shape, power, even = layer.shape, walk.power, walk.even_norms
    if shape.rotate_stream:
        energy = energy @ back(layer.weights["rotation"], power)
    if shape.mlp_width:
        energy = norm_pull(layer.stream_norm("mlp"), layer.mlp_sum, energy, power, even=even)
        if walk.mlp:
            energy = _meet(layer, "mlp_kept", energy, mlp_pull(layer, energy, walk), walk)
    energy = norm_pull(layer.stream_norm("attention"), layer.attention_sum, energy, power, even=even)
    added = attention_pull(layer, energy, walk)
    if shape.residual == "scaled":
        added = _times(layer.constants["added"], added, power)
    return _meet(layer, "kept", energy, added, walk)


def _meet(layer: StackLayer, kept: str, energy: Energy, added: Energy, walk: Walk) -> Energy:
    """What the stream carries below a branching: its own path, where there is one, and what came by the branch."""
    if layer.shape.residual == "none":
        return walk.add(added)
    identity = energy
    if layer.shape.residual == "scaled":
        identity = _times(layer.constants[kept], energy, walk.power)
    return walk.meet(identity, added)


def _times(factor: Float[Tensor, "member"], energy: Energy, power: Power) -> Energy:
    return factor.pow(power)[:, None, None, None] * energy


def mlp_pull(layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through the MLP branch alone; with random signs one for each batch entry and position.

    Plain: t a with a = act'(up); gated: a = act'(gate) up and b = act(gate), whose square keeps the cross term.
    """
    weights, power, activation = layer.weights, walk.power, ACTIVATIONS[layer.shape.activation]
    inner = entered(layer.shape, weights, "mlp", layer.middle)
    up = linear(inner, weights["up"], weights.get("up_bias"))
    hidden = energy @ back(weights["down"], power)
    if layer.shape.gated_mlp:
        value, slope = value_and_slope(activation, linear(inner, weights["gate"], weights.get("gate_bias")))
        maps = (slope * up, back(weights["gate"], 1)), (value, back(weights["up"], 1))
        pulled = joint_pull(hidden, *maps, power)
    else:
        pulled = (hidden * value_and_slope(activation, up)[1].pow(power)) @ back(weights["up"], power)
    pulled = norm_pull(layer.branch_norm("mlp"), layer.middle, pulled, power, even=walk.even_norms)
    return walk.signed(pulled, (*pulled.shape[:-1], 1))


def attention_pull(layer: StackLayer, energy: Energy, walk: Walk) -> Energy:
    """Pull through the attention branch alone, without the residual's factors.

    r = W_O'(e) by head; values: Z_j = sum_i A_ij^p r_i; keys: g_j = sum_i B_ij q_i^p with
    B_ij = (s A_ij / sqrt(head_dim))^p sum_c r_ic (v_jc - o_ic)^p, s = 1 / heads where heads carry the stream itself.
    """
    shape, found, power = layer.shape, layer.attention, walk.power
    carries_stream = shape.values != "gaussian"
    received = _sent_by_heads(layer, energy, power)
    if walk.even_heads and not carries_stream:
        received = received * _evening(layer)
    first = (found.weights.mean(2, keepdim=True) if carries_stream else found.weights).pow(power)
    values = _gathered(first, received, walk)
    paths = [values[..., 0, :, :] if carries_stream else _projected(values, layer.weights["value"], walk)]
    if found.query is not None and found.key is not None and (walk.key or walk.query):
        share = 1 / (math.sqrt(shape.head_dim) * (shape.heads if carries_stream else 1))
        through = _centred(received, found.value, found.weights @ found.value, power)
        through = through * (share * found.weights).pow(power)
        if walk.key:
            keys = _unturned(layer, _gathered(through, found.query.pow(power), walk), power)
            paths.append(_projected(keys, map_of(shape, layer.weights, "key")[0], walk))
        if walk.query:
            reached = through @ found.key.pow(power)
            reached = walk.signed(reached, (*reached.shape[:-1], 1))
            queries = _unturned(layer, reached, power)
            paths.append(_projected(queries, map_of(shape, layer.weights, "query")[0], walk))
    return norm_pull(layer.branch_norm("attention"), layer.stream, walk.add(*paths), power, even=walk.even_norms)


def _sent_by_heads(layer: StackLayer, energy: Energy, power: Power) -> ByHead:
    """What reaches each head's mixed values from the branch's output; one carrier where heads carry the stream."""
    shape = layer.shape
    if shape.values == "identity":
        return energy[..., None, :, :]
    if shape.values == "orthogonal":
        return (energy @ back(layer.weights["value"], power))[..., None, :, :]
    if shape.output_map:
        return energy[..., None, :, :] @ back(layer.weights["output"], power)
    return energy.reshape(*energy.shape[:-1], shape.heads, -1).transpose(-3, -2)


def _unturned(layer: StackLayer, energy: ByHead, power: Power) -> ByHead:
    """Undo the rotation of neighbouring features: its transpose for power 1, cos^2 and swapped sin^2 for power 2."""
    if not layer.shape.rotary:
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


def _evening(layer: StackLayer) -> Float[Tensor, "member one head one one"]:
    """What gives every head the layer's mean value gain, 1' W_O^2 W_V^2 N_in^2 1 with the norm's gain."""
    shape, value = layer.shape, layer.weights["value"].square()
    if shape.norm == "pre":
        value = value * layer.weights["attention_gain"].square()[:, None, :, None]
    read = value.sum(-2).repeat_interleave(shape.heads // shape.key_value_heads, dim=1)
    sent = layer.weights["output"].square().sum(-1) if shape.output_map else torch.ones_like(read)
    gains = (sent * read).sum(-1)
    even = torch.where(gains > 0, gains.mean(-1, keepdim=True) / gains, torch.ones_like(gains))
    return even[:, None, :, None, None]


@torch.no_grad()
def stack_isotropic(trace: StackTrace, walk: Walk) -> Energies:
    """Square roots of the energies of the isotropic form: one per position, spread evenly over channels.

    A residual scale s counts as s^2.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    energy = torch.zeros_like(trace.vectors[..., 0])
    energy[..., -1] = 1
    for layer in reversed(trace.layers):
        if trace.shape.mlp_width:
            energy = energy * even_gain(layer.stream_norm("mlp"), layer.mlp_sum)
            energy = _own_path(layer, "mlp_kept", energy) + energy * mlp_gain(layer, generator)
        energy = energy * even_gain(layer.stream_norm("attention"), layer.attention_sum)
        added = attention_energy(layer, energy, walk)
        if trace.shape.residual == "scaled":
            added = layer.constants["added"].square()[:, None, None] * added
        energy = _own_path(layer, "kept", energy) + added
        energy = energy / energy.sum(-1, keepdim=True)
    if trace.embedding_norm is not None:
        gain, size = gain_and_power(trace.embedding_norm, trace.vectors, trace.vectors)
        energy = energy * gain.square().mean(-1) / size
    return energy.double().sqrt()


def mlp_gain(layer: StackLayer, generator: torch.Generator) -> Energies:
    """||J_mlp||_F^2 / d at every position, by random signed vector-Jacobian products."""
    middle = layer.middle
    total = torch.zeros_like(middle[..., 0])
    for _ in range(PROBES):
        probe = torch.randn(middle.shape[1:], generator=generator).to(middle).expand_as(middle)
        total = total + mlp_pull(layer, probe, BACK_PROPAGATION).square().sum(-1)
    return total / (PROBES * layer.shape.width)


def attention_energy(layer: StackLayer, energy: Energies, walk: Walk) -> Energies:
    """Energy that the attention branch brings from the positions it reads, to its input stream."""
    shape, found = layer.shape, layer.attention
    gain, size = gain_and_power(layer.branch_norm("attention"), layer.stream, layer.stream)
    gain = gain.expand(len(energy), 1, 1, -1)[:, 0, 0]
    if shape.values == "gaussian":
        transfer = torch.einsum("mbhij,mh->mbij", found.weights.square(), _head_gains(layer, gain))
    else:  # the stream's own vectors, turned at most: heads agree, and the map has gain 1
        transfer = found.weights.mean(2).square() * gain.square().mean(-1)[:, None, None, None]
    pulled = torch.einsum("mbi,mbij->mbj", energy, transfer)
    if walk.key and found.query is not None:
        through = found.weights.square() * energy[:, :, None, :, None] * _distances(layer)
        through = through / (shape.width * shape.head_dim)
        keys = _unturned(layer, through.transpose(-1, -2) @ found.query.square(), 2)
        key = (map_of(shape, layer.weights, "key")[0] * gain[:, None, :, None]).square().sum(-2)
        by_feature = key.repeat_interleave(shape.heads // shape.key_value_heads, dim=1)
        pulled = pulled + (keys * by_feature[:, None, :, None]).sum((2, 4))
    return pulled / size


def _own_path(layer: StackLayer, kept: str, energy: Energies) -> Energies:
    """What stays where it is: the residual's share."""
    if layer.shape.residual == "none":
        return torch.zeros_like(energy)
    return layer.constants[kept].square()[:, None, None] * energy if layer.shape.residual == "scaled" else energy


def _head_gains(layer: StackLayer, gain: Float[Tensor, "member feature"]) -> Float[Tensor, "member head"]:
    """||W_O^h W_V^h diag(w)||_F^2 / d; without output maps ||W_V^h diag(w)||_F^2 / d."""
    shape, value = layer.shape, layer.weights["value"] * gain[:, None, :, None]
    value = value.repeat_interleave(shape.heads // shape.key_value_heads, dim=1)
    whole = value @ layer.weights["output"] if shape.output_map else value
    return whole.square().sum((-2, -1)) / shape.width


def _distances(layer: StackLayer) -> Float[Tensor, "member batch head query key"]:
    """||W_O (v_j - o_i)||^2 of every head, (1 / heads)^2 of it where heads carry the stream itself."""
    shape, value = layer.shape, layer.attention.value
    if shape.values == "gaussian" and shape.output_map:
        value = value @ layer.weights["output"][:, None]
    elif shape.values != "gaussian":
        value = value / shape.heads
    output = layer.attention.weights @ value
    cross = output @ value.transpose(-1, -2)
    distance = value.square().sum(-1)[..., None, :] + output.square().sum(-1)[..., None] - 2 * cross
    return distance.clamp_min(0)
