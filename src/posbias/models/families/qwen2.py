"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows by `layer_types`."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("qwen2")
class Qwen2(LlamaLike):
    """Qwen 2."""
