"""The families whose MLPs are mixtures of experts: which experts, how the chosen are weighed, what stands beside."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.architecture import Causal, Chunks, Mask
from posbias.models.families.base import FAMILIES, Angles, Block
from posbias.models.families.llama_like import Q_AND_K, Granite, LlamaLike
from posbias.models.families.parts import (
    AttentionParts,
    Latent,
    MixtureParts,
    MlpParts,
    Norm,
    bias_of,
    readable,
    weight_of,
)

Logits = Float[Tensor, "token expert"]
Weights = Float[Tensor, "token top"]


class RoutedExperts(LlamaLike):
    """Blocks, all or some, with a router and `experts` held together, gated or not."""

    router: ClassVar[str] = "gate"
    logistic_router: ClassVar[bool] = False
    shared_expert: ClassVar[str | None] = None
    """An expert for all tokens, in the mixture, with a gate of its own if there is one called like it."""
    inputs_first: ClassVar[bool] = False
    """Maps of experts are stored as [expert, in, out]; otherwise as [expert, out, in]."""

    def renormalised(self, config: Any) -> bool:
        """The weights of the chosen experts sum to 1 unless `norm_topk_prob` is there and says otherwise."""
        return bool(getattr(config, "norm_topk_prob", True))

    def weights(self, logits: Logits, chosen: Int[Tensor, "token top"], config: Any) -> Weights:
        """Weights of the chosen experts, from their probabilities: a softmax over all, or logistic functions."""
        probability = logits.sigmoid() if self.logistic_router else logits.softmax(-1)
        of_chosen = probability.gather(1, chosen)
        weights = of_chosen * float(getattr(config, "routed_scaling_factor", None) or 1.0)
        return weights / of_chosen.sum(-1, keepdim=True) if self.renormalised(config) else weights

    def shared_module(self, block: Block) -> nn.Module | None:
        """The expert for all tokens."""
        return None if self.shared_expert is None else self.mlp_module(block).get_submodule(self.shared_expert)

    def expert_parts(self, experts: nn.Module) -> tuple[MlpParts, ...]:
        """Maps of every expert, with a gate if the experts hold one."""

        def stored(name: str) -> Tensor:
            return readable(experts, name).mT if self.inputs_first else readable(experts, name)

        if hasattr(experts, "gate_up_proj"):
            maps = [tuple(both.chunk(2)) for both in stored("gate_up_proj")]
        else:
            maps = [(None, up) for up in stored("up_proj")]
        activation: Any = experts.act_fn
        return tuple(
            MlpParts(up=up, down=down, gate=gate, activation=activation)
            for (gate, up), down in zip(maps, stored("down_proj"), strict=True)
        )

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """Experts, router, and the shared expert if there is one; with the factor on branches."""
        if not self.is_mixture(block):
            return None
        mlp = next(module for module in self.mlp_modules(block) if hasattr(module, "experts"))
        experts, router = mlp.get_submodule("experts"), mlp.get_submodule(self.router)
        shared, gate_of_shared = self.shared_module(block), getattr(mlp, f"{self.shared_expert}_gate", None)
        return MixtureParts(
            experts=self.expert_parts(experts),
            router=weight_of(router),
            router_module=router,
            weigh=lambda logits, chosen: block.mlp_scale * self.weights(logits, chosen, config),
            shared=None if shared is None else block.mlp_added(self.mlp_within(shared)),
            shared_gate=None if gate_of_shared is None else weight_of(gate_of_shared),
        )


@FAMILIES.register("mixtral")
class Mixtral(RoutedExperts):
    """Mixtral: Mistral with a mixture of experts for each MLP."""

    windows = "all layers"


@FAMILIES.register("olmoe")
class Olmoe(RoutedExperts):
    """OLMoE: Llama with queries and keys normalised over all their features and mixtures of experts for MLPs."""

    query_key_norms = Q_AND_K
    refused = (*LlamaLike.refused, "clip_qkv")  # the clamp comes after the norm, and is in no published checkpoint


@FAMILIES.register("qwen3_moe")
class Qwen3Moe(RoutedExperts):
    """Qwen 3 MoE: Qwen 3 with mixtures of experts for MLPs and one window, if any, for all layers."""

    windows = "all layers"
    query_key_norms = Q_AND_K


@FAMILIES.register("gpt_oss")
class GptOss(LlamaLike):
    """GPT-OSS: learned sinks in the softmax, mixtures of experts with clamped gates, windows in every other layer."""

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts:
        """Every block has experts, stored as [expert, in, out], gate and up in turn; weights of the chosen sum to 1."""
        mlp = self.mlp_module(block)
        experts, router = mlp.get_submodule("experts"), mlp.get_submodule("router")
        gates_and_ups, downs = (
            readable(experts, "gate_up_proj").transpose(1, 2),
            readable(experts, "down_proj").transpose(1, 2),
        )
        both_bias, down_bias = readable(experts, "gate_up_proj_bias"), readable(experts, "down_proj_bias")
        alpha, limit = float(config.swiglu_alpha), float(config.swiglu_limit)

        def gate(before: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
            clamped = before.clamp(max=limit)
            return clamped * torch.sigmoid(alpha * clamped)

        def up(before: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
            return before.clamp(-limit, limit) + 1

        return MixtureParts(
            experts=tuple(
                MlpParts(
                    up=gates_and_ups[expert, 1::2],
                    down=downs[expert],
                    gate=gates_and_ups[expert, ::2],
                    activation=gate,
                    up_activation=up,
                    up_bias=both_bias[expert, 1::2],
                    down_bias=down_bias[expert],
                    gate_bias=both_bias[expert, ::2],
                )
                for expert in range(len(downs))
            ),
            router=weight_of(router),
            router_module=router,
            weigh=lambda logits, chosen: logits.gather(1, chosen).softmax(-1),
            router_bias=bias_of(router),
        )

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Angles come for half of the features: the other half turns by the same."""
        cosine, sine = super().angles(attention, arguments)
        return torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)


@FAMILIES.register("llama4_text")
class Llama4(RoutedExperts):
    """Llama 4 (text): causal chunks, no positions in some layers, experts that read what the router has scaled.

    Layers in chunks turn and normalise queries and keys. transformers turns them before it normalises each head by its
    root mean square, which is the same. Queries of the other layers have factors. A shared expert stands beside the
    routed ones.
    """

    mlp = "feed_forward"
    activation = "activation_fn"
    turns_neighbours = True
    no_mean_field = "factors on queries by position"
    router = "router"
    inputs_first = True
    logistic_router = True
    shared_expert = "shared_expert"

    def mask(self, config: Any, layer: int) -> Mask:
        """Chunks, if `layer_types` says so."""
        return Chunks(config.attention_chunk_size) if config.layer_types[layer] == "chunked_attention" else Causal()

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Layers whose `no_rope_layers` is 1 turn."""
        return bool(attention.use_rope)

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Real and imaginary parts, one for each pair of features."""
        turns = arguments["position_embeddings"][0]
        return torch.cat([turns.real] * 2, -1), torch.cat([turns.imag] * 2, -1)

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with norms without a gain in layers that turn, and the factors on queries in others."""
        parts, attention = super().attention_parts(block, config), cast(Any, block.attention)
        if hasattr(attention, "qk_norm"):
            norm = Norm("rms", gain=torch.ones(parts.head_dim), bias=None, epsilon=float(attention.qk_norm.eps))
            return replace(parts, query_norm=norm, key_norm=norm)
        if attention.use_rope or not attention.attn_temperature_tuning:
            return parts

        def factors(n_positions: int) -> Float[Tensor, "n_positions"]:
            steps = torch.arange(1.0, n_positions + 1.0).div(float(attention.floor_scale)).floor()
            return 1 + float(attention.attn_scale) * steps.log1p()

        return replace(parts, query_factors=factors)

    def renormalised(self, config: Any) -> bool:
        """The factors are the logistic functions of the chosen experts' logits."""
        return False

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """The parts of every mixture, with the factors on what the experts read."""
        parts = super().mixture_parts(block, config)
        return parts and replace(parts, scales_input=True, top=int(config.num_experts_per_tok))


@FAMILIES.register("qwen2_moe")
class Qwen2Moe(RoutedExperts):
    """Qwen 2 MoE: Qwen 2 with mixtures of experts and a shared one."""

    shared_expert = "shared_expert"


@FAMILIES.register("granitemoe")
class GraniteMoe(RoutedExperts, Granite):
    """Granite MoE: Granite with mixtures of experts."""

    mlp = "block_sparse_moe"
    router = "router"


@FAMILIES.register("phimoe")
class PhiMoe(RoutedExperts):
    """Phi 3.5 MoE: Llama with LayerNorms, one window, if any, for all layers, and mixtures of experts."""

    windows = "all layers"
    router = "router"

    def weights(self, logits: Logits, chosen: Int[Tensor, "token top"], config: Any) -> Weights:
        """Each by a softmax over the experts that nearly won its choice, without those of the choices before."""
        left, weights = logits, []
        for expert in chosen.T[..., None]:
            best = left.gather(1, expert)
            far = (best - logits) / logits.abs().maximum(best) > 2 * config.router_jitter_noise
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, expert))
            left = left.scatter(1, expert, -torch.inf)
        return torch.cat(weights, 1)


@FAMILIES.register("glm4_moe")
class Glm4Moe(RoutedExperts):
    """GLM 4.5: Llama with norms on queries and keys if configured, partial rotation and mixtures of experts."""

    query_key_norms = Q_AND_K
    query_key_norm_switch = "use_qk_norm"
    logistic_router = True
    shared_expert = "shared_experts"


@FAMILIES.register("mimo_v2_flash")
class MiMoV2Flash(RoutedExperts):
    """MiMo V2 Flash: windowed layers with learned sinks and twice the key heads, values of a size of their own."""

    logistic_router = True

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the layer's own key heads, and its factor on values in their map."""
        parts, scale = super().attention_parts(block, config), float(vars(block.attention)["v_scale"])
        bias = None if parts.value_bias is None else parts.value_bias * scale
        own = len(parts.key) // parts.head_dim
        return replace(parts, key_heads=own, value=parts.value * scale, value_bias=bias)


@FAMILIES.register("deepseek_v3")
class DeepseekV3(RoutedExperts):
    """DeepSeek V3 and R1, Kimi K2, Moonlight: queries, keys and values made of latents, mixtures of experts.

    A head's key is its own share of the latent, not turned, and a turned share that all heads have in common. Turned
    features are listed first here, neighbours as halves, which changes no product of a query with a key.
    """

    packs_projections = True
    logistic_router = True
    no_mean_field = "queries, keys and values made of latents"
    shared_expert = "shared_experts"

    def key_heads(self, config: Any) -> int:
        """Every head has keys of its own, once they are made."""
        return self.heads(config)

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Maps from the latents, one after the other: of queries, of keys and values, and the share that turns."""
        attention: Any = block.attention
        heads, turned, plain = self.heads(config), int(config.qk_rope_head_dim), int(config.qk_nope_head_dim)
        order = torch.arange(turned)
        if config.rope_interleave:
            order = order.reshape(-1, 2).T.flatten()
        down, rank = weight_of(attention.kv_a_proj_with_mqa), int(config.kv_lora_rank)
        bias = bias_of(attention.kv_a_proj_with_mqa)
        halves = (slice(rank), slice(rank, None))
        shared, turning = (Latent(down[rows], None if bias is None else bias[rows], None) for rows in halves)
        shared = replace(shared, norm=self.norm(attention.kv_a_layernorm))
        if config.q_lora_rank is None:
            asking, up = Latent(weight_of(attention.q_proj), None, None), torch.eye(heads * (turned + plain)).to(down)
        else:
            norm = self.norm(attention.q_a_layernorm)
            asking = Latent(weight_of(attention.q_a_proj), bias_of(attention.q_a_proj), norm)
            up = weight_of(attention.q_b_proj)
        by_head = up.reshape(heads, plain + turned, -1)
        query = torch.cat([by_head[:, plain:][:, order.to(up.device)], by_head[:, :plain]], 1).flatten(0, 1)
        from_shared = weight_of(attention.kv_b_proj).reshape(heads, -1, rank)
        common = torch.eye(turned).to(down)[order.to(down.device)].expand(heads, -1, -1)

        def placed(rows: Tensor, before: int, after: int) -> Tensor:
            return nn.functional.pad(rows, (before, after))

        asked = up.shape[1]
        key = torch.cat([placed(common, asked + rank, 0), placed(from_shared[:, :plain], asked, turned)], 1)
        return AttentionParts(
            query=placed(query, 0, rank + turned),
            key=key.flatten(0, 1),
            value=placed(from_shared[:, plain:].flatten(0, 1), asked, turned),
            output=weight_of(block.attention_output),
            heads=heads,
            key_heads=heads,
            head_dim=turned + plain,
            scale=self.logit_scale(attention),
            output_bias=bias_of(block.attention_output),
            latents=(asking, shared, turning),
        )
