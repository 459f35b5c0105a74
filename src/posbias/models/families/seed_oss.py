"""Seed-OSS: Llama with biases on queries, keys and values."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("seed_oss")
class SeedOss(LlamaLike):
    """Seed-OSS."""
