"""Mistral: Llama with one sliding window for all layers."""

from typing import Any

from posbias.architecture import Mask
from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike, window_mask


@FAMILIES.register("mistral")
class Mistral(LlamaLike):
    """Mistral."""

    def mask(self, config: Any, layer: int) -> Mask:
        """The window in every layer: transformers' Mistral reads `sliding_window` alone and ignores `layer_types`."""
        return window_mask(config)
