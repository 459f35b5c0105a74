"""The families whose MLPs are mixtures of experts: Mixtral, OLMoE, Qwen 3 MoE and GPT-OSS."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.models.families.base import FAMILIES, Angles, Block
from posbias.models.families.llama_like import Q_AND_K, LlamaLike
from posbias.models.families.parts import AttentionParts, MixtureParts, MlpParts, bias_of, readable, weight_of


class GatedExperts(LlamaLike):
    """Blocks, all or some, with a router `gate` and gated `experts` held together as [expert, out, in]."""

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """The weights of the chosen experts sum to 1 unless `norm_topk_prob` is there and says otherwise."""
        if not hasattr(block.mlp, "experts"):
            return None
        experts, router = block.mlp.get_submodule("experts"), block.mlp.get_submodule("gate")
        gates_and_ups, downs = readable(experts, "gate_up_proj"), readable(experts, "down_proj")
        return MixtureParts(
            experts=tuple(
                MlpParts(up=up, down=down, gate=gate, activation=experts.act_fn)
                for (gate, up), down in zip((gate_and_up.chunk(2) for gate_and_up in gates_and_ups), downs, strict=True)
            ),
            router=weight_of(router),
            router_module=router,
            renormalised=bool(getattr(config, "norm_topk_prob", True)),
        )


@FAMILIES.register("mixtral")
class Mixtral(GatedExperts):
    """Mixtral: Mistral with a mixture of experts for each MLP."""

    windows = "all layers"


@FAMILIES.register("olmoe")
class Olmoe(GatedExperts):
    """OLMoE: Llama with queries and keys normalised over all their features and mixtures of experts for MLPs."""

    query_key_norms = Q_AND_K
    refused = (*LlamaLike.refused, "clip_qkv")  # the clamp comes after the norm, and is in no published checkpoint


@FAMILIES.register("qwen3_moe")
class Qwen3Moe(GatedExperts):
    """Qwen 3 MoE: Qwen 3 with mixtures of experts for MLPs and one window, if any, for all layers."""

    windows = "all layers"
    query_key_norms = Q_AND_K


@FAMILIES.register("gpt_oss")
class GptOss(LlamaLike):
    """GPT-OSS: learned sinks in the softmax, mixtures of experts with clamped gates, windows in every other layer."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and a learned sink for every head."""
        return replace(super().attention_parts(block, config), sinks=readable(block.attention, "sinks").detach())

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts:
        """Every block has experts, stored as [expert, in, out], gate and up in turn; weights of the chosen sum to 1."""
        experts, router = block.mlp.get_submodule("experts"), block.mlp.get_submodule("router")
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
            renormalised=True,
            router_bias=bias_of(router),
        )

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Angles come for half of the features: the other half turns by the same."""
        cosine, sine = super().angles(attention, arguments)
        return torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
