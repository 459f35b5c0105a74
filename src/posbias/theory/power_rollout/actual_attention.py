"""The published rollout on a model's own attention: the baseline the power rollout is compared with.

T_l = (1 - m_l) I + m_l mean_h A_lh with each prompt's real attention, the last row pulled block by block from the top
layer down (docs/theory, sections 1 and 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import UsageError
from posbias.intervals import bootstrap_mean
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.attention import attention_blocks, recompute_attention
from posbias.theory.power_rollout.description import LayerDescription, describe_model
from posbias.theory.power_rollout.trace import LayerTrace, trace_prompt


@dataclass(frozen=True, eq=False)
class AttentionRollout:
    """The published rollout for a set of prompts."""

    profile: Profile
    """Mean over prompts, with pointwise bootstrap intervals over prompts."""
    per_prompt: Float64[np.ndarray, "count n_positions"]
    """Each prompt's own rollout; rows sum to 1."""


def attention_rollout(model: Model, prompts: Prompts, mixing: Sequence[float] | float) -> AttentionRollout:
    """Rollout of the measured attention with a residual share per layer.

    Args:
        model: A model of a supported family.
        prompts: Equally long prompts.
        mixing: m_l in [0, 1], one number or one per layer; 1 is attention alone, 0 the identity.

    Returns:
        The mean profile with its interval, and one per prompt.

    Raises:
        UsageError: unsupported family, or mixing outside [0, 1] or of the wrong length.

    Source: arXiv 2602.16837, section 3, with the prompt's own attention in place of a content-free kernel.
    """
    rows = [attention_rollout_prompt(model, ids, mixing) for ids in track(prompts.token_ids, "attention rollout")]
    per_prompt = np.stack(rows)
    low, high = bootstrap_mean(per_prompt, generator=np.random.default_rng(0))
    return AttentionRollout(Profile(per_prompt.mean(0), low, high), per_prompt)


@torch.no_grad()
def attention_rollout_prompt(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], mixing: Sequence[float] | float
) -> Float64[np.ndarray, "n_positions"]:
    """One prompt's rollout: non-negative, sums to 1.

    Args:
        model: As for `attention_rollout`.
        token_ids: One prompt.
        mixing: As for `attention_rollout`.
    """
    description = describe_model(model, n_positions=len(token_ids))
    shares = _shares(mixing, len(description.layers))
    trace = trace_prompt(model, description, model.token_tensor([token_ids.tolist()])[0])
    row = torch.zeros(len(token_ids), dtype=torch.float64, device=model.device)
    row[-1] = 1
    for share, layer, kept in zip(reversed(shares), reversed(description.layers), reversed(trace.layers), strict=True):
        if share > 0:
            row = (1 - share) * row + share * mean_attention_pull(layer, kept, row)
    return np.asarray((row / row.sum()).cpu().numpy())


def mean_attention_pull(
    layer: LayerDescription, trace: LayerTrace, row: Float[Tensor, "position"]
) -> Float[Tensor, "position"]:
    """row @ (mean over heads of the layer's attention), a block of queries at a time."""
    state = recompute_attention(layer, trace)
    pulled = torch.zeros_like(row)
    for block in attention_blocks(layer, state):
        mean = block.weights.mean((0, 1)).to(row.dtype)
        pulled[block.keys] += row[block.queries] @ mean
    return pulled


def _shares(mixing: Sequence[float] | float, depth: int) -> list[float]:
    shares = [float(mixing)] * depth if isinstance(mixing, int | float) else [float(share) for share in mixing]
    if len(shares) != depth:
        raise UsageError(f"mixing needs one number or {depth}, one per layer; got {len(shares)}")
    for share in shares:
        if not 0 <= share <= 1:
            raise UsageError(f"mixing must lie in [0, 1], got {share}")
    return shares
