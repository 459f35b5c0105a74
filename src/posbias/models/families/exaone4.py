"""Exaone 4: norms after the branches and on queries and keys; rotary positions in windowed layers only."""

from typing import Any

from torch import nn

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import NormedQueriesAndKeys


@FAMILIES.register("exaone4")
class Exaone4(NormedQueriesAndKeys):
    """Exaone 4. Without any window all layers turn; with windows, layers that see everything have no positions."""

    attention_norm = None
    attention_post_norm = "post_attention_layernorm"
    mlp_norm = None
    mlp_post_norm = "post_feedforward_layernorm"

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """In windowed layers, or everywhere."""
        return attention.sliding_window is None or bool(attention.is_sliding)
