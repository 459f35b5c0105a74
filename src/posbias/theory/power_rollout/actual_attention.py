"""Rollouts of a model's own attention: the published alternatives, with which the power rollout is compared.

One forward pass is kept as the arguments of every attention module (layers x positions x features numbers, no attention
matrix), and the size of each branch beside the stream. Then the last row of T_{L-1} ... T_0 is pulled block by block
from the top layer down; all rollouts come from one look at each layer's attention (docs/theory, section 1).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from posbias.architecture.spec import resolve_mixing
from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.attention import beyond_attention, watch_branches
from posbias.models.attention_blocks import (
    AttentionBlock,
    AttentionState,
    KeptAttention,
    elements_at_once,
    kept_attention,
    query_blocks,
    seen_layers,
    state_of,
)
from posbias.models.devices import float64_device, in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AttentionParts, Norm
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.rollout import Trace

Row = Float64[np.ndarray, "n_positions"]
SeenAgain = Callable[[], AttentionState]
"""Forms one layer's attention before its softmax again, from what its module read."""
ROLLOUTS = ("rollout", "attention_only", "norm_weighted")
"""By the mean over heads, twice, and by norms. The first and the last stand still with the share 1 - m, m the layer's
measured mixing."""
OutputMaps = tuple[AttentionParts, Norm | None]
"""What a layer makes of the values that attention mixes: its maps, and the norm between them and the stream."""


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


def norm_weighted(maps: OutputMaps, state: AttentionState) -> Callable[[AttentionBlock], Float[Tensor, "query key"]]:
    """||sum_h A_hij f_h(x_j)|| / sum_j' ||sum_h A_hij' f_h(x_j')||, f_h(x) = gain (W_O^h (W_V^h x + b_V^h)), by blocks.

    `gain` is that of a norm after the branch, whose divisor cancels in a row. The output bias belongs to no position.
    Norms of sums over heads come from the heads' inner products at every key, f_h(x_j) . f_h'(x_j): no vector is formed
    twice.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3, with all heads together; the rows are normalised here.
    """
    parts, after = maps
    shared = len(state.value) // parts.key_heads  # Falcon repeats its values for every head
    value = state.value[::shared, :, : parts.value_dim]  # without what a key bias fills up
    output = parts.output.weight.to(value)
    if after is not None:
        output = output * after.gain.to(value).reshape(-1, 1)
    output = output.reshape(-1, parts.key_heads, parts.heads // parts.key_heads, parts.value_dim)
    rows = max(1, elements_at_once(value.device) // (parts.heads * len(output)))
    vectors = (torch.einsum("wkgc,kjc->jkgw", output, some).flatten(1, 2) for some in torch.split(value, rows, dim=1))
    gram = torch.cat([some @ some.transpose(1, 2) for some in vectors]).permute(1, 2, 0).contiguous()

    def transition(block: AttentionBlock) -> Float[Tensor, "query key"]:
        lengths = sum_lengths(block.weights.flatten(0, 1), gram[..., block.keys])
        total: Tensor = lengths.sum(-1, keepdim=True)
        return torch.where(total > 0, lengths / total, block.weights.mean((0, 1)))

    return transition


def sum_lengths(
    weights: Float[Tensor, "head query key"], products: Float[Tensor, "head other key"]
) -> Float[Tensor, "query key"]:
    """||sum_h A_h f_h|| of every query and key, from f_h.f_h', each pair of heads once."""
    squares = torch.zeros_like(weights[0])
    for head, of_head in enumerate(products):
        along = weights[head] * of_head[head]
        for earlier in range(head):
            along.addcmul_(weights[earlier], of_head[earlier], value=2)
        squares.addcmul_(along, weights[head])
    return squares.clamp_min(0).sqrt()


def _again(kept: KeptAttention, dtype: torch.dtype) -> AttentionState:
    return state_of(kept.again(), dtype)


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
        (arXiv 2005.00928) without their fixed residual half; `norm_weighted`: Kobayashi et al. (arXiv 2004.10102);
        their later form (arXiv 2109.07152) adds the residual as a vector, we use the measured mixing.
    """
    if isinstance(model, HuggingFaceModel) and beyond_attention(model.network):
        return {}, ("rollouts of attention: in some layers linear layers mix positions too, or nothing does",)
    maps: list[OutputMaps] = []
    rows: list[Float64[np.ndarray, "rollouts n_positions"]] = []
    left_out: tuple[str, ...] = ()
    try:
        if isinstance(model, HuggingFaceModel):
            family, config = model.family, model.config
            for block in family.blocks(model.network):
                after = block.attention_post_norm
                maps.append((family.attention_parts(block, config), None if after is None else family.norm(after)))
    except UsageError:
        maps, left_out = [], ("norm_weighted: it reads weights, of the families in the table of layouts",)
    for ids in track(prompts.token_ids, "rollouts of attention"):
        layers, mixing = trace_attention(model, model.token_tensor([ids.tolist()])[0])
        shares = [mixing, np.ones_like(mixing), *([mixing] if maps else [])]
        rows.append(_pull(layers, np.stack(shares, axis=1), maps))
    return dict(zip(ROLLOUTS, np.stack(rows, axis=1), strict=False)), left_out


def attention_rollout_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    mixing: Sequence[float] | float,
    trace: Trace | None = None,
) -> Row:
    """Rollout of one prompt's measured attention with a given residual share per layer: non-negative, sums to 1.

    Args:
        model: Of transformers, with attention alone in every layer.
        token_ids: The prompt.
        mixing: m_l in [0, 1], one number or one per layer; 1 is attention alone, 0 the identity.
        trace: The prompt's pass, if it was traced before.

    Raises:
        UsageError: attention cannot be seen, or mixing outside [0, 1] or of the wrong length.

    Source: arXiv 2602.16837, section 3, with the prompt's own attention in place of a content-free kernel; without
        residual stream arXiv 2005.00928.
    """
    if trace is None:
        layers, _ = trace_attention(model, model.token_tensor([token_ids.tolist()])[0])
    else:
        layers = [partial(_again, caught.kept, trace.description.dtype) for caught in trace.layers]
    return np.asarray(_pull(layers, resolve_mixing(mixing, len(layers))[:, None])[0])


@torch.no_grad()
def _pull(
    layers: Sequence[SeenAgain], mixing: Float64[np.ndarray, "layers rollouts"], maps: Sequence[OutputMaps] = ()
) -> Float64[np.ndarray, "rollouts n_positions"]:
    """The last row of the product of (1 - m) I + m A for each column of m, normalised.

    A is the mean over heads; with `maps`, the last column's is by norms.
    """
    rows = torch.empty(0)
    for layer in reversed(range(len(layers))):
        state, share = layers[layer](), torch.from_numpy(mixing[layer])
        by_norms = norm_weighted(maps[layer], state) if maps else None
        if not len(rows):
            place = float64_device(state.key.device)
            rows = torch.zeros(len(share), state.key.shape[1], dtype=torch.float64, device=place)
            rows[:, -1] = 1
        reached, moved = torch.zeros_like(rows), share[:, None].to(rows)
        for block in query_blocks(state):
            by_mean = rows if by_norms is None else rows[:-1]
            reached[: len(by_mean), block.keys] += by_mean[:, block.queries] @ in_float64(block.weights.mean((0, 1)))
            if by_norms is not None:
                reached[-1, block.keys] += rows[-1, block.queries] @ in_float64(by_norms(block))
        rows = (1 - moved) * rows + moved * reached
        rows = rows / rows.sum(-1, keepdim=True)
    profiles = np.asarray(rows.cpu().numpy())
    if not np.all(np.isfinite(profiles)):
        raise RunError("a rollout of the model's attention is not finite; load it in a wider type (float32, float64)")
    return np.asarray(profiles / profiles.sum(axis=1, keepdims=True))
