"""Nemotron and Minitron: LayerNorm with gain 1 + weight, a plain MLP with squared ReLU, partial rotation."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MlpParts
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import plain_mlp


@FAMILIES.register("nemotron")
class Nemotron(LlamaLike):
    """Nemotron. transformers draws new weights with norms at weight 1, hence gain 2; published ones have their own."""

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """`up_proj`, activation, `down_proj`."""
        return plain_mlp(block.mlp.get_submodule("up_proj"), block.mlp.get_submodule("down_proj"), block.mlp.act_fn)
