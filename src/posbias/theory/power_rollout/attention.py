"""One layer's attention, recomputed from its kept input in blocks of queries, and the pulls that go through it.

No matrix larger than heads x block x positions exists at any time. Besides the value path, attention is reached through
the softmax: moving a key moves the weights of every query that sees it (docs/theory, section 5, "key path").
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import (
    BLOCK_QUERIES,
    AttentionBlock,
    AttentionState,
    by_norm_group,
    norm_forward,
    project_attention,
    query_blocks,
    rotated,
)
from posbias.models.families.base import Norm
from posbias.theory.power_rollout.description import LayerDescription
from posbias.theory.power_rollout.local_maps import Power, norm_pull, rotary_pull
from posbias.theory.power_rollout.trace import LayerTrace


def recompute_attention(layer: LayerDescription, trace: LayerTrace) -> AttentionState:
    """Queries, keys and values of a layer as the dot product sees them, from its kept input."""
    read = norm_forward(layer.attention_norm, trace.stream)
    return rotated(project_attention(layer.attention, read), trace.cosine, trace.sine)


def attention_blocks(layer: LayerDescription, state: AttentionState) -> Iterator[AttentionBlock]:
    """The layer's attention weights, a block of queries at a time, last queries first."""
    return query_blocks(layer.attention, state, reach=layer.reach, block=BLOCK_QUERIES)


@dataclass(frozen=True)
class Paths:
    """Which ways through attention a pull follows."""

    key: bool = True
    query: bool = False


def attention_pull(
    layer: LayerDescription,
    trace: LayerTrace,
    energy: Float[Tensor, "position feature"],
    power: Power,
    paths: Paths,
) -> Float[Tensor, "position feature"]:
    """Pull through one attention branch alone (the stream's own identity path is the caller's).

    r = N_post(e) W_O^p by head; values: Z_j = sum_i A_ij^p r_i; keys: g_j = sum_i B_ij q_i^p with
    B_ij = (scale A_ij)^p sum_c r_ic (v_jc - o_ic)^p, rotation and q/k norm undone; then N_in(Z W_V^p + g W_K^p).

    Args:
        layer: The block's maps.
        trace: The block's activations.
        energy: At the branch's output, where it is added to the stream.
        power: 1 signed, 2 energies.
        paths: Which score paths to follow beside the values.

    Returns:
        At the branch's input, the block's input stream.
    """
    parts = layer.attention
    state = recompute_attention(layer, trace)
    if trace.attention_branch is not None:
        energy = norm_pull(layer.attention_post_norm, trace.attention_branch, energy, power)
    received = energy @ parts.output.to(energy.dtype).pow(power)
    by_head = received.reshape(len(energy), parts.key_heads, -1, parts.head_dim).permute(1, 2, 0, 3)
    values, keys, queries = _pull_blocks(layer, state, by_head, power, paths)

    pulled = _merged(values) @ parts.value.to(energy.dtype).pow(power)
    if paths.key:
        raw = score_energy_to_raw_keys(layer, trace, state, keys, power)
        pulled = pulled + raw @ parts.key.to(energy.dtype).pow(power)
    if paths.query:
        raw = _unprepare(queries.flatten(0, 1), state.raw_query, parts.query_norm, trace, power)
        pulled = pulled + raw @ parts.query.to(energy.dtype).pow(power)
    return norm_pull(layer.attention_norm, trace.stream, pulled, power)


def _pull_blocks(
    layer: LayerDescription,
    state: AttentionState,
    received: Float[Tensor, "key_head group position head_dim"],
    power: Power,
    paths: Paths,
) -> tuple[
    Float[Tensor, "key_head position head_dim"],
    Float[Tensor, "key_head position head_dim"],
    Float[Tensor, "key_head group position head_dim"],
]:
    """What reaches values, keys and queries (as the dot product sees them), summed over blocks of queries."""
    values, keys = torch.zeros_like(state.value), torch.zeros_like(state.key)
    queries = torch.zeros_like(state.query)
    for block in attention_blocks(layer, state):
        weights = _by_group(block.weights.pow(power) if power == 2 else block.weights)
        rows = _by_group(received[:, :, block.queries])
        values[:, block.keys] += weights.transpose(1, 2) @ rows
        if not (paths.key or paths.query):
            continue
        value = state.value[:, block.keys]
        output = _by_group(block.weights) @ value
        through = weights * _centred(rows, value, output, power) * layer.attention.scale**power
        if paths.key:
            query = _by_group(state.query[:, :, block.queries])
            keys[:, block.keys] += through.transpose(1, 2) @ query.pow(power)
        if paths.query:
            reached = through @ state.key[:, block.keys].pow(power)
            queries[:, :, block.queries] = reached.reshape(queries[:, :, block.queries].shape)
    return values, keys, queries


def _centred(
    received: Float[Tensor, "key_head row head_dim"],
    value: Float[Tensor, "key_head key head_dim"],
    output: Float[Tensor, "key_head row head_dim"],
    power: Power,
) -> Float[Tensor, "key_head row key"]:
    """sum_c r_ic (v_jc - o_ic)^power, without forming the differences."""
    if power == 1:
        return received @ value.transpose(1, 2) - (received * output).sum(-1, keepdim=True)
    weighted = received * output
    left, right = torch.cat([received, -2 * weighted], -1), torch.cat([value.square(), value], -1)
    own = (weighted * output).sum(-1, keepdim=True)
    return (left @ right.transpose(1, 2) + own).clamp_min_(0)  # a sum of squares, below 0 only by round-off


def score_energy_to_raw_keys(
    layer: LayerDescription,
    trace: LayerTrace,
    state: AttentionState,
    keys: Float[Tensor, "key_head position head_dim"],
    power: Power = 2,
) -> Float[Tensor, "position key_features"]:
    """From keys as the dot product sees them to what the key projection gave: RoPE and key norm undone."""
    return _unprepare(keys, state.raw_key, layer.attention.key_norm, trace, power)


def _unprepare(
    energy: Float[Tensor, "head position head_dim"],
    raw: Float[Tensor, "position features"],
    norm: Norm | None,
    trace: LayerTrace,
    power: Power,
) -> Float[Tensor, "position features"]:
    """Undo RoPE and q/k norm: from what the dot product sees to what the projection gave."""
    unrotated = _merged(rotary_pull(energy, trace.cosine, trace.sine, power))
    return norm_pull(norm, by_norm_group(norm, raw), by_norm_group(norm, unrotated), power).reshape(raw.shape)


def _by_group(values: Float[Tensor, "key_head group row last"]) -> Float[Tensor, "key_head rows last"]:
    """Stack the queries of all heads that share a key head: one product serves them."""
    return values.flatten(1, 2)


def _merged(values: Float[Tensor, "head position head_dim"]) -> Float[Tensor, "position features"]:
    """Heads side by side, as the projections see them."""
    return values.transpose(0, 1).flatten(1)
