"""The isotropic power rollout of stacked reference transformers: one energy per position, spread evenly over channels.

As isotropic.py, on dense attention and with a member axis; a residual scale s counts as s^2 (docs/theory, section 5).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.reference import ReferenceShape
from posbias.models.reference.attention import map_of
from posbias.theory.power_rollout.isotropic import PROBE_SEED, PROBES
from posbias.theory.power_rollout.reference_layers import StackLayer, StackTrace, norm_of
from posbias.theory.power_rollout.reference_pull import mlp_pull, unturned
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Walk

Energies = Float[Tensor, "member batch position"]


@torch.no_grad()
def stack_isotropic(trace: StackTrace, walk: Walk) -> Float[Tensor, "member batch position"]:
    """Square roots of the energies that reach each input position; not normalised."""
    shape, generator = trace.shape, torch.Generator().manual_seed(PROBE_SEED)
    energy = torch.zeros_like(trace.vectors[..., 0])
    energy[..., -1] = 1
    for layer in reversed(trace.layers):
        if shape.mlp_width:
            energy = energy * _stream_norm_gain(shape, layer, "mlp", layer.mlp_sum)
            own = _own_path(shape, layer.constants["mlp_kept"], energy)
            energy = own + energy * mlp_gain(shape, layer, generator)
        energy = energy * _stream_norm_gain(shape, layer, "attention", layer.attention_sum)
        added = attention_energy(shape, layer, energy, walk)
        if shape.residual == "scaled":
            added = layer.constants["added"].square()[:, None, None] * added
        energy = _own_path(shape, layer.constants["kept"], energy) + added
        energy = energy / energy.sum(-1, keepdim=True)
    if shape.embedding_norm:
        gain, size = gain_and_power(shape, trace.parameters, "embedding", trace.vectors)
        energy = energy * gain.square().mean(-1)[:, None, None] / size
    return energy.double().sqrt()


def mlp_gain(shape: ReferenceShape, layer: StackLayer, generator: torch.Generator) -> Energies:
    """||J_mlp||_F^2 / d at every position, by random signed vector-Jacobian products."""
    middle = layer.middle
    total = torch.zeros_like(middle[..., 0])
    for _ in range(PROBES):
        probe = torch.randn(middle.shape[1:], generator=generator).to(middle).expand_as(middle)
        total = total + mlp_pull(shape, layer, probe, BACK_PROPAGATION).square().sum(-1)
    return total / (PROBES * shape.width)


def attention_energy(shape: ReferenceShape, layer: StackLayer, energy: Energies, walk: Walk) -> Energies:
    """Energy that the attention branch brings from the positions it reads, to its input stream."""
    found = layer.attention
    gain, size = _branch_norm(shape, layer)
    if shape.values == "gaussian":
        transfer = torch.einsum("mbhij,mh->mbij", found.weights.square(), _head_gains(shape, layer, gain))
    else:  # the stream's own vectors, turned at most: heads agree, and the map has gain 1
        transfer = found.weights.mean(2).square() * gain.square().mean(-1)[:, None, None, None]
    pulled = torch.einsum("mbi,mbij->mbj", energy, transfer)
    if walk.key and found.query is not None:
        through = found.weights.square() * energy[:, :, None, :, None] * _distances(shape, layer)
        through = through / (shape.width * shape.head_dim)
        keys = unturned(shape, layer, through.transpose(-1, -2) @ found.query.square(), 2)
        key = (map_of(shape, layer.weights, "key")[0] * gain[:, None, :, None]).square().sum(-2)
        by_feature = key.repeat_interleave(shape.heads // shape.key_value_heads, dim=1)
        pulled = pulled + (keys * by_feature[:, None, :, None]).sum((2, 4))
    return pulled / size


def gain_and_power(
    shape: ReferenceShape,
    weights: dict[str, Tensor],
    name: str,
    values: Float[Tensor, "member batch position feature"],
) -> tuple[Float[Tensor, "member feature"], Energies]:
    """A norm's gain and the power it divides by."""
    norm = norm_of(shape, weights, name)
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    return norm.gain[:, 0, 0], values.square().mean(-1) + norm.epsilon


def _branch_norm(shape: ReferenceShape, layer: StackLayer) -> tuple[Float[Tensor, "member feature"], Energies]:
    """Of the norm that the attention branch reads through; ones without one."""
    if shape.norm == "pre":
        return gain_and_power(shape, layer.weights, "attention", layer.stream)
    return torch.ones_like(layer.stream[:, 0, 0]), torch.ones_like(layer.stream[..., 0])


def _stream_norm_gain(
    shape: ReferenceShape, layer: StackLayer, name: str, values: Float[Tensor, "member batch position feature"]
) -> Energies | float:
    """What a norm of the whole stream does to an energy spread evenly over its channels: mean w^2 / sigma^2."""
    if shape.norm != "post":
        return 1.0
    gain, size = gain_and_power(shape, layer.weights, name, values)
    return gain.square().mean(-1)[:, None, None] / size


def _own_path(shape: ReferenceShape, kept: Float[Tensor, "member"], energy: Energies) -> Energies:
    """What stays where it is: the residual's share."""
    if shape.residual == "none":
        return torch.zeros_like(energy)
    return kept.square()[:, None, None] * energy if shape.residual == "scaled" else energy


def _head_gains(
    shape: ReferenceShape, layer: StackLayer, gain: Float[Tensor, "member feature"]
) -> Float[Tensor, "member head"]:
    """||W_O^h W_V^h diag(w)||_F^2 / d; without output maps ||W_V^h diag(w)||_F^2 / d."""
    value = (layer.weights["value"] * gain[:, None, :, None]).repeat_interleave(
        shape.heads // shape.key_value_heads, dim=1
    )
    whole = value @ layer.weights["output"] if shape.output_map else value
    return whole.square().sum((-2, -1)) / shape.width


def _distances(shape: ReferenceShape, layer: StackLayer) -> Float[Tensor, "member batch head query key"]:
    """||W_O (v_j - o_i)||^2 of every head, (1 / heads)^2 of it where heads carry the stream itself."""
    found = layer.attention
    value = found.value
    if shape.values == "gaussian" and shape.output_map:
        value = value @ layer.weights["output"][:, None]
    elif shape.values != "gaussian":
        value = value / shape.heads
    output = found.weights @ value
    cross = output @ value.transpose(-1, -2)
    distance = value.square().sum(-1)[..., None, :] + output.square().sum(-1)[..., None] - 2 * cross
    return distance.clamp_min(0)
