"""Ministral: Mistral with a window in some layers."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("ministral")
class Ministral(LlamaLike):
    """Ministral."""
