"""The families with ALiBi: BLOOM, MPT and, where configured, Falcon.

Their slopes as our encoding, and the logits they add as their code computes them, with its factors and roundings.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from posbias.architecture import Alibi, Encoding, NoEncoding, published_alibi_slopes
from posbias.models.families.base import FAMILIES, Block, Family
from posbias.models.families.parts import AttentionParts


def alibi_logits(
    slopes: Float[Tensor, "heads"], n_positions: int, *, dtype: torch.dtype
) -> Float[Tensor, "heads n_positions"]:
    """slope * key, multiplied in the slopes' own floating type and rounded to `dtype`, as implementations do it."""
    return (slopes[:, None] * torch.arange(n_positions, device=slopes.device)).to(dtype)


@FAMILIES.register("bloom")
class Bloom(Family):
    """BLOOM: ALiBi, a LayerNorm right after the embedding, projections interleaved per head.

    Its attention module returns the branch with the residual already added, so the branch is read off the projection;
    `Block.mlp` too returns its branch with the residual added.
    """

    replaceable = False
    layers = "transformer.h"
    final_norm = "transformer.ln_f"
    embedding_norm = "transformer.word_embeddings_layernorm"
    rotary = False
    attention = "self_attention"
    attention_output = "self_attention.dense"
    query_key_value = ("query_key_value",)
    fusion = "interleaved"
    up_and_down = ("dense_h_to_4h", "dense_4h_to_h")
    activation = "gelu_impl"
    scale = "inv_norm_factor"
    refused = ("apply_residual_connection_post_layernorm",)  # the stream itself would be replaced by its norm

    def max_positions(self, config: Any) -> int | None:
        """Unbounded: ALiBi needs no table."""
        return None

    def encoding(self, config: Any, layer: int) -> Encoding:
        """The published slopes, in the published order of heads."""
        return Alibi()

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Add ALiBi in the weights' type."""
        parts = super().attention_parts(block, config)
        slopes = torch.tensor(published_alibi_slopes(parts.heads), dtype=torch.float32)
        return replace(parts, position_logits=partial(alibi_logits, slopes, dtype=parts.query.dtype))

    def caveats(self, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
        """Warn that the biases lose their digits in half precision."""
        if torch.finfo(dtype).bits > 16:
            return ()
        name = str(dtype).removeprefix("torch.")
        exact = 2 ** (1 - round(np.log2(torch.finfo(dtype).eps)))
        return (
            f"BLOOM adds ALiBi in {name}: past position {exact} biases, and the logits they are added to, are rounded "
            "to whole steps; recomputed attention follows the rounding of the biases alone",
        )


@FAMILIES.register("mpt")
class MPT(Family):
    """MPT: ALiBi, LayerNorm without bias, stacked projections.

    transformers adds ALiBi whatever `attn_config.alibi` says, and ignores `learned_pos_emb`, `prefix_lm` and `qk_ln`;
    we describe what runs. `Block.mlp` returns its branch with the residual added.
    """

    replaceable = False
    layers = "transformer.blocks"
    final_norm = "transformer.norm_f"
    rotary = False
    attention = "attn"
    attention_output = "attn.out_proj"
    attention_norm = "norm_1"
    mlp = "ffn"
    mlp_norm = "norm_2"
    query_key_value = ("Wqkv",)
    activation = "act"
    scale = "softmax_scale"

    def max_positions(self, config: Any) -> int | None:
        """`max_seq_len`: transformers builds the bias at this length and fails beyond it."""
        return int(config.max_seq_len)

    def encoding(self, config: Any, layer: int) -> Encoding:
        """ALiBi; transformers never passes `alibi_bias_max` on, so its default of 8 is what runs."""
        slopes = _mpt_slopes(self.heads(config))
        if np.allclose(slopes, published_alibi_slopes(len(slopes)), rtol=1e-12, atol=0):
            return Alibi()  # the short spelling
        return Alibi(slopes=tuple(slopes.tolist()))

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Clamp if the configuration says so; add ALiBi in float32."""
        parts = super().attention_parts(block, config)
        added = partial(alibi_logits, torch.tensor(_mpt_slopes(parts.heads), dtype=torch.float32), dtype=torch.float32)
        # A bound of 0 is no bound: transformers asks whether it is true.
        return replace(parts, clip=config.attn_config.clip_qkv or None, position_logits=added)

    def caveats(self, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
        """Name the settings that transformers ignores."""
        settings = config.attn_config
        ignored = [name for name in ("prefix_lm", "qk_ln") if getattr(settings, name)]
        if config.logit_scale is not None:
            ignored.append("logit_scale")
        if not settings.alibi:
            ignored += ["alibi=False", "learned_pos_emb"] if config.learned_pos_emb else ["alibi=False"]
        elif settings.alibi_bias_max != 8:
            ignored.append(f"alibi_bias_max={settings.alibi_bias_max}")
        if not ignored:
            return ()
        return (
            f"transformers ignores this MPT's {', '.join(ignored)}: its layers are causal, with ALiBi of maximum 8 and "
            "no other positions or norms",
        )


@FAMILIES.register("falcon")
class Falcon(Family):
    """Falcon: shared key heads, attention and MLP side by side behind one norm or two, rotary positions or ALiBi.

    Its ALiBi is not the published one (see `caveats`); everything here follows what transformers runs.
    """

    replaceable = False
    layers = "transformer.h"
    final_norm = "transformer.ln_f"
    attention = "self_attention"
    attention_output = "self_attention.dense"
    attention_norm = None
    mlp_norm = None
    query_key_value = ("query_key_value",)
    fusion = "interleaved"
    up_and_down = ("dense_h_to_4h", "dense_4h_to_h")
    activation = "act"
    scale = "inv_norm_factor"

    def key_heads(self, config: Any) -> int:
        """One for all queries unless configured otherwise."""
        if config.new_decoder_architecture:
            return int(config.num_kv_heads)
        return 1 if config.multi_query else self.heads(config)

    def max_positions(self, config: Any) -> int | None:
        """Unbounded with ALiBi, which needs no table."""
        return None if config.alibi else super().max_positions(config)

    def is_parallel(self, config: Any) -> bool:
        """Sequential if neither `parallel_attn` nor `new_decoder_architecture` is set."""
        return bool(config.new_decoder_architecture or config.parallel_attn)

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Every layer turns, unless the model has ALiBi."""
        return not config.alibi

    def encoding(self, config: Any, layer: int) -> Encoding:
        """ALiBi with the slopes as they are applied, each rounded to bfloat16; the staircase they climb is left out."""
        if not config.alibi:
            return NoEncoding()
        slopes = _falcon_slopes(self.heads(config)).double().numpy() * self._alibi_times(config)
        return Alibi(slopes=tuple((slopes / np.sqrt(self._head_dim(config))).tolist()))

    def block(self, module: nn.Module) -> Block:
        """One norm for both branches, or one for each."""
        first: Any = getattr(module, "ln_attn", None) or module.get_submodule("input_layernorm")
        second = getattr(module, "ln_mlp", None) or getattr(module, "post_attention_layernorm", None) or first
        return replace(super().block(module), attention_norm=first, mlp_norm=second)

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Add ALiBi, if configured: its product rounds to bfloat16; dividing it rounds to the weights' type."""
        parts = super().attention_parts(block, config)
        if not config.alibi:
            return parts
        times, root = self._alibi_times(config), self._head_dim(config) ** 0.5
        slopes, dtype = _falcon_slopes(parts.heads), parts.query.dtype
        return replace(parts, position_logits=lambda n: alibi_logits(slopes, n, dtype=dtype) / root * times)

    def caveats(self, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
        """Tell how the ALiBi that runs differs from the published one."""
        if not config.alibi:
            return ()
        twice = "Falcon's eager attention adds ALiBi twice; its sdpa attention adds it once"
        root = self._head_dim(config) ** 0.5
        return (
            *([twice] if self._alibi_times(config) == 2 else []),
            f"Falcon divides its ALiBi slopes by sqrt(head_dim) = {root:g}: they are not the published ones",
            "Falcon builds ALiBi in bfloat16 whatever the weights: slopes keep 8 bits, and past position 256 the bias "
            "is a staircase",
        )

    def _alibi_times(self, config: Any) -> int:
        # Eager attention adds the bias itself, and again with the mask.
        return 1 if config._attn_implementation == "sdpa" else 2

    def _head_dim(self, config: Any) -> int:
        return int(config.hidden_size) // self.heads(config)


def _mpt_slopes(heads: int) -> Float64[np.ndarray, "heads"]:
    """Slope of each head: 2^(-8k / power), k = 1 ... power; the even k first if heads is not a power of two."""
    power = 2 ** int(np.ceil(np.log2(heads)))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return np.asarray(slopes)


def _falcon_slopes(heads: int) -> Float[Tensor, "heads"]:
    """The published slopes, rounded to bfloat16."""
    return torch.tensor(published_alibi_slopes(heads), dtype=torch.float32).bfloat16()
