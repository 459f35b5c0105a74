"""Helium: Llama with neighbouring features turned."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import TurnedNeighbours


@FAMILIES.register("helium")
class Helium(TurnedNeighbours):
    """Helium."""
