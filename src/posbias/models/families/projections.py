"""Linear maps of attention and MLP as [out, in], whatever module holds them and however they are fused.

`nn.Linear` stores [out, in]; GPT-2's `Conv1D` stores [in, out]. Fused maps come in two orders: query, key and value
one after the other ("stacked": GPT-2, MPT, Phi-3), or per key head ("interleaved": GPT-NeoX, BLOOM, Falcon).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.families.base import AttentionParts, MixtureParts, MlpParts, Norm


def weight_of(linear: nn.Module) -> Float[Tensor, "out in"]:
    """The matrix W of y = W x + b.

    Raises:
        UsageError: the weights are quantised or offloaded.
    """
    weight = readable(linear, "weight")
    return weight.T if type(linear).__name__ == "Conv1D" else weight


def readable(module: nn.Module, name: str) -> Tensor:
    """A parameter as numbers in memory.

    Raises:
        UsageError: it is quantised or offloaded.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        held = f"{type(module).__name__} holds them as {weight.dtype if isinstance(weight, Tensor) else 'packed bits'}"
        raise UsageError(f"attention and theory read weights as floating-point numbers, {held}; load it unquantised")
    if weight.is_meta:
        raise UsageError("attention and theory read weights in memory, some are offloaded; load the model whole")
    return weight


def bias_of(linear: nn.Module) -> Float[Tensor, "out"] | None:
    """The vector b of y = W x + b, or None."""
    bias = getattr(linear, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def separate_attention(
    attention: nn.Module, output: nn.Module, *, heads: int, key_heads: int, scale: float
) -> AttentionParts:
    """The parts of an attention module with `q_proj`, `k_proj` and `v_proj`."""
    query, key, value = (attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj"))
    return AttentionParts(
        query=weight_of(query),
        key=weight_of(key),
        value=weight_of(value),
        output=weight_of(output),
        heads=heads,
        key_heads=key_heads,
        head_dim=weight_of(query).shape[0] // heads,
        scale=float(scale),
        query_bias=bias_of(query),
        key_bias=bias_of(key),
        value_bias=bias_of(value),
        output_bias=bias_of(output),
    )


@dataclass(frozen=True)
class Fusion:
    """How one map holds queries, keys and values."""

    heads: int
    key_heads: int
    order: Literal["stacked", "interleaved"]
    """All queries, all keys, all values; or for each key head its queries, its key, its value."""

    def split(self, fused: Float[Tensor, "all *columns"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value rows, heads in order within each."""
        rest = fused.shape[1:]
        size = fused.shape[0] // (self.heads + 2 * self.key_heads)
        if self.order == "stacked":
            queries, keys = self.heads * size, self.key_heads * size
            return fused[:queries], fused[queries : queries + keys], fused[queries + keys :]
        by_group = fused.reshape(self.key_heads, -1, size, *rest)
        query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
        return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def fused_attention(fused: nn.Module, output: nn.Module, *, fusion: Fusion, scale: float) -> AttentionParts:
    """The parts of an attention module whose query, key and value are one map."""
    query, key, value = fusion.split(weight_of(fused))
    bias = bias_of(fused)
    query_bias, key_bias, value_bias = (None, None, None) if bias is None else fusion.split(bias)
    return AttentionParts(
        query=query,
        key=key,
        value=value,
        output=weight_of(output),
        heads=fusion.heads,
        key_heads=fusion.key_heads,
        head_dim=query.shape[0] // fusion.heads,
        scale=float(scale),
        query_bias=query_bias,
        key_bias=key_bias,
        value_bias=value_bias,
        output_bias=bias_of(output),
    )


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

    query_bias, key_bias = (None if bias is None else listed(bias) for bias in (parts.query_bias, parts.key_bias))
    return replace(
        parts,
        query=listed(parts.query),
        key=listed(parts.key),
        query_bias=query_bias,
        key_bias=key_bias,
        query_norm=listed_gain(parts.query_norm),
        key_norm=listed_gain(parts.key_norm),
    )


def plain_mlp(up: nn.Module, down: nn.Module, activation: object) -> MlpParts:
    """The parts of down(act(up x))."""
    return MlpParts(
        up=weight_of(up),
        down=weight_of(down),
        gate=None,
        activation=activation,
        up_bias=bias_of(up),
        down_bias=bias_of(down),
    )


def gated_mlp(mlp: nn.Module, activation: object) -> MlpParts:
    """The parts of down(act(gate x) * (up x)), from `up_proj`, `down_proj` and `gate_proj`."""
    up, down, gate = (mlp.get_submodule(name) for name in ("up_proj", "down_proj", "gate_proj"))
    return MlpParts(
        up=weight_of(up),
        down=weight_of(down),
        gate=weight_of(gate),
        activation=activation,
        up_bias=bias_of(up),
        down_bias=bias_of(down),
        gate_bias=bias_of(gate),
    )


def fused_gated_mlp(mlp: nn.Module, activation: object) -> MlpParts:
    """The same from `gate_up_proj`, gate first, and `down_proj`, without biases."""
    gate, up = weight_of(mlp.get_submodule("gate_up_proj")).chunk(2)
    return MlpParts(up=up, down=weight_of(mlp.get_submodule("down_proj")), gate=gate, activation=activation)


def gated_mixture(mlp: nn.Module, *, renormalised: bool) -> MixtureParts:
    """The parts of a module with a router `gate` and gated `experts` held together as [expert, out, in]."""
    experts, router = mlp.get_submodule("experts"), mlp.get_submodule("gate")
    gates_and_ups, downs = readable(experts, "gate_up_proj"), readable(experts, "down_proj")
    return MixtureParts(
        experts=tuple(
            MlpParts(up=up, down=down, gate=gate, activation=experts.act_fn)
            for (gate, up), down in zip((both.chunk(2) for both in gates_and_ups), downs, strict=True)
        ),
        router=weight_of(router),
        router_module=router,
        renormalised=renormalised,
    )
