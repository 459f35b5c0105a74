"""Llama and the decoders modelled on it: RMS norms, separate projections, a gated MLP, rotary positions.

The defaults of `Family` are Llama's; each class says what differs, and an MLP without a gate is read as a plain one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from posbias.errors import UsageError
from posbias.models.families.base import FAMILIES, Angles, Block, Family, Windows
from posbias.models.families.parts import AttentionParts, MlpParts, Norm, read_attention

Q_AND_K = ("q_norm", "k_norm")


class LlamaLike(Family):
    """A pre-norm decoder with rotary positions, fewer key heads if they are grouped, and windows by layer."""

    groups_heads = True
    windows: ClassVar[Windows] = "layer_types"
    refused: ClassVar[tuple[str, ...]] = ("use_bidirectional_attention",)  # of embedding models, which are no decoders


@FAMILIES.register("llama")
class Llama(LlamaLike):
    """Llama 1 to 3 and everything published under `model_type: llama` (SmolLM2 among them)."""


@FAMILIES.register("qwen2")
class Qwen2(LlamaLike):
    """Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows by `layer_types`."""


@FAMILIES.register("seed_oss")
class SeedOss(LlamaLike):
    """Seed-OSS: Llama with biases on queries, keys and values."""


@FAMILIES.register("cwm")
class Cwm(LlamaLike):
    """Code World Model: Llama with a window in some layers."""


@FAMILIES.register("ministral")
class Ministral(LlamaLike):
    """Ministral: Mistral with a window in some layers."""


@FAMILIES.register("mistral")
class Mistral(LlamaLike):
    """Mistral: Llama with one sliding window for all layers; transformers ignores its `layer_types`."""

    windows = "all layers"


@FAMILIES.register("arcee")
class Arcee(LlamaLike):
    """Arcee (AFM): Llama with a plain MLP and squared ReLU."""


@FAMILIES.register("nemotron")
class Nemotron(LlamaLike):
    """Nemotron and Minitron: LayerNorm with gain 1 + weight, a plain MLP with squared ReLU, partial rotation.

    transformers draws new weights with norms at weight 1, hence gain 2; published ones have their own.
    """


@FAMILIES.register("starcoder2")
class StarCoder2(LlamaLike):
    """StarCoder 2: Llama with LayerNorm, biases, a plain MLP and one window for all layers."""

    windows = "all layers"
    up_and_down = ("c_fc", "c_proj")
    activation = "act"


@FAMILIES.register("smollm3")
class SmolLM3(LlamaLike):
    """SmolLM 3: Llama with no rotary positions, hence no encoding at all, in some layers (`no_rope_layers`)."""

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Layers whose `no_rope_layers` is 1 turn."""
        return bool(attention.use_rope)


@FAMILIES.register("granite")
class Granite(LlamaLike):
    """Granite: Llama with fixed factors on the embeddings, the logits of attention, both branches, and the logits.

    The factor on attention's logits is its `scaling`, that on the output logits belongs to the network.
    """

    def block(self, module: nn.Module) -> Block:
        """Llama's, with the factor on its branches."""
        block, scale = super().block(module), float(module.residual_multiplier)  # type: ignore[arg-type]
        softmax, linear = (mixer and replace(mixer, scale=scale) for mixer in (block.softmax, block.linear))
        return replace(block, softmax=softmax, linear=linear, mlp_scale=scale)

    def input_scale(self, config: Any) -> float:
        """The factor on the embeddings, which the network applies to whatever enters it."""
        return float(config.embedding_multiplier)


@FAMILIES.register("granite_swa")
class GraniteSwa(Granite):
    """Granite with learned sinks, windows by `layer_types`, and a base of the rotary positions for every layer."""

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Layers whose base is 0 do not turn."""
        return bool(config.layer_rope_theta[attention.layer_idx])

    def rotary_frequencies(
        self, network: nn.Module, block: Block, *, config: Any, layer: int
    ) -> Float64[np.ndarray, "pairs"] | None:
        """Those of the module that has the layer's base."""
        bases: Any = network.get_submodule("model.rotary_embs")
        base = config.layer_rope_theta[layer]
        turning = (module for module in bases if module.config.rope_parameters["rope_theta"] == base)
        return super().rotary_frequencies(next(turning, bases), block, config=config, layer=layer)


class FusedMlp(LlamaLike):
    """Gate and up projection in one map."""

    up_and_down = ("gate_up_proj", "down_proj")
    gate_in_up = True
    activation = "activation_fn"


@FAMILIES.register("phi3")
class Phi3(FusedMlp):
    """Phi 3 and 4: Llama with fused projections in attention and MLP, one window for all layers, partial rotation."""

    windows = "all layers"
    query_key_value = ("qkv_proj",)


@FAMILIES.register("stablelm")
class StableLM(LlamaLike):
    """StableLM: Llama with LayerNorm, partial rotation, and attention and MLP side by side if configured."""

    mlp_norm = "input_layernorm"
    query_key_norms = ("q_layernorm", "k_layernorm")
    query_key_norm_switch = "qk_layernorm"
    parallel_switch = "use_parallel_residual"

    def block(self, module: nn.Module) -> Block:
        """A norm stands before the MLP unless it is side by side with the attention."""
        block, second_norm = super().block(module), getattr(module, "post_attention_layernorm", None)
        return block if second_norm is None else replace(block, mlp_norm=second_norm)


@FAMILIES.register("olmo")
class Olmo(LlamaLike):
    """OLMo 1: Llama with LayerNorms that have no parameters, and queries, keys and values clamped if configured."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, clamped at `clip_qkv`."""
        return replace(super().attention_parts(block, config), clip=config.clip_qkv)


# With norms on queries and keys.


@FAMILIES.register("qwen3")
class Qwen3(LlamaLike):
    """Qwen 3: Llama with an RMS norm on the queries and keys of each head."""

    query_key_norms = Q_AND_K


@FAMILIES.register("apertus")
class Apertus(LlamaLike):
    """Apertus: Llama with norms on queries and keys and a plain MLP whose activation, xIELU, is learned."""

    attention_norm = "attention_layernorm"
    mlp_norm = "feedforward_layernorm"
    no_mean_field = "a learned activation"
    query_key_norms = Q_AND_K


@FAMILIES.register("olmo2")
class Olmo2(LlamaLike):
    """OLMo 2: no norm before the branches, one after each; queries and keys normalised over all their features."""

    attention_norm = None
    attention_post_norm = "post_attention_layernorm"
    mlp_norm = None
    mlp_post_norm = "post_feedforward_layernorm"
    query_key_norms = Q_AND_K


@FAMILIES.register("olmo3")
class Olmo3(Olmo2):
    """OLMo 3: OLMo 2 with sliding windows by `layer_types`."""


@FAMILIES.register("exaone4")
class Exaone4(Olmo2):
    """Exaone 4: OLMo 2 with queries and keys normalised per head and rotary positions in windowed layers only."""

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Windowed layers turn, or all layers if there is no window at all."""
        return attention.sliding_window is None or bool(attention.is_sliding)


# Gemma: gain 1 + weight in its norms, embeddings multiplied by sqrt(width) inside the embedding layer.


@FAMILIES.register("gemma")
class Gemma(LlamaLike):
    """Gemma 1: Llama with gain 1 + weight in its norms and embeddings multiplied by sqrt(width)."""


@FAMILIES.register("gemma3_text")
class Gemma3(LlamaLike):
    """Gemma 3 (text): norms before and after each branch, local and global layers, norms on queries and keys.

    The logit scale is `query_pre_attn_scalar ** -0.5`; transformers applies no soft cap to its logits.
    """

    attention_post_norm = "post_attention_layernorm"
    mlp_norm = "pre_feedforward_layernorm"
    mlp_post_norm = "post_feedforward_layernorm"
    query_key_norms: ClassVar[tuple[str, str] | None] = Q_AND_K


@FAMILIES.register("gemma2")
class Gemma2(Gemma3):
    """Gemma 2: norms before and after each branch, local and global layers, soft-capped logits.

    transformers' sdpa cannot cap and refuses to run it; eager, which is the default, does.
    """

    query_key_norms = None
    replaceable = False

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and the cap on the logits."""
        return replace(super().attention_parts(block, config), softcap=config.attn_logit_softcapping)


@FAMILIES.register("gemma4_text")
class Gemma4(Gemma3):
    """Gemma 4 (text): Gemma 3 with a norm on values, heads of two sizes, and a factor on every block's output.

    Global layers may have one map for keys and values. Small models (E2B, E4B) are not described: their layers look up
    each token in a table of their own, a second way in beside the stream that embeddings say nothing of, and read keys
    and values of other layers.
    """

    refused = ("hidden_size_per_layer_input", "num_kv_shared_layers")
    packs_projections = True
    some_models = "with experts: no power_rollout, no mean_field; E2B and E4B: not described"

    def unsupported(self, config: Any) -> str | None:
        """Text looks back alone unless the configuration says "all"; "vision" speaks of images."""
        looks_ahead = config.use_bidirectional_attention == "all"
        return "use_bidirectional_attention is set" if looks_ahead else super().unsupported(config)

    def block(self, module: nn.Module) -> Block:
        """Gemma 3's, with the factor on its output."""
        return replace(super().block(module), output_scale=module.get_buffer("layer_scalar"))

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Heads are of the layer's own number and size; without a value map the key map makes values, too."""
        attention: Any = block.attention
        parts = read_attention(
            [attention.q_proj, attention.k_proj, attention.v_proj or attention.k_proj],
            block.attention_output,
            heads=(self.heads(config), self.heads(config) // attention.num_key_value_groups),
            fusion=self.fusion,
            scale=self.logit_scale(attention),
        )
        gain = torch.ones(parts.value_dim, device=parts.value.device)
        return replace(
            parts,
            query_norm=self.norm(attention.q_norm),
            key_norm=self.norm(attention.k_norm),
            value_norm=Norm("rms", gain, None, float(attention.v_norm.eps)),
        )

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """Gemma 3's, if no mixture of experts stands beside it."""
        if hasattr(block.module, "experts"):
            raise UsageError(
                f"MLPs of this {self.name} model stand beside mixtures of experts with norms of their own; theories of "
                "weights need a single MLP"
            )
        return super().mlp_parts(block, config)


# With neighbouring features turned instead of halves.


@FAMILIES.register("helium")
class Helium(LlamaLike):
    """Helium: Llama with neighbouring features turned."""

    turns_neighbours = True


@FAMILIES.register("ernie4_5")
class Ernie45(LlamaLike):
    """Ernie 4.5 (dense): Llama with neighbouring features turned, in float32 whatever the dtype of the weights."""

    turns_neighbours = True


@FAMILIES.register("glm")
class Glm(FusedMlp):
    """GLM-4 of 2024 (`model_type: glm`): Llama with a fused gated MLP and half of each head's neighbours turned."""

    turns_neighbours = True


@FAMILIES.register("glm4")
class Glm4(Glm):
    """GLM-4 of 2025 (`model_type: glm4`): GLM with a norm after each branch as well."""

    attention_post_norm = "post_self_attn_layernorm"
    mlp_post_norm = "post_mlp_layernorm"


@FAMILIES.register("cohere")
class Cohere(LlamaLike):
    """Cohere (Command R): attention and gated MLP side by side behind one LayerNorm, neighbouring features turned."""

    parallel = True
    mlp_norm = "input_layernorm"
    query_key_norms: ClassVar[tuple[str, str] | None] = Q_AND_K
    query_key_norm_switch = "use_qk_norm"
    turns_neighbours = True

    def turned(self, config: Any, head_dim: int) -> int:
        """Whole heads."""
        return head_dim

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Every angle comes twice, side by side; we want the two halves to have them."""
        cosine, sine = super().angles(attention, arguments)
        return torch.cat([cosine[:, ::2]] * 2, -1), torch.cat([sine[:, ::2]] * 2, -1)


@FAMILIES.register("cohere2")
class Cohere2(Cohere):
    """Cohere 2 (Command R7B, Command A): Cohere with windows by `layer_types` and no positions in global layers."""

    query_key_norms = None

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Layers with a window turn."""
        return attention.sliding_window is not None
