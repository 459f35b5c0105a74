"""Linear maps of attention and MLP as [out, in], whatever module holds them and however they are fused.

`nn.Linear` stores [out, in]; GPT-2's `Conv1D` stores [in, out]. Fused maps come in two orders: query, key and value
one after the other ("stacked": GPT-2, MPT), or per head ("interleaved": GPT-NeoX, BLOOM).
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from posbias.models.families.base import AttentionParts, MlpParts


def weight_of(linear: nn.Module) -> Float[Tensor, "out in"]:
    """The matrix W of y = W x + b."""
    weight = linear.get_parameter("weight")
    return weight.T if type(linear).__name__ == "Conv1D" else weight


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


def fused_attention(
    fused: nn.Module, output: nn.Module, *, heads: int, order: Literal["stacked", "interleaved"], scale: float
) -> AttentionParts:
    """The parts of an attention module whose query, key and value are one map; as many key heads as heads."""
    query, key, value = _thirds(weight_of(fused), heads, order)
    bias = bias_of(fused)
    biases = (None, None, None) if bias is None else tuple(part[:, 0] for part in _thirds(bias[:, None], heads, order))
    return AttentionParts(
        query=query,
        key=key,
        value=value,
        output=weight_of(output),
        heads=heads,
        key_heads=heads,
        head_dim=query.shape[0] // heads,
        scale=float(scale),
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output_bias=bias_of(output),
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


def _thirds(
    fused: Float[Tensor, "all in"], heads: int, order: Literal["stacked", "interleaved"]
) -> tuple[Float[Tensor, "out in"], ...]:
    """Query, key and value rows of a fused map, heads in order within each."""
    if order == "stacked":
        return tuple(fused.chunk(3, dim=0))
    columns = fused.shape[1]
    by_head = fused.reshape(heads, 3, -1, columns)
    return tuple(by_head[:, third].reshape(-1, columns) for third in range(3))
