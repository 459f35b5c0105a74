"""GLM-4 of 2024 (`model_type: glm`): Llama with a fused gated MLP and half of each head's neighbours turned."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MlpParts
from posbias.models.families.llama_like import TurnedNeighbours
from posbias.models.families.projections import fused_gated_mlp


@FAMILIES.register("glm")
class Glm(TurnedNeighbours):
    """GLM."""

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The halves of `gate_up_proj`."""
        return fused_gated_mlp(block.mlp, block.mlp.activation_fn)
