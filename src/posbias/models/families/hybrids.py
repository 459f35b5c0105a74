"""Families whose blocks mix positions by state-space, gated linear or convolutional layers, some or all of them.

Such a layer has no attention matrix: it is a branch like attention, and its kernel is that of its decays
(docs/theory, section 5). What its blocks have of attention is described as in any other family.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from posbias.architecture import Causal, Mask, SlidingWindow
from posbias.models.devices import in_float64
from posbias.models.families.base import FAMILIES, Angles, Block, Mixer
from posbias.models.families.experts import RoutedExperts
from posbias.models.families.llama_like import Q_AND_K, Granite, LlamaLike
from posbias.models.families.parts import AttentionParts, Latent, MixtureParts, MlpParts, bias_of, readable, weight_of

RG_LRU_POWER = 8.0
"""A literal of Griffin: log decay = -8 * gate * softplus(parameter)."""


def softplus_decays(log_rates: torch.Tensor, steps: torch.Tensor) -> Float64[np.ndarray, "decays"]:
    """exp(log_rates) * softplus(steps), flattened: nats of state lost per position at a bare bias of the step."""
    rates, sizes = in_float64(log_rates.detach()).exp(), nn.functional.softplus(in_float64(steps.detach()))
    return np.asarray((rates * sizes.reshape(-1, *[1] * (rates.ndim - 1))).flatten().cpu().numpy())


class Hybrid(LlamaLike):
    """Llama whose attention is replaced by another layer in some blocks."""

    linear = "mamba"

    def decays(self, layer: nn.Module) -> Float64[np.ndarray, "decays"]:
        """A rate per head times its step (Mamba 2, gated DeltaNet)."""
        return softplus_decays(readable(layer, "A_log"), readable(layer, "dt_bias"))


@FAMILIES.register("qwen3_5_text")
class Qwen35(Hybrid):
    """Qwen 3.5 (text): gated DeltaNet layers, and attention with normalised queries and keys and gated outputs."""

    linear = "linear_attn"
    query_key_norms = Q_AND_K
    packs_projections = True

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Queries of every head, then its gate, lie in one map."""
        parts, heads = super().attention_parts(block, config), self.heads(config)

        def halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            query, gate = rows.reshape(heads, 2, -1, *rows.shape[1:]).unbind(1)
            return query.flatten(0, 1), gate.flatten(0, 1)

        query, gate = halves(parts.query)
        parts = replace(parts, query=query, gate=gate, head_dim=len(query) // heads)
        if parts.query_bias is None:
            return parts
        bias, gate_bias = halves(parts.query_bias)
        return replace(parts, query_bias=bias, gate_bias=gate_bias)


@FAMILIES.register("qwen3_next")
class Qwen3Next(RoutedExperts, Qwen35):
    """Qwen 3 Next: Qwen 3.5 with mixtures of experts and a shared one for MLPs."""

    shared_expert = "shared_expert"


@FAMILIES.register("olmo_hybrid")
class OlmoHybrid(Hybrid):
    """OLMo Hybrid: OLMo 3 in attention blocks, gated DeltaNet layers behind a norm in the others."""

    linear = "linear_attn"
    linear_output = "o_proj"
    attention_norm = None
    query_key_norms = Q_AND_K

    def block(self, module: nn.Module) -> Block:
        """Attention and its MLP have norms behind them, linear layers and theirs before them."""
        block = super().block(module)
        if block.linear is not None:
            return replace(block, attention_norm=module.get_submodule("input_layernorm"))
        after, last = (module.get_submodule(f"post_{branch}_layernorm") for branch in ("attention", "feedforward"))
        return replace(block, attention_post_norm=after, mlp_norm=None, mlp_post_norm=last)


@FAMILIES.register("lfm2")
class Lfm2(Hybrid):
    """LFM 2: gated short convolutions, and attention with normalised queries and keys."""

    linear = "conv"
    final_norm = "model.embedding_norm"
    attention_output = "self_attn.out_proj"
    attention_norm = "operator_norm"
    mlp = "feed_forward"
    mlp_norm = "ffn_norm"
    query_key_norms = ("q_layernorm", "k_layernorm")
    up_and_down = ("w3", "w2")
    gate = "w1"

    def mask(self, config: Any, layer: int) -> Mask:
        """A convolution sees as many positions as its kernel is long."""
        if config.layer_types[layer] == "conv":
            return SlidingWindow(width=int(config.conv_L_cache))
        return super().mask(config, layer)

    def mlp_within(self, module: nn.Module) -> MlpParts:
        """Gated, by SiLU."""
        gate, up, down = (weight_of(module.get_submodule(name)) for name in ("w1", "w3", "w2"))
        return MlpParts(up=up, down=down, gate=gate, activation=nn.functional.silu)

    def decays(self, layer: nn.Module) -> Float64[np.ndarray, "decays"]:
        """A convolution weighs the positions of its window evenly until its weights are known."""
        return np.zeros(1)


@FAMILIES.register("granitemoehybrid")
class GraniteHybrid(RoutedExperts, Granite, Hybrid):
    """Granite 4: Granite's factors, Mamba 2 layers, mixtures of experts beside a shared MLP, rotary if configured."""

    mlp = "shared_mlp"
    router = "router"
    up_and_down = ("input_linear", "output_linear")
    gate_in_up = True
    activation = "activation"

    def mlp_modules(self, block: Block) -> tuple[nn.Module, ...]:
        """The shared MLP, and the mixture beside it if there is one."""
        mixture: Any = block.module.block_sparse_moe
        return (self.mlp_module(block), *([] if mixture is None else [mixture]))

    def shared_module(self, block: Block) -> nn.Module:
        """The MLP beside the mixture."""
        return self.mlp_module(block)

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Positions turn queries and keys if the configuration says so."""
        return bool(config.position_embedding_type == "rope")


@FAMILIES.register("bamba")
class Bamba(Hybrid):
    """Bamba: Llama with Mamba 2 layers and half of each head turned."""

    final_norm = "model.final_layernorm"
    mlp = "feed_forward"
    mlp_norm = "pre_ff_layernorm"


@FAMILIES.register("jamba")
class Jamba(RoutedExperts, Bamba):
    """Jamba: Mamba layers, attention without any positions, mixtures of experts in some blocks."""

    rotary = False
    router = "router"

    def renormalised(self, config: Any) -> bool:
        """The weights of the chosen experts are their probabilities."""
        return False

    def decays(self, layer: nn.Module) -> Float64[np.ndarray, "decays"]:
        """A rate per channel and state times the channel's step."""
        return softplus_decays(readable(layer, "A_log"), readable(layer.get_submodule("dt_proj"), "bias"))


@FAMILIES.register("falcon_h1")
class FalconH1(Bamba):
    """Falcon-H1: attention and a Mamba 2 layer side by side in every block, factors on nearly every map.

    Those of the Mamba 2 layer's own maps are within it.
    """

    side_by_side = True

    def block(self, module: nn.Module) -> Block:
        """Bamba's, with the factors on what is added."""
        block, factors = super().block(module), cast(Any, module)
        assert block.softmax is not None
        assert block.linear is not None
        return replace(
            block,
            softmax=replace(block.softmax, scale=float(factors.attn_out_multiplier)),
            linear=replace(block.linear, scale=float(factors.ssm_out_multiplier)),
            mlp_scale=float(factors.feed_forward.down_multiplier),
        )

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the factor on keys in their map."""
        parts, factor = super().attention_parts(block, config), float(config.key_multiplier)
        bias = None if parts.key_bias is None else parts.key_bias * factor
        return replace(parts, key=parts.key * factor, key_bias=bias)

    def mlp_within(self, module: nn.Module) -> MlpParts:
        """Gated, with the factor on the gate in its map."""
        parts, factor = super().mlp_within(module), float(cast(Any, module).gate_multiplier)
        assert parts.gate is not None
        bias = None if parts.gate_bias is None else parts.gate_bias * factor
        return replace(parts, gate=parts.gate * factor, gate_bias=bias)

    def embedding_scale(self, config: Any) -> float:
        """The factor on embeddings."""
        return float(config.embedding_multiplier)

    def unsupported(self, config: Any) -> str | None:
        """A factor on what attention reads, beside the norm that the Mamba 2 layer reads through, has no place here."""
        if config.attention_in_multiplier != 1:
            return f"attention_in_multiplier is {float(config.attention_in_multiplier)}, only 1 is described"
        return super().unsupported(config)


@FAMILIES.register("nemotron_h")
class NemotronH(RoutedExperts, Hybrid):
    """Nemotron-H, Nemotron Nano 2, Nemotron 3: attention, a Mamba 2 layer, an MLP or a mixture alone in each block.

    Attention has no positions; MLPs, experts among them, have no gate.
    """

    final_norm = "model.norm_f"
    rotary = False
    logistic_router = True
    shared_expert = "shared_experts"

    def block(self, module: nn.Module) -> Block:
        """Its norm and its `mixer`, which need not mix positions."""
        sort, layer, norm = (getattr(module, name) for name in ("block_type", "mixer", "norm"))
        if sort == "full_attention":
            return Block(module, softmax=Mixer(layer, layer.o_proj), attention_norm=norm)
        if sort == "linear_attention":
            return Block(module, linear=Mixer(layer, layer.out_proj), attention_norm=norm)
        return Block(module, mlp=layer, mlp_norm=norm)

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """The parts of every mixture, with the maps to a latent that its experts read, and back, if configured."""
        parts = super().mixture_parts(block, config)
        if parts is None or config.moe_latent_size is None:
            return parts
        down, up = (self.mlp_module(block).get_submodule(f"fc{place}_latent_proj") for place in (1, 2))
        return replace(parts, latent=Latent(weight_of(down), bias_of(down), None), from_latent=weight_of(up))

    def mask(self, config: Any, layer: int) -> Mask:
        """In a block that mixes no positions every one sees itself alone."""
        mixes = config.layer_types[layer] in ("full_attention", "linear_attention")
        return Causal() if mixes else SlidingWindow(width=1)


@FAMILIES.register("recurrent_gemma")
class RecurrentGemma(Hybrid):
    """RecurrentGemma (Griffin): gated linear recurrences by channel, and windowed attention."""

    linear = "temporal_block"
    linear_output = "linear_out"
    final_norm = "model.final_norm"
    attention = "temporal_block"
    attention_output = "temporal_block.o_proj"
    attention_norm = "temporal_pre_norm"
    mlp = "mlp_block"
    mlp_norm = "channel_pre_norm"

    def is_linear(self, module: nn.Module) -> bool:
        """Both layers have one name; a recurrence projects no queries."""
        return not hasattr(module.temporal_block, "q_proj")

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Each layer makes its own."""
        like = readable(attention.get_submodule("q_proj"), "weight")
        cosine, sine = attention.get_submodule("rotary_emb")(like, arguments["position_ids"])
        return cosine[0], sine[0]

    def input_scale(self, config: Any) -> float:
        """sqrt(width), rounded to bfloat16."""
        return float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16))

    def linear_call(self, n_positions: int, device: torch.device) -> dict[str, Any]:
        """Position 0 starts from nothing; without a cache no state outlives the call."""
        return {
            "position_ids": torch.arange(n_positions, device=device)[None],
            "attention_mask": None,
            "use_cache": False,
        }

    def decays(self, layer: nn.Module) -> Float64[np.ndarray, "decays"]:
        """By channel, with its gate as its bias leaves it."""
        unit: Any = layer.get_submodule("rg_lru")
        gate = in_float64(readable(unit, "recurrent_gate_bias").detach()).sigmoid().flatten()
        fall = nn.functional.softplus(in_float64(readable(unit, "recurrent_param").detach()))
        return np.asarray((RG_LRU_POWER * gate * fall).cpu().numpy())


@FAMILIES.register("mamba2")
class Mamba2(Hybrid):
    """Mamba 2: state-space layers alone, without attention and without MLPs."""

    attends = False
    layers = "backbone.layers"
    final_norm = "backbone.norm_f"
    linear = "mixer"
    attention_norm = "norm"
    mlp: ClassVar[str | None] = None
    mlp_norm = None

    def heads(self, config: Any) -> int:
        """Heads of its state-space layers."""
        return int(config.num_heads)

    def key_heads(self, config: Any) -> int:
        """Groups that share what is written and read."""
        return int(config.n_groups)

    def mask(self, config: Any, layer: int) -> Mask:
        """Everything before a position."""
        return Causal()
