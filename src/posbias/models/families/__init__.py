"""Families of decoders by kinship; importing this package registers them all in `FAMILIES`."""

from posbias.models.families import alibi, experts, gpt_like, llama_like
from posbias.models.families.base import FAMILIES, Block, Family
from posbias.models.families.parts import AttentionParts, MixtureParts, MlpParts, Norm

__all__ = [
    "FAMILIES",
    "AttentionParts",
    "Block",
    "Family",
    "MixtureParts",
    "MlpParts",
    "Norm",
    "alibi",
    "experts",
    "gpt_like",
    "llama_like",
]
