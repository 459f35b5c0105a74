"""Helium: Llama with neighbouring features turned."""

from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import neighbours_as_halves


@FAMILIES.register("helium")
class Helium(LlamaLike):
    """Helium."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the features of each head listed so that halves turn."""
        parts = super().attention_parts(block, config)
        return neighbours_as_halves(parts, parts.head_dim)
