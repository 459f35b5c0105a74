"""Mixtral: Mistral with a mixture of experts for each MLP."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MixtureParts
from posbias.models.families.mistral import Mistral
from posbias.models.families.projections import gated_mixture


@FAMILIES.register("mixtral")
class Mixtral(Mistral):
    """Mixtral."""

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts:
        """In every block; the weights of the chosen experts sum to 1."""
        return gated_mixture(block.mlp, renormalised=True)
