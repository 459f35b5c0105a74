"""The isotropic power rollout: one energy per position, spread evenly over the residual channels before every branch.

E_j <- E_j (1 + mu_l(j)), then E_j <- E_j + sum_h g_lh^2 sum_i E_i A_lh[i,j]^2 / sigma_l(j)^2, with g_lh^2 =
||W_O^h W_V^h diag(w)||_F^2 / d and mu = ||J_mlp||_F^2 / d by random probes (docs/theory, section 5). It ignores which
channels carry the energy and so fails where norm weights are very uneven (Gemma). A LayerNorm's removal of the mean
(1/d of the energy) and MPT's clamps are left out.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import AttentionBlock, AttentionState
from posbias.models.families import Norm
from posbias.theory.power_rollout.attention import (
    attention_blocks,
    recompute_attention,
    softcap_slope,
    unprepare,
)
from posbias.theory.power_rollout.description import Description, LayerDescription
from posbias.theory.power_rollout.local_maps import mlp_pull
from posbias.theory.power_rollout.trace import LayerTrace, Trace
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Walk

PROBES = 2
"""Random vectors per layer for ||J_mlp||_F^2: with hundreds of channels two already give it to a few percent."""
PROBE_SEED = 0
"""The probes are part of the method, not of the data: fixed, so that a prompt always gives the same profile."""


@torch.no_grad()
def isotropic_influence(description: Description, trace: Trace, walk: Walk) -> Float[Tensor, "position"]:
    """Square roots of the energies that reach each input position; not normalised."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    stream = trace.layers[0].stream
    energy = torch.zeros(len(stream), dtype=stream.dtype, device=stream.device)
    energy[-1] = 1
    for layer, kept in zip(reversed(description.layers), reversed(trace.layers), strict=True):
        energy = energy * _norm_gain(layer.mlp_stream_norm, kept.mlp_sum)
        inner = energy * (1 + mlp_gain(layer, kept, generator))
        if layer.parallel:
            energy = inner + attention_energy(layer, kept, energy, walk)
        else:
            inner = inner * _norm_gain(layer.attention_stream_norm, kept.attention_sum)
            energy = inner + attention_energy(layer, kept, inner, walk)
        energy = energy / energy.sum()
    return (energy * _norm_gain(description.embedding_norm, trace.embeddings)).double().sqrt()


def mlp_gain(layer: LayerDescription, trace: LayerTrace, generator: torch.Generator) -> Float[Tensor, "position"]:
    """||J_mlp||_F^2 / d at every position, by random signed vector-Jacobian products."""
    stream = trace.middle
    total = torch.zeros_like(stream[:, 0])
    for _ in range(PROBES):
        probe = torch.randn(stream.shape, generator=generator, dtype=torch.float32).to(stream)
        total += mlp_pull(layer, trace, probe, BACK_PROPAGATION).square().sum(-1)
    return total / (PROBES * stream.shape[1])


def attention_energy(
    layer: LayerDescription, trace: LayerTrace, energy: Float[Tensor, "position"], walk: Walk
) -> Float[Tensor, "position"]:
    """Energy that the attention branch brings from the positions it reads, to its input stream."""
    parts, width = layer.attention.parts, trace.stream.shape[1]
    state = recompute_attention(layer, trace)
    post_gain, post_size = _gain_and_power(layer.attention_post_norm, trace.attention_branch, trace.stream)
    gain, size = _gain_and_power(layer.attention_norm, trace.stream, trace.stream)
    output = parts.output.to(energy.dtype) * post_gain[:, None]
    by_head = output.reshape(width, parts.key_heads, -1, parts.head_dim)
    gram = torch.einsum("wkgc,wkgd->kgcd", by_head, by_head)
    value = (parts.value.to(energy.dtype) * gain).reshape(parts.key_heads, parts.head_dim, width)
    head_gain = torch.einsum("kgcd,kcd->kg", gram, value @ value.transpose(1, 2)) / width

    sent = energy / post_size
    pulled = torch.zeros_like(energy)
    keys = torch.zeros_like(state.key)
    for block in attention_blocks(layer, state):
        received = block.weights.square() * sent[block.queries, None]
        pulled[block.keys] += torch.einsum("kgij,kg->j", received, head_gain)
        if walk.key:
            slope = softcap_slope(layer, state, block)
            if slope is not None:
                received = received * slope.square().reshape(received.shape)
            keys[:, block.keys] += _key_energy(block, state, gram / width, received) * parts.scale**2
    if walk.key:
        raw = unprepare(keys, state.raw_key, parts.key_norm, trace, 2)
        by_feature = (parts.key.to(energy.dtype) * gain).square().sum(-1).reshape(parts.key_heads, 1, parts.head_dim)
        pulled += (raw * by_feature).sum((0, 2))
    return pulled / size


def _key_energy(
    block: AttentionBlock,
    state: AttentionState,
    gram: Float[Tensor, "key_head group head_dim head_dim"],
    received: Float[Tensor, "key_head group query key"],
) -> Float[Tensor, "key_head key head_dim"]:
    """sum_i E_i A_ij^2 ||W_O (v_j - o_i)||^2 q_i^2 / d over the block's queries and a key head's group."""
    value = state.value[:, block.keys].unsqueeze(1)
    output = block.weights @ value
    value_side, output_side = value @ gram, output @ gram
    distance = (value_side * value).sum(-1)[:, :, None, :] + (output_side * output).sum(-1)[..., None]
    distance = distance - 2 * output_side @ value.transpose(2, 3)
    through = received * distance.clamp_min(0)
    query = state.query[:, :, block.queries].square()
    return torch.einsum("kgij,kgic->kjc", through, query)


def _gain_and_power(
    norm: Norm | None, values: Float[Tensor, "position feature"] | None, like: Float[Tensor, "position feature"]
) -> tuple[Float[Tensor, "feature"], Float[Tensor, "position"]]:
    """A norm's gain and the power it divides by; ones where there is no norm."""
    if norm is None or values is None:
        return torch.ones_like(like[0]), torch.ones_like(like[:, 0])
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    return norm.gain.to(like.dtype), values.square().mean(-1) + norm.epsilon


def _norm_gain(
    norm: Norm | None, values: Float[Tensor, "position feature"] | None
) -> Float[Tensor, "position"] | float:
    """What a norm of the whole stream does to an energy spread evenly over its channels: mean w^2 / sigma^2."""
    if norm is None or values is None:
        return 1.0
    gain, size = _gain_and_power(norm, values, values)
    return gain.square().mean() / size
