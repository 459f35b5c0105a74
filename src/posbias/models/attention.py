"""A layer's attention recomputed from what its attention module reads, in blocks of queries.

No matrix larger than heads x block x positions exists at any time, whatever attention implementation the model runs.
`watch_attention` hands every layer's input over as the model's own forward pass reaches it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from posbias.architecture import Mask
from posbias.errors import UsageError
from posbias.models.families.layout import stream_read
from posbias.models.families.parts import AttentionParts, Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model

BLOCK_ELEMENTS = 1 << 20
"""Attention weights held at once on a CPU (4 MB in float32, near its caches): queries times all heads times keys."""
BLOCK_QUERIES = 128
"""Most queries in a block there: shorter blocks skip more of the masked half, longer ones multiply faster."""
FILLING_ELEMENTS = 1 << 24
"""Attention weights of a block that keeps an accelerator busy for longer than its operations take to start."""
MEMORY_SHARE = 1 / 128
"""Largest share of an accelerator's memory for the weights of a block, of which several copies exist."""
BLOCKS = 8
"""Blocks of long prompts on an accelerator, unless memory asks for more: 9/16 of the square are computed, not all."""
Turn = Float[Tensor, "position rotary"] | None
"""RoPE cosines or sines of a layer; None if it has no RoPE."""
_block_elements: ContextVar[int | None] = ContextVar("block_elements", default=None)


@dataclass(frozen=True)
class AttentionState:
    """Queries, keys and values of one layer and prompt, heads grouped by the key head they share."""

    query: Float[Tensor, "key_head group position head_dim"]
    """After q/k norm; as the dot product sees them once `rotated`."""
    key: Float[Tensor, "key_head position head_dim"]
    raw_query: Float[Tensor, "position query_features"]
    """Queries as projected, before q/k norm."""
    raw_key: Float[Tensor, "position key_features"]
    parts: AttentionParts
    read: Float[Tensor, "position feature"]
    """Input of the attention module."""

    def on(self, device: torch.device) -> "AttentionState":
        """The state with queries and keys on a device; values stay with the maps that make them."""
        return replace(self, query=self.query.to(device), key=self.key.to(device))

    @cached_property
    def value(self) -> Float[Tensor, "key_head position value_dim"]:
        """Values, projected when they are first asked for."""
        parts = self.parts
        value = affine(self.read, parts.value, parts.value_bias)
        return value.reshape(len(value), parts.key_heads, parts.value_dim).transpose(0, 1)


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
    """The block's, counted from the input."""
    module: nn.Module
    parts: AttentionParts
    mask: Mask
    """Causal: no query looks ahead."""
    angles: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]] | None
    """Its rotary cosines and sines, from the named arguments of a call; None if nothing is rotated."""


@dataclass(frozen=True)
class AttentionInput:
    """The input of an attention module for one prompt, in the precision that attention is recomputed in."""

    read: Float[Tensor, "position feature"]
    """The stream after the norm before the branch, if the family has one."""
    cosine: Turn
    sine: Turn


def describe_attention(model: Model, *, n_positions: int, of_all: str = "") -> list[AttentionLayer]:
    """Attention of every layer that has any, for prompts of `n_positions` tokens.

    Raises:
        UsageError: the family is not described, its attention cannot be recomputed, its weights cannot be read
            (quantised or offloaded), or a layer is not causal; no layer has attention, or one has none and `of_all`
            names what needs it in all.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be recomputed; a Hugging Face model is needed")
    family, config = model.family, model.config
    reason = family.not_recomputable(config)
    if reason is not None:
        raise UsageError(f"attention of this {model.model_type} model cannot be recomputed: {reason}")
    attending, layers = family.attention_blocks(model.network), []
    without = family.beyond_attention(model.network)
    if not attending or (of_all and without):
        raise UsageError(
            f"{of_all or 'attention'} of this {model.model_type} model: its layers {', '.join(map(str, without))} mix "
            "positions by linear layers, which have no attention matrix, or not at all; allowed are models with "
            + ("attention alone in every layer" if attending else "attention in some layer")
        )
    for index, block in attending:
        mask = family.mask(config, index)
        if mask.mutual_prefix(n_positions) > 1:
            raise UsageError(f"recomputed attention needs causal layers, layer {index} has the mask {mask}")
        layers.append(
            AttentionLayer(
                index=index,
                module=block.attention,
                parts=block.attention_added(family.attention_parts(block, config)),
                mask=mask,
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

    def heads(raw: Float[Tensor, "position features"], norm: Norm | None) -> Float[Tensor, "head position head_dim"]:
        # A q/k norm works on each head, or on all features at once.
        normed = norm_forward(norm, raw.reshape(len(raw), -1, raw.shape[-1] if norm is None else norm.gain.shape[-1]))
        return normed.reshape(len(raw), -1, parts.head_dim).transpose(0, 1)

    query = heads(raw_query, parts.query_norm)
    return AttentionState(
        query=query.reshape(parts.key_heads, -1, *query.shape[1:]),
        key=heads(raw_key, parts.key_norm),
        raw_query=raw_query,
        raw_key=raw_key,
        parts=parts,
        read=read,
    )


def rotated(state: AttentionState, cosine: Turn, sine: Turn) -> AttentionState:
    """Turn queries and keys by position; they stay as they are if the layer has no RoPE."""
    return replace(state, query=rotary_forward(state.query, cosine, sine), key=rotary_forward(state.key, cosine, sine))


def block_ranges(
    heads: int, n_positions: int, *, mask: Mask, device: torch.device, block: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, last queries first, each with the keys that any of them sees; every query comes once.

    Blocks have at most `block` queries, and as many as the device's caches or memory are made for.
    """
    reach = mask.reach(n_positions)
    most, keys = block or n_positions, n_positions
    if reach < n_positions:
        most = min(most, max(reach, BLOCK_QUERIES))  # of longer blocks most keys are hidden
        keys = min(n_positions, most + reach)
    rows = max(1, block_elements(heads, keys, device=device, block=most) // (heads * keys))
    for start in reversed(range(0, n_positions, rows)):
        end = min(start + rows, n_positions)
        yield slice(start, end), slice(max(0, start - reach + 1), end)


def block_elements(heads: int, keys: int, *, device: torch.device, block: int | None = None) -> int:
    """Attention weights of a block of queries that see so many keys on a device; of a single query if no more fit."""
    queries = min(keys, block or keys, BLOCK_QUERIES if device.type == "cpu" else keys)
    elements = elements_at_once(device)
    if device.type != "cpu":
        elements = min(elements, max(FILLING_ELEMENTS, heads * keys * -(-keys // BLOCKS)))
    return max(heads * keys, min(elements, heads * keys * queries))


def elements_at_once(device: torch.device) -> int:
    """Attention weights that may be held at once on a device."""
    chosen = _block_elements.get()
    if chosen is not None:
        return chosen
    if device.type == "cpu":
        return BLOCK_ELEMENTS
    if device.type != "cuda" or not torch.cuda.is_available():
        return FILLING_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return int(memory * MEMORY_SHARE) // torch.float32.itemsize


@contextmanager
def blocks_of(elements: int | None) -> Iterator[None]:
    """Hold that many attention weights at once within the context (None: as suits the device); results are equal."""
    token = _block_elements.set(elements)
    try:
        yield
    finally:
        _block_elements.reset(token)


def query_blocks(
    parts: AttentionParts, state: AttentionState, *, mask: Mask, block: int | None = None
) -> Iterator[AttentionBlock]:
    """A layer's attention weights, a block of queries at a time, as `block_ranges` has them.

    The state is as the dot product sees it. Hidden keys have weight zero.
    """
    n_positions, device = state.key.shape[1], state.key.device
    added = None
    if parts.position_logits is not None:
        added = parts.position_logits(n_positions).to(state.key, non_blocking=True)
    for queries, keys in block_ranges(parts.heads, n_positions, mask=mask, device=device, block=block):
        logits = (state.query[:, :, queries] * parts.scale).flatten(1, 2) @ state.key[:, keys].transpose(1, 2)
        logits = logits.reshape(parts.key_heads, -1, queries.stop - queries.start, keys.stop - keys.start)
        if parts.softcap is not None:
            logits = logits.div_(parts.softcap).tanh_().mul_(parts.softcap)
        if added is not None:
            # Less the last query's own: only differences between keys count, and small numbers keep their digits. A
            # learned sink stands beside every query's own position, so each row is set against its own.
            diagonal = added[:, queries.stop - 1 : queries.stop] if parts.sinks is None else added[:, queries]
            fall = added[:, None, keys] - diagonal[..., None]
            logits += fall.reshape(parts.key_heads, -1, *fall.shape[1:])
        hide(logits, queries, keys, mask=mask, value=-torch.inf)
        if parts.sinks is None:
            yield AttentionBlock(queries, keys, logits.softmax(-1))
            continue
        learned = parts.sinks.to(logits).reshape(parts.key_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        shares = torch.cat([logits, learned], -1).softmax(-1)
        yield AttentionBlock(queries, keys, shares[..., :-1], shares[..., -1])


def hide(
    values: Shaped[Tensor, "*heads query key"],
    queries: slice,
    keys: slice,
    *,
    mask: Mask,
    value: float,
    itself: bool = False,
) -> None:
    """Write `value` in place wherever a query does not see the key, or the key is the query `itself` if that is asked.

    Queries and keys are of `block_ranges`. Only the keys from the first query on, and those that leave a window, are
    touched: all others are seen by all.
    """
    rows, start = queries.stop - queries.start, queries.start - keys.start
    pairs = partial(torch.ones, dtype=torch.bool, device=values.device)
    values[..., start:].masked_fill_(pairs(rows, rows).triu(0 if itself else 1), value)
    reach = mask.reach(queries.stop)
    left = queries.stop - reach - keys.start
    if left > 0:
        values[..., :left].masked_fill_(pairs(rows, left).tril(start - reach), value)


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
