"""Arcee (AFM): Llama with a plain MLP and squared ReLU."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MlpParts
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import plain_mlp


@FAMILIES.register("arcee")
class Arcee(LlamaLike):
    """Arcee."""

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """`up_proj`, activation, `down_proj`."""
        return plain_mlp(block.mlp.get_submodule("up_proj"), block.mlp.get_submodule("down_proj"), block.mlp.act_fn)
