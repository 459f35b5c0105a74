"""Llama 1 to 3 and everything published under `model_type: llama` (SmolLM2 among them)."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("llama")
class Llama(LlamaLike):
    """Llama."""
