"""OLMo 2: no norm before the branches, one after each; queries and keys normalised over all their features."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import NormedQueriesAndKeys


@FAMILIES.register("olmo2")
class Olmo2(NormedQueriesAndKeys):
    """OLMo 2."""

    attention_norm = None
    attention_post_norm = "post_attention_layernorm"
    mlp_norm = None
    mlp_post_norm = "post_feedforward_layernorm"
