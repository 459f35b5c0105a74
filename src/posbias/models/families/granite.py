"""Granite: Llama with four fixed factors, on the embeddings, the logits of attention, both branches, and the logits."""

from dataclasses import replace
from typing import Any

from torch import nn

from posbias.models.families.base import FAMILIES, Block
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("granite")
class Granite(LlamaLike):
    """Granite; the factor on attention's logits is its `scaling`, that on the output logits belongs to the network."""

    def block(self, module: nn.Module) -> Block:
        """Llama's, with what its branches are multiplied by."""
        return replace(super().block(module), branch_scale=float(module.residual_multiplier))  # type: ignore[arg-type]

    def input_scale(self, config: Any) -> float:
        """The factor on the embeddings, which the network applies to whatever enters it."""
        return float(config.embedding_multiplier)
