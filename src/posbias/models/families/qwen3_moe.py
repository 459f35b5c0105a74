"""Qwen 3 MoE: Qwen 3 with mixtures of experts for MLPs and one window, if any, for all layers."""

from typing import Any

from posbias.architecture import Mask
from posbias.models.families.base import FAMILIES, Block, MixtureParts
from posbias.models.families.llama_like import window_mask
from posbias.models.families.projections import gated_mixture
from posbias.models.families.qwen3 import Qwen3


@FAMILIES.register("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Qwen 3 MoE."""

    def mask(self, config: Any, layer: int) -> Mask:
        """The window in every layer: transformers' Qwen 3 MoE reads `sliding_window` alone."""
        return window_mask(config)

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """In the blocks that are not plain; `norm_topk_prob` says whether the chosen weights sum to 1."""
        if not hasattr(block.mlp, "experts"):
            return None
        return gated_mixture(block.mlp, renormalised=bool(config.norm_topk_prob))
