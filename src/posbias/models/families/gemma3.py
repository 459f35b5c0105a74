"""Gemma 3 (text): norms before and after each branch with gain 1 + weight, local and global layers, q/k norm.

Embeddings are multiplied by sqrt(width) inside the embedding layer, so the vectors entering the network carry it.
"""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import NormedQueriesAndKeys


@FAMILIES.register("gemma3_text")
class Gemma3(NormedQueriesAndKeys):
    """Gemma 3. The logit scale is `query_pre_attn_scalar ** -0.5`; transformers applies no soft cap to its logits."""

    attention_post_norm = "post_attention_layernorm"
    mlp_norm = "pre_feedforward_layernorm"
    mlp_post_norm = "post_feedforward_layernorm"
