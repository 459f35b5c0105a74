"""Rollouts of a model's own attention: the published alternatives, with which the power rollout is compared.

One forward pass is kept as the arguments of every attention module (layers x positions x features numbers, no attention
matrix), the size of each branch beside the stream, and the divisors of the norms around it. Then the last row of
T_{L-1} ... T_0 is pulled block by block from the top layer down; all variants come from one look at each layer's
attention (docs/theory, sections 1 and 5). Any decoder; rollouts that read weights need a family of the table.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor, nn

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
)
from posbias.models.devices import float64_device, in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AttentionParts, Block, Norm
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.local_maps import gain_and_power, value_gains
from posbias.theory.power_rollout.rollout import PromptTrace
from posbias.theory.predict import Prediction

Row = Float64[np.ndarray, "n_positions"]
Shares = Float[Tensor, "query key"]


@dataclass(frozen=True)
class ScaledNorm:
    """A norm around the attention branch, with its divisor at every position."""

    norm: Norm
    power: Float[Tensor, "position"]
    """Mean square (of the centred input for LayerNorm) plus epsilon."""


@dataclass(frozen=True)
class AttentionTraceLayer:
    """One layer on one prompt."""

    kept: KeptAttention
    dtype: torch.dtype
    """Type that attention is formed in."""
    parts: AttentionParts | None = None
    """The maps of attention; None if they cannot be read."""
    before: ScaledNorm | None = None
    """The norm the branch reads through; None if there is none."""
    after: ScaledNorm | None = None
    """The norm between the output projection and the stream; None if there is none."""

    def state(self) -> AttentionState:
        """The layer's attention before its softmax."""
        return self.kept.again().state(self.dtype)


@torch.no_grad()
def trace_attention(
    model: Model, token_ids: Int[Tensor, "position"]
) -> tuple[list[AttentionTraceLayer], Float64[Tensor, "layers"]]:
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
    powers: dict[nn.Module | None, ScaledNorm] = {}
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    blocks = _blocks_with_weights(model)

    def keep(norm: Norm, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep a norm's divisor."""
        values = args[0].reshape(-1, args[0].shape[-1]).to(dtype)
        powers[module] = ScaledNorm(norm, gain_and_power(norm, values, values)[1])

    with kept_attention(model.network) as kept, watch_branches(model.network) as watch, ExitStack() as hooks:
        for block, _ in blocks:
            for module in filter(None, (block.attention_norm, block.attention_post_norm)):
                hooks.callback(module.register_forward_pre_hook(partial(keep, model.family.norm(module))).remove)
        model.logits(token_ids[None], [len(token_ids) - 1])
    share = torch.from_numpy(watch.norms().share())
    traced = [AttentionTraceLayer(layer, dtype) for layer in kept]
    if blocks:
        traced = [
            replace(
                layer,
                parts=parts,
                before=powers.get(block.attention_norm),
                after=powers.get(block.attention_post_norm),
            )
            for layer, (block, parts) in zip(traced, blocks, strict=True)
        ]
    return traced, share.mean(1)


def _blocks_with_weights(model: HuggingFaceModel) -> list[tuple[Block, AttentionParts]]:
    """Every block and the maps of its attention; none if the layout is not known, or the maps cannot be read."""
    try:
        blocks = model.family.blocks(model.network)
        return [(block, block.attention_added(model.family.attention_parts(block, model.config))) for block in blocks]
    except UsageError:
        return []


Transition = Callable[[AttentionBlock], Shares]
"""From a block of attention weights to that block of the matrix that moves influence from queries to keys."""


def mean_transition(traced: AttentionTraceLayer, state: AttentionState) -> Transition:
    """A_ij, the mean over heads; rows sum to 1."""
    return lambda block: block.weights.mean((0, 1))


def norm_transition(traced: AttentionTraceLayer, state: AttentionState) -> Transition:
    """||sum_h A_hij f_h(x_j)|| / sum_j' ||sum_h A_hij' f_h(x_j')||, f_h(x) = gain (W_O^h (W_V^h x + b_V^h)).

    `gain` is that of a norm after the branch, whose divisor cancels in a row. The output bias belongs to no position.
    Norms of sums over heads come from the heads' inner products at every key: no vector is formed twice.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3, with all heads together; the rows are normalised here.
    """
    gram = _head_products(traced, state)

    def transition(block: AttentionBlock) -> Shares:
        squared = squares_by_pair if block.weights.is_cpu else squares_by_key
        squares = squared(block.weights.flatten(0, 1), gram[..., block.keys])
        lengths = squares.clamp_min(0).sqrt()
        total: Tensor = lengths.sum(-1, keepdim=True)
        return torch.where(total > 0, lengths / total, block.weights.mean((0, 1)))

    return transition


def squares_by_pair(
    weights: Float[Tensor, "head query key"], products: Float[Tensor, "head other key"]
) -> Float[Tensor, "query key"]:
    """sum_hh' A_h A_h' f_h.f_h' of every query and key, each pair of heads once: ten times faster on a CPU."""
    squares = torch.zeros_like(weights[0])
    for head, of_head in enumerate(products):
        along = weights[head] * of_head[head]
        for earlier in range(head):
            along.addcmul_(weights[earlier], of_head[earlier], value=2)
        squares.addcmul_(along, weights[head])
    return squares


def squares_by_key(
    weights: Float[Tensor, "head query key"], products: Float[Tensor, "head other key"]
) -> Float[Tensor, "query key"]:
    """The same by a product of small matrices for every key: three launches on an accelerator."""
    by_key = weights.permute(2, 1, 0)
    squares: Tensor = ((by_key @ products.permute(2, 0, 1)) * by_key).sum(-1).T
    return squares


def power_transition(traced: AttentionTraceLayer, state: AttentionState) -> Transition:
    """sum_h g_h^2 A_hij^2 / (sigma_j^2 rho_i^2), g_h^2 = ||W_O^h W_V^h diag(w)||_F^2 / d, rows not normalised.

    sigma^2 and rho^2: divisors of the norms before and after the branch, at the key and at the query; w is the gain of
    the norm before, that of the norm after counts into W_O. A LayerNorm's own mean is left in: one channel in d.

    Source: docs/theory, section 5, isotropic form, its value path alone.
    """
    assert traced.parts is not None, "rules that read weights are left out without a row of the table"
    gain, _ = value_gains(traced.parts, _gain(traced.before, state.value), _gain(traced.after, state.value))
    undivided = torch.ones_like(state.value[0, :, 0])
    norms = (traced.after, traced.before)
    sent, received = (undivided if norm is None else norm.power.to(undivided) for norm in norms)

    def transition(block: AttentionBlock) -> Shares:
        squares = (block.weights.square() * gain[..., None, None]).sum((0, 1))
        return squares / sent[block.queries, None] / received[block.keys]

    return transition


def _head_products(traced: AttentionTraceLayer, state: AttentionState) -> Float[Tensor, "head other position"]:
    """f_h(x_j) . f_h'(x_j) of every position."""
    parts, value = traced.parts, state.value
    assert parts is not None, "rules that read weights are left out without a row of the table"
    value = value[..., : parts.value_dim]  # without what a key bias fills up
    output = parts.output.to(value) * _gain(traced.after, value).reshape(-1, 1)
    output = output.reshape(-1, parts.key_heads, parts.heads // parts.key_heads, parts.value_dim)
    rows = max(1, elements_at_once(value.device) // (parts.heads * len(output)))
    products = [torch.einsum("wkgc,kjc->jkgw", output, some).flatten(1, 2) for some in torch.split(value, rows, dim=1)]
    return torch.cat([vectors @ vectors.transpose(1, 2) for vectors in products]).permute(1, 2, 0).contiguous()


def _gain(scaled: ScaledNorm | None, like: Float[Tensor, "*any"]) -> Float[Tensor, "features"]:
    return torch.ones(1).to(like) if scaled is None else scaled.norm.gain.to(like)


@dataclass(frozen=True)
class RolloutRule:
    """One way of rolling attention out: row <- keep * row + share * (row @ transition), layer by layer."""

    prepare: Callable[[AttentionTraceLayer, AttentionState], Transition]
    shares: Callable[[float], tuple[float, float]]
    """(keep, share) from a layer's mixing."""
    energies: bool = False
    """True if the row holds energies, whose roots are the profile."""


ROLLOUTS = {
    "rollout": RolloutRule(mean_transition, lambda mixing: (1 - mixing, mixing)),
    "attention_only": RolloutRule(mean_transition, lambda mixing: (0.0, 1.0)),
    "norm_weighted": RolloutRule(norm_transition, lambda mixing: (1 - mixing, mixing)),
    "power": RolloutRule(power_transition, lambda mixing: (1.0, 1.0), energies=True),
}
"""By name. `rollout` and `norm_weighted` stand still with the share 1 - m, m the layer's measured mixing; `power` adds
squares of paths through attention and the residual stream, without MLPs and without the softmax's own derivative."""


@dataclass(frozen=True, eq=False)
class AttentionRollouts:
    """All rollouts of the same attention."""

    rollouts: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Each prompt's own, by the names of ROLLOUTS; rows sum to 1."""
    mixing: Float64[np.ndarray, "count layers"]
    """Measured on each prompt: mean over tokens of |a| / (|x| + |a|)."""
    left_out: tuple[str, ...]
    """Rollouts that do not apply to this model, and why."""


@checked
def attention_rollouts(model: Model, prompts: Prompts) -> AttentionRollouts:
    """Every rollout of a model's own attention, from one forward pass and one recomputation per prompt and layer.

    There are none if something else mixes positions in some layer, or nothing does. A prompt takes layers x N x d
    numbers, the inputs of the attention modules. With the norms of stream and branch measured on the same pass, every
    prompt has its own mixing.

    Raises:
        UsageError: attention or its branches cannot be seen.
        RunError: activations are not finite.

    Source: `rollout`: arXiv 2602.16837, section 3, with the prompt's own attention; `attention_only`: Abnar and Zuidema
        (arXiv 2005.00928) without their fixed residual half; `norm_weighted`: Kobayashi et al. (arXiv 2004.10102);
        their later form (arXiv 2109.07152) adds the residual as a vector, we use the measured mixing; `power`: ours.
    """
    if isinstance(model, HuggingFaceModel) and beyond_attention(model.network):
        return AttentionRollouts(
            {},
            np.empty((prompts.count, 0)),
            ("rollouts of attention: in some layers linear layers mix positions too, or nothing does",),
        )
    rows: dict[str, list[Row]] = {}
    mixing: list[list[float]] = []
    left_out: tuple[str, ...] = ()
    for ids in track(prompts.token_ids, "rollouts of attention"):
        layers, measured = trace_attention(model, model.token_tensor([ids.tolist()])[0])
        rules, shares = dict(ROLLOUTS), measured.tolist()
        if any(traced.parts is None for traced in layers):
            del rules["norm_weighted"], rules["power"]
            left_out = ("norm_weighted and power: they read weights, of the families in the table of layouts",)
        elif any(traced.before is None and traced.after is None for traced in layers):
            del rules["power"]
            left_out = ("power: the model normalises the stream itself, after adding to it",)
        for name, row in _pull(layers, rules, shares).items():
            rows.setdefault(name, []).append(row)
        mixing.append(shares)
    return AttentionRollouts(
        {name: np.stack(by_prompt) for name, by_prompt in rows.items()}, np.array(mixing), left_out
    )


@checked
def attention_rollout(model: Model, prompts: Prompts, mixing: Sequence[float] | float) -> Prediction:
    """Rollout of the measured attention with a given residual share per layer: its mean, and one per prompt.

    Args:
        model: Of a described family.
        prompts: Equally long.
        mixing: m_l in [0, 1], one number or one per layer; 1 is attention alone, 0 the identity.

    Raises:
        UsageError: unsupported family, or mixing outside [0, 1] or of the wrong length.

    Source: arXiv 2602.16837, section 3, with the prompt's own attention in place of a content-free kernel.
    """
    tracked = track(prompts.token_ids, "attention rollout")
    rows = np.stack([attention_rollout_prompt(model, ids, mixing) for ids in tracked])
    return Prediction(Profile.mean_of(rows), "attention_rollout", None, prompts.n_positions, per_prompt=rows)


def attention_rollout_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    mixing: Sequence[float] | float,
    *,
    under: AbstractContextManager[None] | None = None,
) -> Row:
    """One prompt's rollout, as `attention_rollout`: non-negative, sums to 1.

    `under` is a change of the model that lasts while attention is formed, and not while the prompt is read.
    """
    layers, _ = trace_attention(model, model.token_tensor([token_ids.tolist()])[0])
    with under or nullcontext():
        return _pull(layers, {"rollout": ROLLOUTS["rollout"]}, resolve_mixing(mixing, len(layers)))["rollout"]


def attention_rollout_of(trace: PromptTrace, mixing: Sequence[float] | float) -> Row:
    """The rollout of a prompt that was traced before, without a pass of its own."""
    dtype = trace.description.dtype
    layers = [AttentionTraceLayer(caught.kept, dtype) for caught in trace.layers if caught.kept is not None]
    return _pull(layers, {"rollout": ROLLOUTS["rollout"]}, resolve_mixing(mixing, len(layers)))["rollout"]


def pull_layer(
    traced: AttentionTraceLayer,
    rules: Mapping[str, RolloutRule],
    rows: Mapping[str, Float64[Tensor, "position"]],
    *,
    mixing: float,
) -> dict[str, Float64[Tensor, "position"]]:
    """Each rule's row pulled through one layer, all by one look at its attention; rows sum to 1."""
    state = traced.state()
    transitions = {rule.prepare: rule.prepare(traced, state) for rule in rules.values()}
    reached = {name: torch.zeros_like(row) for name, row in rows.items()}
    for block in query_blocks(state):
        matrices = {prepare: in_float64(transition(block)) for prepare, transition in transitions.items()}
        for name, rule in rules.items():
            reached[name][block.keys] += rows[name][block.queries] @ matrices[rule.prepare]
    pulled = {}
    for name, rule in rules.items():
        keep, move = rule.shares(mixing)
        row = keep * rows[name] + move * reached[name]
        pulled[name] = row / row.sum()
    return pulled


@torch.no_grad()
def _pull(
    layers: Sequence[AttentionTraceLayer], rules: dict[str, RolloutRule], mixing: Sequence[float]
) -> dict[str, Row]:
    """The last row of each product, normalised."""
    read = layers[0].kept.read
    last = torch.zeros(len(read), dtype=torch.float64, device=float64_device(read.device))
    last[-1] = 1
    rows = dict.fromkeys(rules, last)
    for traced, share in zip(reversed(layers), reversed(mixing), strict=True):
        rows = pull_layer(traced, rules, rows, mixing=share)
    profiles: dict[str, Row] = {}
    for name, row in rows.items():
        values = np.asarray((row.sqrt() if rules[name].energies else row).cpu().numpy())
        if not np.all(np.isfinite(values)):
            raise RunError(
                f"the {name} rollout of the model's attention is not finite; load it in a wider type (float32, float64)"
            )
        profiles[name] = values / values.sum()
    return profiles
