"""Qwen 3: Llama with an RMS norm on the queries and keys of each head."""

from dataclasses import replace
from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("qwen3")
class Qwen3(LlamaLike):
    """Qwen 3."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and the two norms, each over the features of one head."""
        query_norm = self.norm(block.attention.get_submodule("q_norm"))
        key_norm = self.norm(block.attention.get_submodule("k_norm"))
        return replace(super().attention_parts(block, config), query_norm=query_norm, key_norm=key_norm)
