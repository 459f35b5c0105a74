"""Exaone 4: OLMo 2 with queries and keys normalised per head and rotary positions in windowed layers only."""

from typing import Any

from torch import nn

from posbias.models.families.base import FAMILIES
from posbias.models.families.olmo2 import Olmo2


@FAMILIES.register("exaone4")
class Exaone4(Olmo2):
    """Exaone 4. Without any window all layers turn; with windows, layers that see everything have no positions."""

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """In windowed layers, or everywhere."""
        return attention.sliding_window is None or bool(attention.is_sliding)
