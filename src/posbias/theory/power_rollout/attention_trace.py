"""One forward pass kept as what every attention module read, from which each layer's attention can be recomputed.

Layers x positions x features numbers, no attention matrix. Beside them: how large each branch is beside the stream,
and what the norms around it divide by. Any described family; only the power rollout needs more (trace.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from posbias.errors import RunError, UsageError
from posbias.models.attention import AttentionInput, AttentionLayer, describe_attention, watch_attention
from posbias.models.families import Norm
from posbias.models.hugging_face import HuggingFaceModel, watch_branches
from posbias.models.model import Model


@dataclass(frozen=True)
class ScaledNorm:
    """A norm around the attention branch, and what it divided by at every position."""

    norm: Norm
    power: Float[Tensor, "position"]
    """Mean square (of the centred input for LayerNorm) plus epsilon."""


@dataclass(frozen=True)
class AttentionTraceLayer:
    """One layer on one prompt."""

    layer: AttentionLayer
    given: AttentionInput
    before: ScaledNorm | None
    """The norm the branch reads through; None where there is none."""
    after: ScaledNorm | None
    """The norm between the output projection and the stream; None where there is none."""


@dataclass(frozen=True)
class AttentionTrace:
    """One prompt's forward pass."""

    layers: list[AttentionTraceLayer]
    mixing: Float64[Tensor, "layers"]
    """Mean over tokens of |a| / (|x| + |a|), measured."""


@torch.no_grad()
def trace_attention(model: Model, token_ids: Int[Tensor, "position"]) -> AttentionTrace:
    """Run one prompt forward and keep what each attention module read.

    Raises:
        UsageError: the model's family is not described, or its attention cannot be recomputed.
        RunError: the norms of stream and branch are not finite, or both vanish.
    """
    layers = describe_attention(model, n_positions=len(token_ids))
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be recomputed; a Hugging Face model is needed")
    given: dict[int, AttentionInput] = {}
    powers: dict[nn.Module, ScaledNorm] = {}
    blocks = model.family.blocks(model.network)
    around = [norm for block in blocks for norm in (block.attention_norm, block.attention_post_norm) if norm]
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32

    def receive(layer: AttentionLayer, read: AttentionInput) -> None:
        given[layer.index] = read

    with (
        watch_attention(layers, receive, dtype=dtype),
        watch_branches(blocks) as watch,
        _watch_norms({module: model.family.norm(module) for module in around}, powers, dtype),
    ):
        model.last(model.embed(token_ids[None]))
    norms = watch.norms()
    share = norms.branch[:, 0].double() / (norms.stream[:, 0].double() + norms.branch[:, 0].double())
    if not bool(share.isfinite().all()):
        layer = int((~share.isfinite()).any(1).nonzero()[0])
        raise RunError(f"mixing: |x| + |a| is zero or not finite in layer {layer}; it must be finite and > 0")

    def scaled(module: nn.Module | None) -> ScaledNorm | None:
        return None if module is None else powers[module]

    kept = [
        AttentionTraceLayer(layer, given[layer.index], scaled(block.attention_norm), scaled(block.attention_post_norm))
        for layer, block in zip(layers, blocks, strict=True)
    ]
    return AttentionTrace(kept, share.mean(1).cpu())


@contextmanager
def _watch_norms(norms: dict[nn.Module, Norm], into: dict[nn.Module, ScaledNorm], dtype: torch.dtype) -> Iterator[None]:
    """Within the context, keep what every norm divides by on a single prompt."""

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        values, norm = args[0].reshape(-1, args[0].shape[-1]).to(dtype), norms[module]
        if norm.kind == "layer":
            values = values - values.mean(-1, keepdim=True)
        into[module] = ScaledNorm(norm, values.square().mean(-1) + norm.epsilon)

    with ExitStack() as hooks:
        for module in norms:
            hooks.callback(module.register_forward_pre_hook(keep).remove)
        yield
