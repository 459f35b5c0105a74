"""Arcee (AFM): Llama with a plain MLP and squared ReLU."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("arcee")
class Arcee(LlamaLike):
    """Arcee."""
