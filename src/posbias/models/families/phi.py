"""Phi 1 and 2: attention and MLP side by side behind one LayerNorm, partial rotary positions."""

from dataclasses import replace
from typing import Any

from posbias.models.families.base import FAMILIES, AttentionParts, Block, Family, MlpParts
from posbias.models.families.projections import plain_mlp, separate_attention


@FAMILIES.register("phi")
class Phi(Family):
    """Phi; queries and keys are normalised per head where `qk_layernorm` is set."""

    final_norm = "model.final_layernorm"
    parallel = True
    attention_output = "self_attn.dense"
    mlp_norm = "input_layernorm"

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Separate projections."""
        scale: Any = block.attention.scaling
        key_heads = int(config.num_key_value_heads)
        parts = separate_attention(
            block.attention, block.attention_output, heads=self.heads(config), key_heads=key_heads, scale=scale
        )
        if not config.qk_layernorm:
            return parts
        query_norm = self.norm(block.attention.get_submodule("q_layernorm"))
        key_norm = self.norm(block.attention.get_submodule("k_layernorm"))
        return replace(parts, query_norm=query_norm, key_norm=key_norm)

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """`fc1`, activation, `fc2`."""
        return plain_mlp(block.mlp.get_submodule("fc1"), block.mlp.get_submodule("fc2"), block.mlp.activation_fn)
