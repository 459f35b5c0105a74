"""Ernie 4.5 (dense): Llama with neighbouring features turned, in float32."""

from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import neighbours_as_halves


@FAMILIES.register("ernie4_5")
class Ernie45(LlamaLike):
    """Ernie 4.5. Queries and keys are turned in float32, whatever the dtype of the weights."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the features of each head listed so that halves turn."""
        parts = super().attention_parts(block, config)
        return neighbours_as_halves(parts, parts.head_dim)
