"""Ernie 4.5 (dense): Llama with neighbouring features turned, in float32."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import TurnedNeighbours


@FAMILIES.register("ernie4_5")
class Ernie45(TurnedNeighbours):
    """Ernie 4.5. Queries and keys are turned in float32, whatever the dtype of the weights."""
