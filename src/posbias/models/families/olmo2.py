"""OLMo 2: no norm before the branches, one after each; queries and keys normalised over all their features."""

from dataclasses import replace
from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("olmo2")
class Olmo2(LlamaLike):
    """OLMo 2."""

    attention_norm = None
    attention_post_norm = "post_attention_layernorm"
    mlp_norm = None
    mlp_post_norm = "post_feedforward_layernorm"

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and the two norms, each over all heads at once."""
        query_norm = self.norm(block.attention.get_submodule("q_norm"))
        key_norm = self.norm(block.attention.get_submodule("k_norm"))
        return replace(super().attention_parts(block, config), query_norm=query_norm, key_norm=key_norm)
