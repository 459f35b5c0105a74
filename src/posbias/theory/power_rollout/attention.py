"""One layer's attention, recomputed from its input in blocks of queries, and the pulls that go through it.

No matrix larger than heads x block x positions exists at any time. Besides the value path, attention is reached through
the softmax: moving a key moves the weights of every query that sees it (docs/theory, section 5, "key path").
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.families.base import Norm
from posbias.theory.power_rollout.description import LayerDescription
from posbias.theory.power_rollout.local_maps import Power, affine, norm_forward, norm_pull, rotary_forward, rotary_pull
from posbias.theory.power_rollout.trace import LayerTrace

BLOCK_ELEMENTS = 1 << 20
"""Attention weights held at once (4 MB in float32): a block of queries times all heads times all keys."""
BLOCK_QUERIES = 128
"""Most queries in a block: shorter blocks skip more of the masked half, longer ones multiply faster."""


@dataclass(frozen=True)
class AttentionState:
    """Queries, keys and values of one layer and prompt, heads grouped by the key head they share."""

    query: Float[Tensor, "key_head group position head_dim"]
    """As the dot product sees them: after q/k norm and RoPE."""
    key: Float[Tensor, "key_head position head_dim"]
    value: Float[Tensor, "key_head position head_dim"]
    raw_query: Float[Tensor, "position query_features"]
    """As projected, before q/k norm."""
    raw_key: Float[Tensor, "position key_features"]


@dataclass(frozen=True)
class AttentionBlock:
    """Attention weights of a run of queries over the keys they may see."""

    queries: slice
    keys: slice
    weights: Float[Tensor, "key_head group query key"]
    """Rows sum to 1."""


def recompute_attention(layer: LayerDescription, trace: LayerTrace) -> AttentionState:
    """Queries, keys and values of a layer, from its kept input."""
    parts = layer.attention
    read = norm_forward(layer.attention_norm, trace.stream)
    raw_query = affine(read, parts.query, parts.query_bias)
    raw_key = affine(read, parts.key, parts.key_bias)
    value = affine(read, parts.value, parts.value_bias)

    def prepared(raw: Float[Tensor, "position features"], norm: Norm | None) -> Float[Tensor, "head position head_dim"]:
        normed = _grouped(norm, raw)
        heads = norm_forward(norm, normed).reshape(len(raw), -1, parts.head_dim).transpose(0, 1)
        return rotary_forward(heads, trace.cosine, trace.sine)

    query = prepared(raw_query, parts.query_norm)
    return AttentionState(
        query=query.reshape(parts.key_heads, -1, *query.shape[1:]),
        key=prepared(raw_key, parts.key_norm),
        value=value.reshape(len(value), parts.key_heads, parts.head_dim).transpose(0, 1),
        raw_query=raw_query,
        raw_key=raw_key,
    )


def attention_blocks(layer: LayerDescription, state: AttentionState) -> Iterator[AttentionBlock]:
    """The layer's attention weights, a block of queries at a time, last queries first.

    Args:
        layer: Scale and window of the layer.
        state: Its queries and keys.

    Yields:
        Blocks that cover every query once; keys outside a block's range have weight zero for all its queries.
    """
    parts = layer.attention
    n_positions = state.key.shape[1]
    rows = max(1, min(BLOCK_QUERIES, BLOCK_ELEMENTS // (parts.heads * n_positions)))
    position = torch.arange(n_positions, device=state.key.device)
    for start in reversed(range(0, n_positions, rows)):
        stop = min(start + rows, n_positions)
        first = 0 if layer.reach is None else max(0, start - layer.reach + 1)
        query, key = position[start:stop, None], position[None, first:stop]
        hidden = key > query
        if layer.reach is not None:
            hidden |= key <= query - layer.reach
        logits = _by_group(state.query[:, :, start:stop] * parts.scale) @ state.key[:, first:stop].transpose(1, 2)
        logits = logits.reshape(parts.key_heads, -1, stop - start, stop - first)
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        yield AttentionBlock(slice(start, stop), slice(first, stop), weights)


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
    return norm_pull(norm, _grouped(norm, raw), _grouped(norm, unrotated), power).reshape(raw.shape)


def _grouped(norm: Norm | None, values: Float[Tensor, "position features"]) -> Float[Tensor, "position group feature"]:
    """Split features into the groups a q/k norm works on: heads, or all of them at once."""
    size = values.shape[-1] if norm is None else norm.gain.numel()
    return values.reshape(len(values), -1, size)


def _by_group(values: Float[Tensor, "key_head group row last"]) -> Float[Tensor, "key_head rows last"]:
    """Stack the queries of all heads that share a key head: one product serves them."""
    return values.flatten(1, 2)


def _merged(values: Float[Tensor, "head position head_dim"]) -> Float[Tensor, "position features"]:
    """Heads side by side, as the projections see them."""
    return values.transpose(0, 1).flatten(1)
