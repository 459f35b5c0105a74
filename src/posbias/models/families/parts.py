"""Attention, MLPs and norms as numbers: the linear maps of a block, whatever module holds or fuses them.

`nn.Linear` stores [out, in], GPT-2's `Conv1D` [in, out]; here every map is [out, in], so that y = W x + b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from posbias.errors import UsageError

OLMO_EPSILON = 1e-5
"""A literal of transformers' `OlmoLayerNorm`."""
COHERE_NORMS = ("CohereLayerNorm", "Cohere2LayerNorm")
"""LayerNorms without a bias, written out."""
LESS_ONE = ("GemmaRMS", "Gemma2", "Gemma3RMS", "Qwen3Next", "Qwen3_5")
"""RMS norms that multiply by 1 + weight, so that a weight of zero is the identity, by the beginnings of their names."""

Fusion = Literal["stacked", "interleaved"]
"""How one map holds all queries, keys and values: one after the other (GPT-2, MPT, Phi-3); for each key head its
queries, its key, its value (GPT-NeoX, BLOOM, Falcon)."""


@dataclass(frozen=True)
class Norm:
    """A normalisation layer: y = gain * (x - mean?) / sqrt(power + epsilon) + bias.

    Power is the mean square, of the centred x in a LayerNorm.
    """

    kind: Literal["rms", "layer"]
    gain: Float[Tensor, "*heads feature"]
    """Multiplier of each feature as applied (Gemma: 1 + weight); q/k norms may have one for every head."""
    bias: Float[Tensor, "*heads feature"] | None
    epsilon: float


@dataclass(frozen=True)
class AttentionParts:
    """The maps of one attention layer: logits = softcap(scale q.k), beside what positions add.

    Rotary positions turn the first features of a head, half against half. Where a model turns neighbours instead
    (Cohere), the query and key features of each head are listed in that order, which changes no logit.
    """

    query: Float[Tensor, "query_features width"]
    key: Float[Tensor, "key_features width"]
    value: Float[Tensor, "value_rows width"]
    output: Float[Tensor, "width value_features"]
    heads: int
    key_heads: int
    """Key/value heads; heads / key_heads queries share one."""
    head_dim: int
    scale: float
    """Factor on q.k before the softmax."""
    query_norm: Norm | None = None
    """Norm on queries: per head if its gain ends in head_dim features, over all features otherwise."""
    key_norm: Norm | None = None
    softcap: float | None = None
    query_bias: Float[Tensor, "query_features"] | None = None
    key_bias: Float[Tensor, "key_features"] | None = None
    value_bias: Float[Tensor, "value_rows"] | None = None
    output_bias: Float[Tensor, "width"] | None = None
    order: Int64[Tensor, "head_dim"] | None = None
    """The model's own feature at each place of a head, where neighbours are listed as halves; None: as they are."""
    sinks: Float[Tensor, "heads"] | None = None
    """Learned sinks (GPT-OSS): the logit, in every row's softmax, of a place that is no position and has no value."""

    @property
    def value_dim(self) -> int:
        """Features of a value, `head_dim` in most families."""
        return len(self.value) // self.key_heads


@dataclass(frozen=True)
class MlpParts:
    """The maps of one MLP."""

    up: Float[Tensor, "hidden width"]
    down: Float[Tensor, "width hidden"]
    gate: Float[Tensor, "hidden width"] | None
    """The gate of down(act(gate x) * (up x)); None for a plain MLP, down(act(up x))."""
    activation: Any
    """The module or function the family applies elementwise."""
    up_bias: Float[Tensor, "hidden"] | None = None
    down_bias: Float[Tensor, "width"] | None = None
    gate_bias: Float[Tensor, "hidden"] | None = None


def weight_of(linear: nn.Module) -> Float[Tensor, "out in"]:
    """The matrix W of y = W x + b; refused if it is quantised or offloaded."""
    weight = readable(linear, "weight")
    return weight.T if type(linear).__name__ == "Conv1D" else weight


def bias_of(linear: nn.Module) -> Float[Tensor, "out"] | None:
    """The vector b of y = W x + b, or None."""
    bias = getattr(linear, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def readable(module: nn.Module, name: str) -> Tensor:
    """A parameter as numbers in memory; refused if it is quantised, offloaded, or changed by an adapter of peft."""
    if hasattr(module, "base_layer") and not getattr(module, "merged", False):
        raise UsageError(
            "attention and theory read weights as they act, and an adapter is beside them; load what "
            "merge_and_unload() of the PeftModel returns"
        )
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        storage = str(weight.dtype) if isinstance(weight, Tensor) else "packed bits"
        raise UsageError(
            f"attention and theory read weights as floating-point numbers, {type(module).__name__} holds them as "
            f"{storage}; load it unquantised"
        )
    if weight.is_meta:
        raise UsageError("attention and theory read weights in memory, some are offloaded; load the model whole")
    return weight


def read_attention(
    projections: Sequence[nn.Module],
    output: nn.Module,
    *,
    heads: tuple[int, int],
    fusion: Fusion,
    scale: float,
    gated: bool = False,
) -> AttentionParts:
    """The maps of an attention layer.

    The projections are those of queries, of keys and of values, or one of all three, which `fusion` describes; `output`
    takes the heads' outputs to the stream, and `heads` counts query heads and key heads. If `gated`, the rows of each
    head's queries are followed by those of its gate, which is left out.
    """

    def three(tensors: list[Any]) -> Sequence[Any]:
        if len(tensors) == 3:
            return tensors
        return (None, None, None) if tensors[0] is None else split_fused(tensors[0], heads, fusion)

    query, key, value = three([weight_of(projection) for projection in projections])
    query_bias, key_bias, value_bias = three([bias_of(projection) for projection in projections])
    if gated:
        query, query_bias = (rows if rows is None else _before_gates(rows, heads[0]) for rows in (query, query_bias))
    return AttentionParts(
        query=query,
        key=key,
        value=value,
        output=weight_of(output),
        heads=heads[0],
        key_heads=heads[1],
        head_dim=query.shape[0] // heads[0],
        scale=scale,
        query_bias=query_bias,
        key_bias=key_bias,
        value_bias=value_bias,
        output_bias=bias_of(output),
    )


def _before_gates(rows: Shaped[Tensor, "all *columns"], heads: int) -> Shaped[Tensor, "half *columns"]:
    return rows.reshape(heads, 2, -1, *rows.shape[1:])[:, 0].flatten(0, 1)


def split_fused(fused: Shaped[Tensor, "all *columns"], heads: tuple[int, int], fusion: Fusion) -> tuple[Tensor, ...]:
    """Query, key and value rows of one map, heads in order within each."""
    columns, key_heads = fused.shape[1:], heads[1]
    size = fused.shape[0] // (heads[0] + 2 * key_heads)
    if fusion == "stacked":
        return torch.split(fused, [heads[0] * size, key_heads * size, key_heads * size])
    by_group = fused.reshape(key_heads, -1, size, *columns)
    query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return query.reshape(-1, *columns), key.reshape(-1, *columns), value.reshape(-1, *columns)


def neighbours_as_halves(parts: AttentionParts, rotary: int) -> AttentionParts:
    """List the first `rotary` query and key features of each head evens first, then odds.

    Turning neighbours (0, 1), (2, 3) ... becomes turning half against half; no product of a query with a key changes.
    """
    turned = torch.arange(rotary).reshape(-1, 2).T.flatten()
    order = torch.cat([turned, torch.arange(rotary, parts.head_dim)])

    def listed(rows: Tensor) -> Tensor:
        by_head = rows.reshape(-1, parts.head_dim, *rows.shape[1:])
        return by_head[:, order.to(rows.device)].flatten(0, 1)

    def listed_gain(norm: Norm | None) -> Norm | None:
        return None if norm is None else replace(norm, gain=norm.gain[..., order.to(norm.gain.device)])

    return replace(
        parts,
        order=order,
        query=listed(parts.query),
        key=listed(parts.key),
        query_bias=None if parts.query_bias is None else listed(parts.query_bias),
        key_bias=None if parts.key_bias is None else listed(parts.key_bias),
        query_norm=listed_gain(parts.query_norm),
        key_norm=listed_gain(parts.key_norm),
    )


def read_norm(module: nn.Module) -> Norm:
    """A LayerNorm or RMS norm, or StableLM's list of one for each head; others are refused.

    Gemma, Nemotron and Qwen 3 Next store their gain less one; everyone else stores the gain itself, OLMo 1 has none.
    """
    kind = type(module).__name__
    if kind == "StableLmLayerNormPerHead":
        norms = [read_norm(norm) for norm in module.get_submodule("norms").children()]
        return replace(norms[0], gain=torch.stack([norm.gain for norm in norms]))
    if isinstance(module, nn.LayerNorm):
        stored: Tensor | None = module.weight
        gain = torch.ones(module.normalized_shape) if stored is None else stored
        gain = 1 + gain if kind == "NemotronLayerNorm1P" else gain
        return Norm(kind="layer", gain=gain, bias=module.bias, epsilon=module.eps)
    if kind == "OlmoLayerNorm":
        shape: Any = module.normalized_shape
        return Norm(kind="layer", gain=torch.ones(shape), bias=None, epsilon=OLMO_EPSILON)
    if not kind.endswith("RMSNorm") and kind not in COHERE_NORMS:
        raise UsageError(f"{kind} is not a norm posbias can read; known: LayerNorm and RMS norms")
    weight: Tensor = module.get_parameter("weight")
    epsilon: Any = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    gain = 1 + weight if kind.startswith(LESS_ONE) else weight
    return Norm(kind="rms" if kind.endswith("RMSNorm") else "layer", gain=gain, bias=None, epsilon=float(epsilon))
