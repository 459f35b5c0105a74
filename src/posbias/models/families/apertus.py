"""Apertus: Llama with norms on queries and keys and a plain MLP whose activation, xIELU, is learned."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MlpParts
from posbias.models.families.llama_like import NormedQueriesAndKeys
from posbias.models.families.projections import plain_mlp


@FAMILIES.register("apertus")
class Apertus(NormedQueriesAndKeys):
    """Apertus."""

    attention_norm = "attention_layernorm"
    mlp_norm = "feedforward_layernorm"

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """`up_proj`, activation, `down_proj`."""
        return plain_mlp(block.mlp.get_submodule("up_proj"), block.mlp.get_submodule("down_proj"), block.mlp.act_fn)
