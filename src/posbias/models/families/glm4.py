"""GLM-4 of 2025 (`model_type: glm4`): GLM with a norm after each branch as well."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.glm import Glm


@FAMILIES.register("glm4")
class Glm4(Glm):
    """GLM-4."""

    attention_post_norm = "post_self_attn_layernorm"
    mlp_post_norm = "post_mlp_layernorm"
