"""ALiBi as BLOOM, MPT and, where configured, Falcon run it in transformers.

Their slopes as our encoding, with the factors and roundings of their code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.architecture import Alibi, Encoding, NoEncoding, published_alibi_slopes


@dataclass(frozen=True)
class AddedAlibi:
    """What one family adds to the logits of its attention."""

    encoding: Callable[[Any], Encoding]
    """The slopes as an encoding, of a configuration."""
    caveats: Callable[[Any, torch.dtype], tuple[str, ...]]
    """Differences between what runs and what is published."""


def _bloom_caveats(config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Warn that the biases lose their digits in half precision."""
    if torch.finfo(dtype).bits > 16:
        return ()
    name = str(dtype).removeprefix("torch.")
    exact = 2 ** (1 - round(np.log2(torch.finfo(dtype).eps)))
    return (
        f"BLOOM adds ALiBi in {name}: past position {exact} biases, and the logits they are added to, are rounded "
        "to whole steps",
    )


def _mpt_slopes(heads: int) -> Float64[np.ndarray, "heads"]:
    """Slope of each head: 2^(-8k / power), k = 1 ... power; the even k first if heads is not a power of two."""
    power = 2 ** int(np.ceil(np.log2(heads)))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return np.asarray(slopes)


def _mpt_encoding(config: Any) -> Encoding:
    """transformers never passes `alibi_bias_max` on, so its default of 8 is what runs."""
    slopes = _mpt_slopes(int(config.num_attention_heads))
    if np.allclose(slopes, published_alibi_slopes(len(slopes)), rtol=1e-12, atol=0):
        return Alibi()  # the short spelling
    return Alibi(slopes=tuple(slopes.tolist()))


def _mpt_caveats(config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Name the settings that transformers ignores: it adds ALiBi whatever the configuration says of positions."""
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


def _falcon_slopes(heads: int) -> Float[Tensor, "heads"]:
    """The published slopes, rounded to bfloat16."""
    return torch.tensor(published_alibi_slopes(heads), dtype=torch.float32).bfloat16()


def _falcon_times(config: Any) -> int:
    # Eager attention adds the bias itself, and again with the mask.
    return 1 if config._attn_implementation == "sdpa" else 2


def _falcon_root(config: Any) -> float:
    """sqrt(head_dim), which the bias is divided by."""
    return float((int(config.hidden_size) // int(config.num_attention_heads)) ** 0.5)


def _falcon_encoding(config: Any) -> Encoding:
    """The slopes as they are applied, each rounded to bfloat16; the staircase they climb is left out."""
    if not config.alibi:
        return NoEncoding()
    slopes = _falcon_slopes(int(config.num_attention_heads)).double().numpy() * _falcon_times(config)
    return Alibi(slopes=tuple((slopes / _falcon_root(config)).tolist()))


def _falcon_caveats(config: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Tell how the ALiBi that runs differs from the published one."""
    if not config.alibi:
        return ()
    twice, root = "Falcon's eager attention adds ALiBi twice; its sdpa attention adds it once", _falcon_root(config)
    return (
        *([twice] if _falcon_times(config) == 2 else []),
        f"Falcon divides its ALiBi slopes by sqrt(head_dim) = {root:g}: they are not the published ones",
        "Falcon builds ALiBi in bfloat16 whatever the weights: slopes keep 8 bits, and past position 256 the bias is a "
        "staircase",
    )


BLOOM_ALIBI = AddedAlibi(lambda config: Alibi(), _bloom_caveats)
MPT_ALIBI = AddedAlibi(_mpt_encoding, _mpt_caveats)
FALCON_ALIBI = AddedAlibi(_falcon_encoding, _falcon_caveats)
