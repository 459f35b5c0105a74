"""OLMoE: Llama with queries and keys normalised over all their features and mixtures of experts for MLPs."""

from typing import Any

from posbias.models.families.base import FAMILIES, Block, MixtureParts
from posbias.models.families.llama_like import NormedQueriesAndKeys
from posbias.models.families.projections import gated_mixture


@FAMILIES.register("olmoe")
class Olmoe(NormedQueriesAndKeys):
    """OLMoE."""

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts:
        """In every block; `norm_topk_prob` says whether the chosen weights sum to 1."""
        return gated_mixture(block.mlp, renormalised=bool(config.norm_topk_prob))

    def unsupported(self, config: Any) -> str | None:
        """Clamped queries and keys: the clamp comes after their norm, and is in no published checkpoint."""
        return super().unsupported(config) or ("clip_qkv is set" if config.clip_qkv is not None else None)
