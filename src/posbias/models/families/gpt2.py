"""GPT-2: learned positions, LayerNorm, fused projections stored as [in, out] (`Conv1D`)."""

from typing import Any

from posbias.architecture import Causal, Encoding, Mask, NoEncoding
from posbias.models.families.base import FAMILIES, AttentionParts, Block, Family, MlpParts
from posbias.models.families.projections import fused_attention, plain_mlp


@FAMILIES.register("gpt2")
class GPT2(Family):
    """GPT-2."""

    layers = "transformer.h"
    final_norm = "transformer.ln_f"
    position_table = "transformer.wpe"
    attention = "attn"
    attention_output = "attn.c_proj"
    attention_norm = "ln_1"
    mlp_norm = "ln_2"

    def heads(self, config: Any) -> int:
        """Heads per layer."""
        return int(config.n_head)

    def depth(self, config: Any) -> int:
        """Decoder blocks."""
        return int(config.n_layer)

    def max_positions(self, config: Any) -> int | None:
        """Rows of the position table."""
        return int(config.n_positions)

    def mask(self, config: Any, layer: int) -> Mask:
        """Causal everywhere."""
        return Causal()

    def encoding(self, config: Any, layer: int) -> Encoding:
        """None: learned positions are added to the input, not to the logits."""
        return NoEncoding()

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """The thirds of `c_attn`."""
        scale: Any = block.attention.scaling
        fused = block.attention.get_submodule("c_attn")
        return fused_attention(fused, block.attention_output, heads=self.heads(config), order="stacked", scale=scale)

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """`c_fc`, activation, `c_proj`."""
        return plain_mlp(block.mlp.get_submodule("c_fc"), block.mlp.get_submodule("c_proj"), block.mlp.act)

    def unsupported(self, config: Any) -> str | None:
        """Cross-attention would be a branch of its own."""
        return "add_cross_attention is set" if config.add_cross_attention else None
