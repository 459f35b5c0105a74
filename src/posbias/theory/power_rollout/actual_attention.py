"""Rollouts of a model's own attention: what is proposed instead of, and what the power rollout is compared with.

The last row of T_{L-1} ... T_0 is pulled block by block from the top layer down. All variants come from one
recomputation of each layer's attention (docs/theory, sections 1 and 5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.attention import AttentionState, project_attention, query_blocks, rotated
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.attention import attention_input
from posbias.theory.power_rollout.attention_trace import AttentionTrace, AttentionTraceLayer, trace_attention
from posbias.theory.power_rollout.attention_transitions import (
    Transition,
    mean_transition,
    norm_transition,
    power_transition,
)
from posbias.theory.power_rollout.prompt_trace import DescribedTrace

Row = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class RolloutRule:
    """One way of rolling attention out: row <- keep * row + share * (row @ transition), layer by layer."""

    prepare: Callable[[AttentionTraceLayer, AttentionState], Transition]
    shares: Callable[[float], tuple[float, float]]
    """(keep, share) from a layer's mixing."""
    energies: bool = False
    """Whether the row holds energies, whose roots are the profile."""


ROLLOUTS = {
    "rollout": RolloutRule(mean_transition, lambda mixing: (1 - mixing, mixing)),
    "attention_only": RolloutRule(mean_transition, lambda mixing: (0.0, 1.0)),
    "norm_weighted": RolloutRule(norm_transition, lambda mixing: (1 - mixing, mixing)),
    "power": RolloutRule(power_transition, lambda mixing: (1.0, 1.0), energies=True),
}
"""By name. `rollout` and `norm_weighted` stand still with the share 1 - m, m the layer's measured mixing; `power` adds
squares of paths through attention and the residual stream, without MLPs and without the softmax's own derivative."""


@dataclass(frozen=True, eq=False)
class AttentionRollout:
    """One rollout for a set of prompts."""

    profile: Profile
    """Mean over prompts, with pointwise intervals over prompts."""
    per_prompt: Float64[np.ndarray, "count n_positions"]
    """Each prompt's own rollout; rows sum to 1."""


@dataclass(frozen=True, eq=False)
class AttentionRollouts:
    """All rollouts of the same attention."""

    rollouts: dict[str, AttentionRollout]
    """By the names of ROLLOUTS."""
    mixing: Float64[np.ndarray, "count layers"]
    """Measured on each prompt: mean over tokens of |a| / (|x| + |a|)."""
    left_out: tuple[str, ...]
    """What does not apply to this model, and why."""


@checked
def attention_rollouts(model: Model, prompts: Prompts) -> AttentionRollouts:
    """Every rollout of a model's own attention, from one forward pass and one recomputation per prompt and layer.

    Kept per prompt: what each attention module read, layers x N x d numbers. With the norms of stream and branch
    measured on the same pass, every prompt has its own mixing.

    Args:
        model: A model of a described family.
        prompts: Equally long prompts.

    Returns:
        By name the mean profile with its interval and one profile per prompt.

    Raises:
        UsageError: another family, or one whose attention cannot be recomputed.
        RunError: activations are not finite.

    Source: `rollout`: arXiv 2602.16837, section 3, with the prompt's own attention; `attention_only`: Abnar and Zuidema
        (arXiv 2005.00928) without their fixed residual half; `norm_weighted`: Kobayashi et al. (arXiv 2004.10102);
        their later form (arXiv 2109.07152) adds the residual as a vector, we use the measured mixing; `power`: ours.
    """
    rows: dict[str, list[Row]] = {}
    mixing: list[list[float]] = []
    left_out: tuple[str, ...] = ()
    for ids in track(prompts.token_ids, "rollouts of attention"):
        trace = trace_attention(model, model.token_tensor([ids.tolist()])[0])
        names, left_out = _applicable(trace)
        shares = trace.mixing.tolist()
        for name, row in _pull(trace.layers, {name: ROLLOUTS[name] for name in names}, shares).items():
            rows.setdefault(name, []).append(row)
        mixing.append(shares)
    return AttentionRollouts({name: _averaged(found) for name, found in rows.items()}, np.array(mixing), left_out)


@checked
def attention_rollout(model: Model, prompts: Prompts, mixing: Sequence[float] | float) -> AttentionRollout:
    """Rollout of the measured attention with a given residual share per layer.

    Args:
        model: A model of a described family.
        prompts: Equally long prompts.
        mixing: m_l in [0, 1], one number or one per layer; 1 is attention alone, 0 the identity.

    Returns:
        The mean profile with its interval, and one per prompt.

    Raises:
        UsageError: unsupported family, or mixing outside [0, 1] or of the wrong length.

    Source: arXiv 2602.16837, section 3, with the prompt's own attention in place of a content-free kernel.
    """
    rows = [attention_rollout_prompt(model, ids, mixing) for ids in track(prompts.token_ids, "attention rollout")]
    return _averaged(rows)


def attention_rollout_prompt(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], mixing: Sequence[float] | float
) -> Float64[np.ndarray, "n_positions"]:
    """One prompt's rollout: non-negative, sums to 1.

    Args:
        model: As for `attention_rollout`.
        token_ids: One prompt.
        mixing: As for `attention_rollout`.
    """
    trace = trace_attention(model, model.token_tensor([token_ids.tolist()])[0])
    return _pull(trace.layers, {"rollout": ROLLOUTS["rollout"]}, _shares(mixing, len(trace.layers)))["rollout"]


def attention_rollout_of(trace: DescribedTrace, mixing: Sequence[float] | float) -> Row:
    """The rollout of a prompt that was traced for the power rollout before: no pass of its own.

    Args:
        trace: Of the prompt.
        mixing: As for `attention_rollout`.

    Returns:
        Non-negative, sums to 1.
    """
    layers = [
        AttentionTraceLayer(layer.attention, attention_input(layer, kept), before=None, after=None)
        for layer, kept in zip(trace.description.layers, trace.trace.layers, strict=True)
    ]
    return _pull(layers, {"rollout": ROLLOUTS["rollout"]}, _shares(mixing, len(layers)))["rollout"]


@torch.no_grad()
def _pull(
    layers: Sequence[AttentionTraceLayer], rules: dict[str, RolloutRule], mixing: Sequence[float]
) -> dict[str, Row]:
    """The last row of each product, normalised."""
    read = layers[0].given.read
    last = torch.zeros(len(read), dtype=torch.float64, device=read.device)
    last[-1] = 1
    rows = dict.fromkeys(rules, last)
    for kept, share in zip(reversed(layers), reversed(mixing), strict=True):
        pulled = _pull_layer(kept, rules, rows)
        for name, rule in rules.items():
            keep, move = rule.shares(share)
            row = keep * rows[name] + move * pulled[name]
            rows[name] = row / row.sum()
    found: dict[str, Row] = {}
    for name, row in rows.items():
        values = np.asarray((row.sqrt() if rules[name].energies else row).cpu().numpy())
        if not np.all(np.isfinite(values)):
            raise RunError(
                f"the {name} rollout of the model's attention is not finite; load it in a wider type (float32, float64)"
            )
        found[name] = values / values.sum()
    return found


def _pull_layer(
    kept: AttentionTraceLayer, rules: dict[str, RolloutRule], rows: dict[str, Float64[Tensor, "position"]]
) -> dict[str, Float64[Tensor, "position"]]:
    """row @ transition of every rule, from one pass over the layer's attention."""
    layer, given = kept.layer, kept.given
    state = rotated(project_attention(layer.parts, given.read), given.cosine, given.sine)
    transitions = {rule.prepare: rule.prepare(kept, state) for rule in rules.values()}
    pulled = {name: torch.zeros_like(row) for name, row in rows.items()}
    for block in query_blocks(layer.parts, state, reach=layer.reach):
        matrices = {prepare: transition(block).double() for prepare, transition in transitions.items()}
        for name, rule in rules.items():
            pulled[name][block.keys] += rows[name][block.queries] @ matrices[rule.prepare]
    return pulled


def _applicable(trace: AttentionTrace) -> tuple[list[str], tuple[str, ...]]:
    """Names of the rollouts that a model allows, and a sentence for the others."""
    if any(kept.before is None and kept.after is None for kept in trace.layers):
        reason = "power: the model normalises the stream itself, after adding to it"
        return [name for name in ROLLOUTS if name != "power"], (reason,)
    return list(ROLLOUTS), ()


def _averaged(rows: Sequence[Row]) -> AttentionRollout:
    per_prompt = np.stack(rows)
    return AttentionRollout(Profile.mean_of(per_prompt), per_prompt)


def _shares(mixing: Sequence[float] | float, depth: int) -> list[float]:
    shares = [float(mixing)] * depth if isinstance(mixing, int | float) else [float(share) for share in mixing]
    if len(shares) != depth:
        raise UsageError(f"mixing needs one number or {depth}, one per layer; got {len(shares)}")
    for share in shares:
        if not 0 <= share <= 1:
            raise UsageError(f"mixing must lie in [0, 1], got {share}")
    return shares
