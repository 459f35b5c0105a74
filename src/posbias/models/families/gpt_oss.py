"""GPT-OSS: learned sinks in the softmax, mixtures of experts with clamped gates, windows in every other layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.models.families.base import FAMILIES, AttentionParts, Block, MixtureParts, MlpParts
from posbias.models.families.llama_like import LlamaLike
from posbias.models.families.projections import bias_of, readable, weight_of


@FAMILIES.register("gpt_oss")
class GptOss(LlamaLike):
    """GPT-OSS."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and a learned sink for every head."""
        return replace(super().attention_parts(block, config), sinks=readable(block.attention, "sinks").detach())

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts:
        """In every block, held as [expert, in, out], gate and up in turn; the weights of the chosen sum to 1."""
        experts, router = block.mlp.get_submodule("experts"), block.mlp.get_submodule("router")
        both, downs = readable(experts, "gate_up_proj").transpose(1, 2), readable(experts, "down_proj").transpose(1, 2)
        both_bias, down_bias = readable(experts, "gate_up_proj_bias"), readable(experts, "down_proj_bias")
        alpha, limit = float(config.swiglu_alpha), float(config.swiglu_limit)

        def gate(before: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
            held = before.clamp(max=limit)
            return held * torch.sigmoid(alpha * held)

        def up(before: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
            return before.clamp(-limit, limit) + 1

        return MixtureParts(
            experts=tuple(
                MlpParts(
                    up=both[expert, 1::2],
                    down=downs[expert],
                    gate=both[expert, ::2],
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

    def angles(
        self, attention: nn.Module, arguments: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "position rotary"], Float[Tensor, "position rotary"]]:
        """Given for half of the features: the other half turns by the same."""
        cosine, sine = super().angles(attention, arguments)
        return torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
