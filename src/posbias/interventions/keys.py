"""A key bias on a model: a number added to the logit of every key, for all queries and whatever the content.

Grouped heads, windows, caches and batches with padding go on as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.architecture import ENCODINGS, KeyEncoding
from posbias.errors import UsageError
from posbias.interventions.base import (
    INTERVENTIONS,
    Arguments,
    Attended,
    AttentionCall,
    Intervention,
    Padding,
    attending,
    before_calls,
    has_sinks,
)
from posbias.models.attention import attention_modules
from posbias.models.hugging_face import HuggingFaceModel


@INTERVENTIONS.register("key_biased")
@dataclass(frozen=True)
class KeyBiased(Intervention):
    """Every key gets a bias by its position, `"gamma_key(alpha=3.0)"` or `"key_bias(values=[...])"`, in each layer."""

    ingredient: ClassVar[str] = "encoding"

    biases: str | Sequence[str]
    """A key encoding for all layers, or a list of them, layer 0 nearest the input."""

    def __post_init__(self) -> None:
        biases = [self.biases] if isinstance(self.biases, str | KeyEncoding) else list(self.biases)
        parsed = [ENCODINGS.parse(item) if isinstance(item, str) else item for item in biases]
        wrong = next((item for item in parsed if not isinstance(item, KeyEncoding)), None)
        if wrong is not None or not parsed:
            raise UsageError(f"key_biased: biases must be key_bias(...) or gamma_key(...), got {wrong or 'none'}")
        spelled = tuple(map(str, parsed))
        object.__setattr__(self, "biases", spelled[0] if isinstance(self.biases, str | KeyEncoding) else spelled)

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Add the bias in every attention module."""
        return biased(model, self, self.logits(model))

    def logits(self, model: HuggingFaceModel, strength: float = 1.0) -> "Logits":
        """The bias of every layer's keys, times a strength, from the layer and their number."""
        heads, depth = model.sizes.get("heads", 0), model.sizes.get("layers", 0)
        biases = [self.biases] * depth if isinstance(self.biases, str) else self.biases
        if len(biases) != depth:
            raise UsageError(f"key_biased: {len(biases)} biases given for {depth} layers; give one or {depth}")
        layers: list[Any] = [ENCODINGS.parse(item) for item in biases]
        for bias in layers:
            bias.check_heads(heads)
        return lambda layer, n_positions: torch.tensor(strength * layers[layer].key_logits(n_positions, heads))


Logits = Callable[[int, int], Float[Tensor, "heads n"]]
"""The bias of the first n keys in a layer, from the layer and n; a gradient flows through it."""


Begins = Callable[[], Int[Tensor, "_ one"]]
"""Returns the token at which something begins in every prompt that the network now reads, 0 the prompt's first."""


@contextmanager
def biased(
    model: HuggingFaceModel,
    intervention: Intervention | str,
    logits: Logits,
    *,
    scales: Callable[[int], Float[Tensor, "heads"]] | None = None,
    by_side: bool = False,
    first_query: int | Begins = 0,
) -> Iterator[None]:
    """Within the context, numbers are added to the logits of every layer's keys, for queries from `first_query` on.

    `scales` are factors on the model's own logits, by layer and head. With `by_side`, there are two numbers: for the
    keys before the first query, and for those from it on.

    They are carried by further features of queries and keys where attention goes through transformers' interface; BLOOM
    adds those for all queries to its own logits by position.
    """
    tables: dict[int, Tensor] = {}
    with_sinks = has_sinks(model)

    def bias(layer: int, n_positions: int, like: Tensor) -> Float[Tensor, "heads n"]:
        """The layer's biases of at least so many keys."""
        table = tables.get(layer)
        if table is not None and table.shape[1] >= n_positions:
            return table
        room = 0 if table is None else n_positions // 4  # decoding asks for one length after another
        with torch.enable_grad():  # whether a gradient flows is then known even if none is wanted now
            try:
                table = logits(layer, n_positions + room)
            except UsageError:  # no bias for so many keys
                table = logits(layer, n_positions)
        # With the largest at 0, which keeps half precision in range, and changes no softmax that is of keys alone.
        added = table if with_sinks else table - table.detach().amax(dim=1, keepdim=True)
        added = added.to(like.device, torch.promote_types(like.dtype, torch.float32))
        if not table.requires_grad:
            tables[layer] = added
        return added

    def attend(call: AttentionCall) -> Attended:
        first = first_query if isinstance(first_query, int) else first_query().to(call.query.device)
        entries = (call.key_positions >= first).long() if by_side else call.key_positions
        try:  # with the number of slots, for which an accelerator need not wait
            added = bias(call.layer, 2 if by_side else call.slots, call.query)
        except UsageError:  # padding takes slots, but needs no bias
            added = bias(call.layer, int(entries.max()) + 1, call.query)
        acts = call.query_positions >= first
        if scales is not None:
            factor = scales(call.layer).to(call.query)[:, None].where(acts[:, None], 1.0)
            call = replace(call, query=call.query * factor[..., None])
        share = acts.to(added) if first_query else None
        return call.run_biased(added[:, entries].transpose(0, 1), share)

    if model.model_type != "bloom" or first_query or by_side or scales is not None:
        with attending(model, intervention, attend):
            yield
        return
    padding = Padding()
    hooks = [
        (module, _beside_alibi(partial(bias, layer), padding))
        for layer, module in attention_modules(model.network).items()
    ]
    with padding.followed(model.network), before_calls(hooks):
        yield


def _beside_alibi(bias: Callable[[int, Tensor], Tensor], padding: Padding) -> Callable[..., Arguments]:
    """Make a hook that adds a layer's bias to the logits by position that BLOOM hands its attention modules."""

    def hook(_module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        alibi: Float[Tensor, "prompt_and_head one key"] = named["alibi"]
        keys = alibi.shape[-1]
        positions = padding.between(0, keys, alibi.device)
        added: Float[Tensor, "_ head key"] = bias(keys, alibi)[:, positions].transpose(0, 1).to(alibi)
        whole = alibi.reshape(-1, added.shape[1], keys) + added
        return positional, {**named, "alibi": whole.reshape(alibi.shape)}

    return hook
