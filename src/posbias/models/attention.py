"""A layer's attention recomputed from what its attention module reads, in blocks of queries.

No matrix larger than heads x block x positions exists at any time, whatever attention implementation the model runs.
`watch_attention` hands every layer's input over as the model's own forward pass reaches it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.families.base import stream_read
from posbias.models.families.parts import AttentionParts, Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model

BLOCK_ELEMENTS = 1 << 20
"""Attention weights held at once (4 MB in float32): a block of queries times all heads times all keys."""
BLOCK_QUERIES = 128
"""Most queries in a block: shorter blocks skip more of the masked half, longer ones multiply faster."""
Turn = Float[Tensor, "position rotary"] | None
"""RoPE cosines or sines of a layer; None if it has no RoPE."""
_block_elements = ContextVar("block_elements", default=BLOCK_ELEMENTS)


@dataclass(frozen=True)
class AttentionState:
    """Queries, keys and values of one layer and prompt, heads grouped by the key head they share."""

    query: Float[Tensor, "key_head group position head_dim"]
    """After q/k norm; as the dot product sees them once `rotated`."""
    key: Float[Tensor, "key_head position head_dim"]
    value: Float[Tensor, "key_head position head_dim"]
    raw_query: Float[Tensor, "position query_features"]
    """Queries as projected and clamped, before q/k norm."""
    raw_key: Float[Tensor, "position key_features"]


@dataclass(frozen=True)
class AttentionBlock:
    """Attention weights of a run of queries over the keys they may see."""

    queries: slice
    keys: slice
    weights: Float[Tensor, "key_head group query key"]
    """Rows sum to 1, or to what a learned sink leaves."""
    sink: Float[Tensor, "key_head group query"] | None = None
    """Share of every row that a learned sink takes; None if there is no sink."""

    def among_keys(self) -> Float[Tensor, "key_head group query key"]:
        """The weights with every row summing to 1: how a query shares out what a learned sink leaves."""
        if self.sink is None:
            return self.weights
        return self.weights / self.weights.sum(-1, keepdim=True).clamp_min(torch.finfo(self.weights.dtype).tiny)


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention: where it is and what it does."""

    index: int
    module: nn.Module
    parts: AttentionParts
    reach: int | None
    """Keys a query sees, its own included; None if it sees everything before it."""
    angles: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]] | None
    """Its rotary cosines and sines, from the named arguments of a call; None if nothing is rotated."""


@dataclass(frozen=True)
class AttentionInput:
    """The input of an attention module for one prompt, in the precision that attention is recomputed in."""

    read: Float[Tensor, "position feature"]
    """The stream after the norm before the branch, if the family has one."""
    cosine: Turn
    sine: Turn


def describe_attention(model: Model, *, n_positions: int) -> list[AttentionLayer]:
    """Every layer's attention, for prompts of `n_positions` tokens.

    Raises:
        UsageError: the family is not described, its attention cannot be recomputed, its weights cannot be read
            (quantised or offloaded), or a layer is not causal.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be recomputed; a Hugging Face model is needed")
    family, config = model.family, model.config
    reason = family.not_recomputable(config)
    if reason is not None:
        raise UsageError(f"attention of this {model.model_type} model cannot be recomputed: {reason}")
    layers = []
    for index, block in enumerate(family.blocks(model.network)):
        mask = family.mask(config, index)
        if mask.mutual_prefix(n_positions) > 1:
            raise UsageError(f"recomputed attention needs causal layers, layer {index} has the mask {mask}")
        reach = mask.reach(n_positions)
        layers.append(
            AttentionLayer(
                index=index,
                module=block.attention,
                parts=block.attention_added(family.attention_parts(block, config)),
                reach=None if reach >= n_positions else reach,
                angles=partial(family.angles, block.attention) if family.rotates(block.attention, config) else None,
            )
        )
    return layers


@contextmanager
def watch_attention(
    layers: Sequence[AttentionLayer], receive: Callable[[AttentionLayer, AttentionInput], None], *, dtype: torch.dtype
) -> Iterator[None]:
    """Within the context, call `receive` with every layer's input, in `dtype`, as the model runs on a single prompt.

    It is called once per layer and forward pass, in the order of the layers, and may keep nothing.
    """

    def hook_of(layer: AttentionLayer) -> Callable[..., None]:
        def hook(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            read = stream_read(positional, named)
            cosine = sine = None
            if layer.angles is not None:
                cosine, sine = (part.detach().to(dtype) for part in layer.angles(named))
            receive(layer, AttentionInput(read[0].detach().to(dtype), cosine, sine))

        return hook

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.module.register_forward_pre_hook(hook_of(layer), with_kwargs=True).remove)
        yield


def project_attention(parts: AttentionParts, read: Float[Tensor, "position feature"]) -> AttentionState:
    """Queries, keys and values of a layer before any rotation, from what its attention module reads."""
    raw_query = affine(read, parts.query, parts.query_bias)
    raw_key = affine(read, parts.key, parts.key_bias)
    value = affine(read, parts.value, parts.value_bias)
    if parts.clip is not None:
        raw_query, raw_key, value = (raw.clamp(-parts.clip, parts.clip) for raw in (raw_query, raw_key, value))

    def heads(raw: Float[Tensor, "position features"], norm: Norm | None) -> Float[Tensor, "head position head_dim"]:
        # A q/k norm works on each head, or on all features at once.
        normed = norm_forward(norm, raw.reshape(len(raw), -1, raw.shape[-1] if norm is None else norm.gain.shape[-1]))
        return normed.reshape(len(raw), -1, parts.head_dim).transpose(0, 1)

    query = heads(raw_query, parts.query_norm)
    return AttentionState(
        query=query.reshape(parts.key_heads, -1, *query.shape[1:]),
        key=heads(raw_key, parts.key_norm),
        value=value.reshape(len(value), parts.key_heads, parts.head_dim).transpose(0, 1),
        raw_query=raw_query,
        raw_key=raw_key,
    )


def rotated(state: AttentionState, cosine: Turn, sine: Turn) -> AttentionState:
    """Turn queries and keys by position; they stay as they are if the layer has no RoPE."""
    return replace(state, query=rotary_forward(state.query, cosine, sine), key=rotary_forward(state.key, cosine, sine))


def rows_at_once(heads: int, n_positions: int, block: int) -> int:
    """Most queries, at least one and at most `block`, whose logits may exist together: `elements_at_once` of them."""
    return max(1, min(block, elements_at_once() // (heads * n_positions)))


def elements_at_once() -> int:
    """Attention weights that may be held at once."""
    return _block_elements.get()


@contextmanager
def blocks_of(elements: int) -> Iterator[None]:
    """Within the context that many attention weights are held at once in place of BLOCK_ELEMENTS; results are equal."""
    token = _block_elements.set(elements)
    try:
        yield
    finally:
        _block_elements.reset(token)


def query_blocks(
    parts: AttentionParts, state: AttentionState, *, reach: int | None, block: int = BLOCK_QUERIES
) -> Iterator[AttentionBlock]:
    """A layer's attention weights, a block of queries at a time, last queries first; every query comes once.

    The state is as the dot product sees it. A query sees `reach` keys, its own included (None: all before it); others
    have weight zero. A block has at most `block` queries, >= 1; of long prompts fewer, see BLOCK_ELEMENTS.
    """
    n_positions = state.key.shape[1]
    rows = rows_at_once(parts.heads, n_positions, block)
    position = torch.arange(n_positions, device=state.key.device)
    added = None if parts.position_logits is None else parts.position_logits(n_positions).to(state.key)
    for start in reversed(range(0, n_positions, rows)):
        stop = min(start + rows, n_positions)
        first = 0 if reach is None else max(0, start - reach + 1)
        query, key = position[start:stop, None], position[None, first:stop]
        hidden = key > query
        if reach is not None:
            hidden |= key <= query - reach
        logits = (state.query[:, :, start:stop] * parts.scale).flatten(1, 2) @ state.key[:, first:stop].transpose(1, 2)
        logits = logits.reshape(parts.key_heads, -1, stop - start, stop - first)
        if parts.softcap is not None:
            logits = parts.softcap * (logits / parts.softcap).tanh()
        if added is not None:
            # Less the last query's own: only differences between keys count, and small numbers keep their digits. A
            # learned sink stands beside every query's own position, so each row is set against its own.
            diagonal = added[:, stop - 1 : stop] if parts.sinks is None else added[:, start:stop]
            fall = added[:, None, first:stop] - diagonal[..., None]
            logits += fall.reshape(parts.key_heads, -1, diagonal.shape[1], stop - first)
        logits = logits.masked_fill_(hidden, -torch.inf)
        if parts.sinks is None:
            yield AttentionBlock(slice(start, stop), slice(first, stop), logits.softmax(-1))
            continue
        learned = parts.sinks.to(logits).reshape(parts.key_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        shares = torch.cat([logits, learned], -1).softmax(-1)
        yield AttentionBlock(slice(start, stop), slice(first, stop), shares[..., :-1], shares[..., -1])


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


def rotary_forward(
    values: Float[Tensor, "*heads position feature"],
    cosine: Float[Tensor, "*angles position rotary"] | None,
    sine: Float[Tensor, "*angles position rotary"] | None,
) -> Float[Tensor, "*heads position feature"]:
    """Rotate the first `rotary` features by position, half against half."""
    if cosine is None or sine is None:
        return values
    rotary = cosine.shape[-1]
    turned, unturned = values[..., :rotary], values[..., rotary:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cosine + torch.cat([-second, first], -1) * sine, unturned], -1)
