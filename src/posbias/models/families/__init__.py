"""One file per family of decoders; importing this package registers them all in `FAMILIES`."""

from posbias.models.families import (
    bloom,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mpt,
    olmo2,
    opt,
    phi,
    qwen2,
    qwen3,
    smollm3,
)
from posbias.models.families.base import FAMILIES, AttentionParts, Block, Family, MlpParts, Norm

__all__ = [
    "FAMILIES",
    "AttentionParts",
    "Block",
    "Family",
    "MlpParts",
    "Norm",
    "bloom",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mpt",
    "olmo2",
    "opt",
    "phi",
    "qwen2",
    "qwen3",
    "smollm3",
]
