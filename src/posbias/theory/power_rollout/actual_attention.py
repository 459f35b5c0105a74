"""Rollouts of a model's own attention: the published alternatives, with which the power rollout is compared.

One forward pass is kept as the arguments of every attention module (layers x positions x features numbers, no attention
matrix), and the size of each branch beside the stream. Then the last row of T_{L-1} ... T_0 is pulled block by block
from the top layer down; all rollouts come from one look at each layer's attention (docs/theory, section 1).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from posbias.architecture.spec import resolve_mixing
from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.attention import beyond_attention, watch_branches
from posbias.models.attention_blocks import AttentionState, KeptAttention, kept_attention, query_blocks, seen_layers
from posbias.models.devices import float64_device, in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.rollout import Trace

Row = Float64[np.ndarray, "n_positions"]
SeenAgain = Callable[[], AttentionState]
"""Forms one layer's attention before its softmax again, from what its module read."""
ROLLOUTS = ("rollout", "attention_only")
"""By the mean over heads: beside a share 1 - m that stands still, m the measured mixing; and by attention alone."""


@torch.no_grad()
def trace_attention(
    model: Model, token_ids: Int[Tensor, "position"]
) -> tuple[list[SeenAgain], Float64[np.ndarray, "layers"]]:
    """Run one prompt forward; keep what each attention module reads, and the mean over tokens of |a| / (|x| + |a|).

    Raises:
        UsageError: no Hugging Face model, its attention or its branches cannot be seen, or some layer mixes positions
            by something else.
        RunError: the norms of stream and branch are not finite, or both vanish.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(f"attention of {type(model).__name__!r} cannot be seen; a Hugging Face model is needed")
    seen_layers(model, n_positions=len(token_ids))
    if without := beyond_attention(model.network):
        raise UsageError(
            f"the rollout of attention of this {model.model_type} model: its layers {', '.join(map(str, without))} mix "
            "positions by linear layers, which have no attention matrix, or not at all; allowed are models with "
            "attention alone in every layer"
        )
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with kept_attention(model.network) as kept, watch_branches(model.network) as watch:
        model.logits(token_ids[None], [len(token_ids) - 1])
    return [partial(_again, layer, dtype) for layer in kept], watch.norms().share().mean(axis=1)


def _again(kept: KeptAttention, dtype: torch.dtype) -> AttentionState:
    return kept.again().state(dtype)


@checked
def attention_rollouts(
    model: Model, prompts: Prompts
) -> tuple[dict[str, Float64[np.ndarray, "count n_positions"]], tuple[str, ...]]:
    """Every rollout of a model's own attention, from one forward pass and one recomputation per prompt and layer.

    There are none if something else mixes positions in some layer, or nothing does. A prompt takes layers x N x d
    numbers, the inputs of the attention modules. With the norms of stream and branch measured on the same pass, every
    prompt has its own mixing.

    Returns:
        Each prompt's own profile by the names of ROLLOUTS, rows summing to 1; and which do not apply to this model, and
        why.

    Raises:
        UsageError: attention or its branches cannot be seen.
        RunError: activations are not finite.

    Source: `rollout`: arXiv 2602.16837, section 3, with the prompt's own attention; `attention_only`: Abnar and Zuidema
        (arXiv 2005.00928) without their fixed residual half.
    """
    if isinstance(model, HuggingFaceModel) and beyond_attention(model.network):
        return {}, ("rollouts of attention: in some layers linear layers mix positions too, or nothing does",)
    rows = []
    for ids in track(prompts.token_ids, "rollouts of attention"):
        layers, mixing = trace_attention(model, model.token_tensor([ids.tolist()])[0])
        rows.append(_pull(layers, np.stack([mixing, np.ones_like(mixing)], axis=1)))
    return dict(zip(ROLLOUTS, np.stack(rows, axis=1), strict=True)), ()


def attention_rollout_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    mixing: Sequence[float] | float,
) -> Row:
    """Rollout of one prompt's measured attention with a given residual share per layer: non-negative, sums to 1.

    Args:
        model: Of transformers, with attention alone in every layer.
        token_ids: The prompt.
        mixing: m_l in [0, 1], one number or one per layer; 1 is attention alone, 0 the identity.

    Raises:
        UsageError: attention cannot be seen, or mixing outside [0, 1] or of the wrong length.

    Source: arXiv 2602.16837, section 3, with the prompt's own attention in place of a content-free kernel; without
        residual stream arXiv 2005.00928.
    """
    layers, _ = trace_attention(model, model.token_tensor([token_ids.tolist()])[0])
    return _with_mixing(layers, mixing)


def attention_rollout_of(trace: Trace, mixing: Sequence[float] | float) -> Row:
    """The rollout of a prompt that was traced before, without a pass of its own."""
    return _with_mixing([partial(_again, caught.kept, trace.description.dtype) for caught in trace.layers], mixing)


def _with_mixing(layers: Sequence[SeenAgain], mixing: Sequence[float] | float) -> Row:
    return np.asarray(_pull(layers, np.array(resolve_mixing(mixing, len(layers)))[:, None])[0])


@torch.no_grad()
def _pull(
    layers: Sequence[SeenAgain], mixing: Float64[np.ndarray, "layers rollouts"]
) -> Float64[np.ndarray, "rollouts n_positions"]:
    """The last row of the product of (1 - m) I + m A for each column of m, normalised."""
    rows = torch.empty(0)
    for seen_again, share in zip(reversed(layers), reversed(torch.from_numpy(mixing)), strict=True):
        state = seen_again()
        if not len(rows):
            place = float64_device(state.key.device)
            rows = torch.zeros(len(share), state.key.shape[1], dtype=torch.float64, device=place)
            rows[:, -1] = 1
        reached, moved = torch.zeros_like(rows), share[:, None].to(rows)
        for block in query_blocks(state):
            reached[:, block.keys] += rows[:, block.queries] @ in_float64(block.weights.mean((0, 1)))
        rows = (1 - moved) * rows + moved * reached
        rows = rows / rows.sum(-1, keepdim=True)
    profiles = np.asarray(rows.cpu().numpy())
    if not np.all(np.isfinite(profiles)):
        raise RunError("a rollout of the model's attention is not finite; load it in a wider type (float32, float64)")
    return np.asarray(profiles / profiles.sum(axis=1, keepdims=True))
