"""A described model taken apart for the power rollout: per layer its linear maps, norms, mask and whether it rotates.

Everything comes from `posbias.models.families`; a family is supported when its blocks are sequential, its norms are
RMS norms, its MLP is gated, its logits are not soft-capped and its positions are rotary or absent (docs/theory, 5).
"""

from dataclasses import dataclass

import torch
from torch import nn

from posbias.errors import UsageError
from posbias.models.attention import uses_rotary
from posbias.models.families.base import AttentionParts, Block, MlpParts, Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model

SUPPORTED = ("gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Families whose local maps this theory has; each is checked against autograd in tests/theory_power."""


@dataclass(frozen=True)
class LayerDescription:
    """One block's maps and facts."""

    index: int
    block: Block
    attention: AttentionParts
    mlp: MlpParts
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    reach: int | None
    """Keys a query sees, its own included; None where it sees everything before it."""
    rotary: bool
    """Whether queries and keys are rotated by position."""

    def inputs(self) -> dict[str, nn.Module]:
        """Modules whose inputs a trace keeps, by the name they are kept under."""
        block = self.block
        modules = {"stream": block.module, "middle": block.mlp_norm or block.mlp}
        if block.attention_post_norm is not None:
            modules["attention_branch"] = block.attention_post_norm
        if block.mlp_post_norm is not None:
            modules["mlp_branch"] = block.mlp_post_norm
        return modules


@dataclass(frozen=True)
class Description:
    """A whole model, taken apart."""

    layers: list[LayerDescription]
    final_module: nn.Module
    final_norm: Norm
    dtype: torch.dtype
    """What the theory computes in: float64 for float64 models, float32 otherwise."""


def describe_model(model: Model, *, n_positions: int) -> Description:
    """Take a model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: the family is unknown or not among SUPPORTED, or a layer is not causal.
    """
    kind = model.model_type if isinstance(model, HuggingFaceModel) else type(model).__name__
    if not isinstance(model, HuggingFaceModel) or kind not in SUPPORTED:
        raise UsageError(f"the power rollout has no local maps for {kind!r}; supported: {', '.join(SUPPORTED)}")
    family = model.family
    if n_positions < 1 or (model.max_positions is not None and n_positions > model.max_positions):
        raise UsageError(f"prompts must have 1 to {model.max_positions} tokens for this model, got {n_positions}")
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    blocks = family.blocks(model.network)
    layers = [_describe_layer(model, block, index, n_positions) for index, block in enumerate(blocks)]
    final_module = model.network.get_submodule(family.final_norm)
    return Description(layers, final_module, family.norm(final_module), dtype)


def _describe_layer(model: HuggingFaceModel, block: Block, index: int, n_positions: int) -> LayerDescription:
    family, config = model.family, model.config
    mask = family.mask(config, index)
    if mask.mutual_prefix(n_positions) > 1:
        raise UsageError(f"the power rollout needs causal layers, layer {index} has the mask {mask}")
    reach = mask.reach(n_positions)

    def norm(module: nn.Module | None) -> Norm | None:
        return None if module is None else family.norm(module)

    return LayerDescription(
        index=index,
        block=block,
        attention=family.attention_parts(block, config),
        mlp=family.mlp_parts(block, config),
        attention_norm=norm(block.attention_norm),
        attention_post_norm=norm(block.attention_post_norm),
        mlp_norm=norm(block.mlp_norm),
        mlp_post_norm=norm(block.mlp_post_norm),
        reach=None if reach >= n_positions else reach,
        rotary=uses_rotary(block.attention),
    )
