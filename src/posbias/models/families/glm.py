"""GLM-4 of 2024 (`model_type: glm`): Llama with a fused gated MLP and half of each head's neighbours turned."""

from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block, MlpParts
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import fused_gated_mlp, neighbours_as_halves


@FAMILIES.register("glm")
class Glm(LlamaLike):
    """GLM."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the turned features of each head listed so that halves turn."""
        parts = super().attention_parts(block, config)
        share = float(config.rope_parameters.get("partial_rotary_factor", 1.0))
        return neighbours_as_halves(parts, int(parts.head_dim * share))

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The halves of `gate_up_proj`."""
        return fused_gated_mlp(block.mlp, block.mlp.activation_fn)
