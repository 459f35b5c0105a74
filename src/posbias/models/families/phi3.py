"""Phi 3 and 4: Llama with stacked projections in attention and MLP, one window for all layers, partial rotation."""

from typing import Any

from posbias.architecture import Mask
from posbias.models.families.base import FAMILIES, AttentionParts, Block, MlpParts
from posbias.models.families.llama_like import LlamaLike, window_mask
from posbias.models.families.projections import Fusion, fused_attention, fused_gated_mlp


@FAMILIES.register("phi3")
class Phi3(LlamaLike):
    """Phi 3."""

    def mask(self, config: Any, layer: int) -> Mask:
        """The window in every layer: transformers' Phi-3 reads `sliding_window` alone."""
        return window_mask(config)

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """The rows of `qkv_proj`: queries, then keys, then values."""
        scale: Any = block.attention.scaling
        fusion = Fusion(self.heads(config), int(config.num_key_value_heads), "stacked")
        return fused_attention(
            block.attention.get_submodule("qkv_proj"), block.attention_output, fusion=fusion, scale=scale
        )

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The halves of `gate_up_proj`."""
        return fused_gated_mlp(block.mlp, block.mlp.activation_fn)
