"""Attention weights of one layer and prompt from what its kernel gets, in blocks of queries.

No matrix larger than heads x block x positions exists at any time, unless the family's own eager attention makes one.
Every query sees a run of keys that ends at its own: causal layers, with a window, within chunks, or without the first.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from posbias.errors import UsageError
from posbias.memory import check_room
from posbias.models.attention import (
    Arguments,
    EnoughError,
    KernelCall,
    asks_interface,
    attention_modules,
    stream_read,
    unturned,
    watch_attention,
)
from posbias.models.hugging_face import HuggingFaceModel

BLOCK_ELEMENTS = 1 << 20
"""Attention weights held at once on a CPU (4 MB in float32, near its caches): queries times all heads times keys."""
BLOCK_QUERIES = 128
"""Most queries in a block on a CPU: shorter blocks skip more of the masked half, longer ones multiply faster."""
ACCELERATOR_ELEMENTS = 1 << 26
"""The same on an accelerator (256 MB, of which several copies exist), which is busy for longer than operations take to
start."""
BLOCKS = 8
"""Blocks of long prompts on an accelerator, unless memory asks for more: 9/16 of the square are computed, not all."""
EAGER_COPIES = 4
"""Matrices of all heads that eager attention holds at once: products, with biases, with the mask, and weights."""
HIDDEN_SCORE = torch.finfo(torch.float16).min
"""Number that hides a key from the network: every floating type holds it, and no logit outweighs it."""
VANISHING = 1e-30
"""In place of a scale of 0, which torch's fused attention turns into NaN; e^logit is 1 to every digit."""
KNOWN_ATTENTION = ("eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
"""transformers' own attention implementations; one registered by someone else may compute anything."""


@dataclass(frozen=True)
class AttentionState:
    """Attention of one layer to one prompt before its softmax, heads grouped by the key head that they share."""

    query: Float[Tensor, "key_head group position head_dim"]
    """As the dot product sees them."""
    key: Float[Tensor, "key_head position head_dim"]
    value: Float[Tensor, "key_head position value_dim"]
    scale: float
    """Factor on q.k before the softmax."""
    first: Int[Tensor, "position"]
    """The oldest key that each query sees; on the CPU, so that no block waits for an accelerator."""
    softcap: float | None = None
    sinks: Float[Tensor, "head"] | None = None
    """Logit of every head's place in the softmax that is no position; None if there are none."""
    added: Float[Tensor, "_ position position"] | None = None
    """What masks add to logits that are seen, for all heads or each."""
    logits: Float[Tensor, "head position position"] | None = None
    """All logits with masks, of a family whose attention is eager; None if they are formed in blocks."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def reach(self) -> int:
        """Most keys that a query sees, its own included."""
        return int((np.arange(len(self.first)) - self.first.numpy()).max()) + 1

    def on(self, device: torch.device) -> "AttentionState":
        """The state on a device."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        moved["first"] = self.first
        return replace(self, **moved)


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


def _seen(call: KernelCall, n_positions: int) -> tuple[Int[Tensor, "position"], Tensor | None]:
    """The oldest key that each query sees, and what a mask adds to the logits of keys that are seen."""
    position = torch.arange(n_positions, device=call.query.device)
    mask = call.logits if call.logits is not None else None if call.mask is None else call.mask[0].detach()
    if mask is None or mask.ndim < 3:
        causal = call.options.get("is_causal", getattr(call.module, "is_causal", True))
        window = call.options.get("sliding_window") or n_positions
        if causal is False:
            raise UsageError(_NOT_CAUSAL.format(layer=call.layer))
        return (position - window + 1).clamp(min=0), None
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN_SCORE / 2
    first = visible[0].int().argmax(-1)
    run = (position >= first[:, None]) & (position <= position[:, None])
    if not bool((visible == run).all()):
        raise UsageError(_NOT_CAUSAL.format(layer=call.layer))
    if mask.dtype == torch.bool or call.logits is not None:
        return first, None
    added = mask.masked_fill(~visible, 0)
    return first, added if bool(added.any()) else None


_NOT_CAUSAL = (
    "what is read from attention needs causal layers, in which every query sees a run of keys up to its own; those of "
    "layer {layer} see others"
)


def state_of(call: KernelCall, dtype: torch.dtype) -> AttentionState:
    """The attention of a layer and a single prompt before its softmax, in `dtype`.

    Raises:
        UsageError: some query sees later keys, or keys with a gap between them, or its heads see different ones.
    """
    query, key, value = (part[0].detach().to(dtype) for part in (call.query, call.key, call.value))
    first, added = _seen(call, key.shape[1])
    scale = 0.0 if call.scaling == VANISHING else call.scaling
    own = getattr(call.module, "scaling", None)
    if scale == 1 and isinstance(own, float) and call.logits is None:  # OPT's queries come with it
        query, scale = query / own, own
    sinks = call.options.get("s_aux")
    return AttentionState(
        query=query.reshape(len(key), -1, *query.shape[1:]),
        key=key,
        value=value,
        scale=scale,
        first=first.cpu(),
        softcap=call.options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().to(dtype),
        added=None if added is None else added.to(dtype),
        logits=None if call.logits is None else call.logits.detach().to(dtype),
    )


def before_rotation(call: KernelCall, state: AttentionState) -> AttentionState:
    """The state of a call with queries and keys before rotation, and before anything that is changed in them."""
    bare = replace(unturned(call.module, call.layer, call.arguments), mask=None)
    own = state_of(bare, state.query.dtype)
    return replace(state, query=own.query, key=own.key)


def seen_layers(model: HuggingFaceModel, *, n_positions: int) -> list[int]:
    """The layers of a model whose attention can be seen for prompts of so many tokens.

    Raises:
        UsageError: none has attention that is known, or eager matrices do not fit in memory.
    """
    modules = attention_modules(model.network)
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in KNOWN_ATTENTION:
        raise UsageError(
            f"attention of this {model.model_type} model cannot be seen: it runs the attention implementation "
            f"{implementation!r}; known are {', '.join(KNOWN_ATTENTION)}"
        )
    if not modules:
        raise UsageError(
            f"attention of this {model.model_type} model cannot be seen: no layer has any, or none goes through "
            "transformers' attention interface; the model can be measured and evaluated"
        )
    if not all(map(asks_interface, modules.values())) and model.device.type == "cpu":
        heads = model.sizes["heads"]
        check_room(
            EAGER_COPIES * heads * n_positions**2 * model.dtype.itemsize,
            f"eager attention matrices of {heads} heads at {n_positions} positions",
            "take shorter prompts",
        )
    return list(modules)


@dataclass(frozen=True)
class KeptAttention:
    """A call of an attention module in an earlier pass, from which its attention can be formed again."""

    module: nn.Module
    arguments: Arguments
    """Before any intervention."""

    @property
    def read(self) -> Float[Tensor, "position feature"]:
        """What the module reads: the stream after the norm before the branch, if the family has one."""
        return stream_read(*self.arguments)[0]

    def again(self) -> KernelCall:
        """The kernel's call if the module reads the same as it is now, with an intervention that lasts."""
        caught: list[KernelCall] = []

        def receive(seen: KernelCall) -> None:
            caught.append(seen)
            raise EnoughError

        positional, named = self.arguments
        with torch.no_grad(), watch_attention(self.module, receive), suppress(EnoughError):
            self.module(*positional, **named)
        return caught[0]


@contextmanager
def kept_attention(network: nn.Module) -> Iterator[list[KeptAttention]]:
    """Within the context, keep what every attention module reads in the pass of a single prompt, in order."""
    kept: list[KeptAttention] = []

    def keep(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept.append(KeptAttention(module, tree_map_only(Tensor, Tensor.detach, (positional, named))))

    with ExitStack() as hooks:
        for module in attention_modules(network).values():
            hooks.enter_context(module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True))
        yield kept


def elements_at_once(device: torch.device) -> int:
    """Attention weights that may be held at once on a device."""
    return BLOCK_ELEMENTS if device.type == "cpu" else ACCELERATOR_ELEMENTS


def query_blocks(state: AttentionState, *, block: int | None = None) -> Iterator[AttentionBlock]:
    """A layer's attention weights, a block of queries at a time, last queries first; every query comes once.

    Blocks have at most `block` queries, and as many as the device's caches or memory are made for; their keys are those
    that any of the queries sees. Hidden keys have weight zero.
    """
    (key_heads, group, n_positions, _), device = state.query.shape, state.query.device
    most, oldest = block or n_positions, state.first.numpy()
    if state.reach < n_positions:
        most = min(most, max(state.reach, BLOCK_QUERIES))  # of longer blocks most keys are hidden
    width = min(n_positions, most + state.reach)
    longest = BLOCK_QUERIES if device.type == "cpu" else max(BLOCK_QUERIES, -(-width // BLOCKS))
    rows = max(1, min(most, elements_at_once(device) // (state.heads * width), longest))
    for start in reversed(range(0, n_positions, rows)):
        queries = slice(start, min(start + rows, n_positions))
        keys = slice(int(oldest[queries].min()), queries.stop)
        shape = key_heads, group, queries.stop - start, keys.stop - keys.start
        if state.logits is not None:
            logits = state.logits[:, queries, keys].reshape(shape).clone()
        else:
            logits = (state.query[:, :, queries] * state.scale).flatten(1, 2) @ state.key[:, keys].transpose(1, 2)
            logits = logits.reshape(shape)
            if state.softcap is not None:
                logits = logits.div_(state.softcap).tanh_().mul_(state.softcap)
            if state.added is not None:
                added = state.added[:, queries, keys]
                logits += added.reshape(shape) if len(added) > 1 else added
        # Only keys from the first query on, and those that leave a window, are hidden from some: all see the others.
        ahead = torch.ones(shape[2], shape[2], dtype=torch.bool, device=device).triu(1)
        logits[..., start - keys.start :].masked_fill_(ahead, -torch.inf)
        left = oldest[queries] - keys.start
        if left.any():
            gone = torch.from_numpy(np.arange(left.max()) < left[:, None])
            logits[..., : left.max()].masked_fill_(gone.to(device), -torch.inf)
        if state.sinks is None:
            yield AttentionBlock(queries, keys, logits.softmax(-1))
            continue
        learned = state.sinks.to(logits).reshape(key_heads, group, 1, 1).expand(*shape[:3], 1)
        shares = torch.cat([logits, learned], -1).softmax(-1)
        yield AttentionBlock(queries, keys, shares[..., :-1], shares[..., -1])
