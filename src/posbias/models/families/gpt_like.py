"""GPT-2 and its descendants, OPT and Phi: LayerNorm, a plain MLP, learned positions or rotary ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from posbias.architecture import Causal, Mask, SlidingWindow
from posbias.models.families.base import FAMILIES, Angles, Block, Family


@FAMILIES.register("gpt2")
class GPT2(Family):
    """GPT-2: learned positions, LayerNorm, fused projections stored as [in, out] (`Conv1D`)."""

    layers = "transformer.h"
    final_norm = "transformer.ln_f"
    position_table = "transformer.wpe"
    rotary = False
    attention = "attn"
    attention_output = "attn.c_proj"
    attention_norm = "ln_1"
    mlp_norm = "ln_2"
    query_key_value: ClassVar[tuple[str, ...]] = ("c_attn",)
    up_and_down = ("c_fc", "c_proj")
    activation = "act"
    refused: ClassVar[tuple[str, ...]] = ("add_cross_attention",)  # it would be a branch of its own


@FAMILIES.register("gpt_neo")
class GPTNeo(GPT2):
    """GPT-Neo: learned positions, windows in every other layer, and logits q.k without 1 / sqrt(head_dim).

    Attention is computed in float32, whatever the dtype of the weights.
    """

    replaceable = False
    attention = "attn.attention"
    attention_output = "attn.attention.out_proj"
    query_key_value = Family.query_key_value
    refused = ()

    def mask(self, config: Any, layer: int) -> Mask:
        """`window_size` keys, the query's own included, in local layers; causal in global ones."""
        local = config.attention_layers[layer] == "local"
        return SlidingWindow(width=int(config.window_size)) if local else Causal()

    def logit_scale(self, attention: nn.Module) -> float:
        """Nothing divides the logits."""
        return 1.0


@FAMILIES.register("gpt_neox")
class GPTNeoX(Family):
    """GPT-NeoX (Pythia): attention and MLP side by side, partial rotary positions, one projection for each head."""

    layers = "gpt_neox.layers"
    final_norm = "gpt_neox.final_layer_norm"
    attention = "attention"
    attention_output = "attention.dense"
    query_key_value = ("query_key_value",)
    fusion = "interleaved"
    up_and_down = ("dense_h_to_4h", "dense_4h_to_h")
    activation = "act"
    parallel_switch = "use_parallel_residual"


@FAMILIES.register("gptj")
class GPTJ(Family):
    """GPT-J: attention and MLP side by side behind one LayerNorm, neighbouring features turned by rotary positions.

    Attention is computed in float32, whatever the dtype of the weights.
    """

    replaceable = False
    layers = "transformer.h"
    final_norm = "transformer.ln_f"
    parallel = True
    turns_neighbours = True
    attention = "attn"
    attention_output = "attn.out_proj"
    attention_norm = "ln_1"
    mlp_norm = "ln_1"
    up_and_down = ("fc_in", "fc_out")
    activation = "act"

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Each layer keeps its own table, sines then cosines, one angle per pair of features."""
        table: Any = attention.embed_positions
        sine, cosine = table[arguments["position_ids"][0].to(table.device)].chunk(2, -1)
        return torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)

    def rotary_frequencies(
        self, network: nn.Module, block: Block, *, config: Any, layer: int
    ) -> Float64[np.ndarray, "pairs"]:
        """The angles of position 1 in the layer's table."""
        table: Any = block.attention.embed_positions
        sine, cosine = table[1].cpu().double().chunk(2)
        return np.asarray(torch.atan2(sine, cosine).numpy())

    def logit_scale(self, attention: nn.Module) -> float:
        """The attention divides by `scale_attn`."""
        return 1 / float(attention.scale_attn)  # type: ignore[arg-type]

    def turned(self, config: Any, head_dim: int) -> int:
        """`rotary_dim` features, or whole heads."""
        return int(config.rotary_dim or head_dim)


@FAMILIES.register("codegen")
class CodeGen(GPTJ):
    """CodeGen: GPT-J with one map for queries, values and keys, cut for four devices."""

    query_key_value = ("qkv_proj",)
    fusion = "by device"


@FAMILIES.register("phi")
class Phi(Family):
    """Phi 1 and 2: attention and MLP side by side behind one LayerNorm, partial rotary positions."""

    groups_heads = True
    final_norm = "model.final_layernorm"
    parallel = True
    attention_output = "self_attn.dense"
    mlp_norm = "input_layernorm"
    query_key_norms = ("q_layernorm", "k_layernorm")
    query_key_norm_switch = "qk_layernorm"
    up_and_down = ("fc1", "fc2")
    activation = "activation_fn"


@FAMILIES.register("opt")
class OPT(Family):
    """OPT: learned positions (table rows shifted by 2), LayerNorm, optional projections around the blocks.

    OPT-350M (`do_layer_norm_before` false) normalises the stream after each addition instead of the branch's input,
    and its embeddings are narrower than its blocks (`word_embed_proj_dim`); the vectors entering the network are the
    narrow ones. Its blocks have no MLP module; `Block.mlp` is `fc2`, whose output is the MLP branch.
    """

    layers = "model.decoder.layers"
    final_norm = "model.decoder.final_layer_norm"
    position_table = "model.decoder.embed_positions"
    position_offset = 2
    rotary = False
    attention_output = "self_attn.out_proj"
    attention_norm = "self_attn_layer_norm"
    mlp = "fc2"
    mlp_norm = "final_layer_norm"
    up_and_down = ("fc1", "fc2")
    activation = "activation_fn"

    def final_norm_module(self, network: nn.Module) -> nn.Module | None:
        """The norm after the last block; OPT-350M has none."""
        norm = getattr(network.get_submodule("model.decoder"), "final_layer_norm", None)
        return norm if isinstance(norm, nn.Module) else None

    def projections(self, network: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """`project_in` and `project_out`, where the embeddings are narrower than the blocks."""
        decoder: Any = network.get_submodule("model.decoder")
        return decoder.project_in, decoder.project_out

    def block(self, module: nn.Module) -> Block:
        """Norms before the branches, or after the additions in OPT-350M."""
        block = super().block(module)
        if module.do_layer_norm_before:
            return block
        return replace(
            block,
            attention_norm=None,
            mlp_norm=None,
            attention_stream_norm=block.attention_norm,
            mlp_stream_norm=block.mlp_norm,
        )

    def mlp_module(self, block: Block) -> nn.Module:
        """The block itself."""
        return block.module
