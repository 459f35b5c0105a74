"""Exact gradients of a rollout profile with respect to mixing, key biases, slopes, sinks and content, by the adjoint.

For a functional <cotangent, profile> with rows x_l pulled from the top and columns v_l pushed from the bottom,
d/dm_l = x (A_l v - v) and d/dtheta = m_l x (dA_l/dtheta) v with dA_ij = A_ij (g_ij - sum_k A_ik g_ik), g the derivative
of the logits: [i = j] for content, -|i - j| for slopes, [j = k] for the bias of key k; a sink takes its share of a row
away from each A_ij. No matrix is formed: a few pulls per layer and head; one walk for all causal heads with slopes or
gamma keys, without content and sinks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float64
from scipy.special import digamma

from posbias.architecture import Architecture, GammaKey
from posbias.errors import UsageError
from posbias.theory.kernels import IntervalKernel, Kernel, LinearKernel, SumKernel
from posbias.theory.kernels.derivatives import Walk, walks
from posbias.theory.kernels.distance import Correlation
from posbias.theory.kernels.keys import KeyKernel
from posbias.theory.rollout import Rollout

Vector = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True, eq=False)
class ProfileGradient:
    """Derivatives of sum_j cotangent_j profile_j."""

    value: float
    """The functional itself."""
    mixing: Float64[np.ndarray, "depth"]
    """Derivative by the mixing coefficient of every layer."""
    content: Float64[np.ndarray, "depth heads"]
    """Derivative by the diagonal logit offset of every layer and head."""
    slopes: Float64[np.ndarray, "depth heads"]
    """Derivative by the slope of every layer and head; nan if the encoding is not linear in the distance."""
    rates: Float64[np.ndarray, "depth heads"]
    """Derivative by the decay rate exp(-slope) of every layer and head; nan likewise."""
    sinks: Float64[np.ndarray, "depth heads"]
    """Derivative by the sink's logit of every layer and head; 0 without a sink."""
    alphas: Float64[np.ndarray, "depth heads"]
    """Derivative by the exponent of every layer and head; nan if the keys are not gamma keys."""
    keys: dict[tuple[int, int], Float64[np.ndarray, "n_positions"]]
    """Derivative by the bias of every key, for each (layer, head) with a key bias; without causal gamma keys that have
    no content, slope or sinks, whose exponents say all."""


@dataclass(frozen=True, eq=False)
class _LayerState:
    """The row from above and the column from below that meet at one layer, and its mixing over its heads."""

    row: Vector
    column: Vector
    share: float


def profile_gradient(
    architecture: Architecture | Rollout, cotangent: Float64[np.ndarray, "n_positions"]
) -> ProfileGradient:
    """Gradient of <cotangent, profile> with respect to every mixing, content offset, slope, rate, sink and key bias.

    Args:
        architecture: Any mask and encoding; content and sinks included. Or its rollout at the cotangent's length, whose
            kernels are then not built again.
        cotangent: Weight of each position in the functional, of any sign; its length is the context length N.
            A one-hot vector gives the gradient of one position's influence.

    Returns:
        The functional and its derivatives, exact up to rounding.

    Raises:
        UsageError: an empty cotangent, or one that is not finite.
    """
    if cotangent.size == 0 or not np.all(np.isfinite(cotangent)):
        raise UsageError("the cotangent needs one finite weight per position, at least one")
    rollout = architecture if isinstance(architecture, Rollout) else Rollout(architecture, cotangent.size)
    shape = (rollout.architecture.depth, rollout.architecture.heads)
    slopes, rates, alphas = (np.full(shape, np.nan) for _ in range(3))
    gradient = ProfileGradient(0.0, np.zeros(shape[0]), np.zeros(shape), slopes, rates, np.zeros(shape), alphas, {})
    rows = [rollout.unit(-1)]
    for layer in reversed(range(shape[0])):
        rows.append(rollout.pull_layer(layer, rows[-1]))
    column, walked = cotangent, walks(rollout.kernels)
    for layer, (kernel, mixing) in enumerate(zip(rollout.kernels, rollout.mixing, strict=True)):
        state = _LayerState(rows[-2 - layer], column, float(mixing) / shape[1])
        parts = [_part_gradients(part, walked.get(part), state, layer, gradient) for part in _parts(kernel)]
        mean = np.sum(parts, axis=0)
        gradient.mixing[layer] = state.row @ (mean - column)
        column = (1 - mixing) * column + mixing * mean
    return replace(gradient, value=float(column[-1]))


def _part_gradients(
    kernel: IntervalKernel | KeyKernel, walk: Walk | None, state: _LayerState, layer: int, gradient: ProfileGradient
) -> Vector:
    """Derivatives by the parameters of some heads of a layer; returns their part of the layer's push of the column."""
    if walk is None:
        pushed = _signed(kernel.push, state.column)
        if isinstance(kernel, KeyKernel):
            _key_gradients(kernel, pushed, state, layer, gradient)
        else:
            _interval_gradients(kernel, state, layer, gradient)
        return pushed
    pushed, by_parameter, by_content = walk(state.column, state.row)
    for head, members in enumerate(kernel.members):
        heads = kernel.group.heads[members] if isinstance(kernel, LinearKernel) else members
        gradient.content[layer, heads] = state.share * by_content[head]
        if walk.decaying:
            gradient.slopes[layer, heads] = state.share * by_parameter[head]
            gradient.rates[layer, heads] = -state.share * by_parameter[head] / walk.parameters[head]
        else:
            gradient.alphas[layer, heads] = state.share * by_parameter[head]
    return pushed


def _interval_gradients(kernel: IntervalKernel, state: _LayerState, layer: int, gradient: ProfileGradient) -> None:
    for head, members in enumerate(kernel.members):
        heads = kernel.group.heads[members]
        pushed = _signed(partial(kernel.push_head, head), state.column)
        gradient.content[layer, heads] = state.share * _content(state, kernel.shares(head).diagonal, pushed)
        if np.any(kernel.group.sinks[members] > -np.inf):
            missing = 1 - kernel.push_head(head, np.ones_like(state.row))
            gradient.sinks[layer, heads] = -state.share * float((state.row * missing) @ pushed)
        if isinstance(kernel, LinearKernel):
            pulled, mean_distance = _distance_moments(kernel, head, state.row)
            slope = state.share * float((state.row * mean_distance) @ pushed - pulled @ state.column)
            gradient.slopes[layer, heads] = slope
            gradient.rates[layer, heads] = -slope / kernel.rates[head]


def _key_gradients(kernel: KeyKernel, mean: Vector, state: _LayerState, layer: int, gradient: ProfileGradient) -> None:
    for heads, single in kernel.unique_heads():
        # If all heads are alike, their push is the layer's mean.
        pushed = mean if len(heads) == kernel.n_heads else _signed(single.push, state.column)
        # A signed row as a non-negative one: its mean over queries is shifted, and the shift taken off again.
        low = float(pushed.min())
        pulled = single.pull(state.row)
        keys = state.share * (pulled * (state.column - low) - single.pull(state.row * (pushed - low)))
        content = state.share * _content(state, single.diagonal(), pushed)
        missing = 1 - single.push(np.ones_like(state.row)) if single.has_sinks else np.zeros_like(state.row)
        gradient.content[layer, heads] = content
        gradient.sinks[layer, heads] = -state.share * float((state.row * missing) @ pushed)
        gradient.keys.update({(layer, head): keys for head in heads.tolist()})
        if isinstance(kernel.encoding, GammaKey):
            alpha = kernel.encoding.parameters(kernel.n_heads)[heads[0], 0]
            gradient.alphas[layer, heads] = keys @ (digamma(np.arange(keys.size) + alpha) - digamma(alpha))


def _content(state: _LayerState, diagonal: Vector, pushed: Vector) -> float:
    return float((state.row * diagonal) @ (state.column - pushed))


def _distance_moments(
    kernel: LinearKernel, head: int, row: Float64[np.ndarray, "n_positions"]
) -> tuple[Float64[np.ndarray, "n_positions"], Float64[np.ndarray, "n_positions"]]:
    """row @ (A o |i - j|), and the row sums of A o |i - j|: how far each query looks on average."""
    off = kernel.shares(head).off
    scaled, unit = row * off, np.ones_like(row)
    pulled, mean_distance = np.zeros_like(row), np.zeros_like(row)
    if kernel.window:
        sums = Correlation(_weighted_distances(kernel, head, kernel.window), kernel.n_positions)
        pulled += sums(scaled[::-1].copy())[::-1]
        mean_distance += sums(unit)
    if kernel.prefix > 1:
        prefix = kernel.prefix
        sums = Correlation(_weighted_distances(kernel, head, prefix - 1), prefix)
        pulled[:prefix] += sums(scaled[:prefix].copy())
        mean_distance[:prefix] += sums(unit[:prefix].copy())[::-1]
    return pulled, mean_distance * off


def _weighted_distances(kernel: LinearKernel, head: int, longest: int) -> Float64[np.ndarray, "distances"]:
    """d rate^(d - 1) for d = 1, 2, ...: weights relative to distance 1, as in the kernel's shares."""
    distance = np.arange(1, longest + 1, dtype=np.float64)
    return np.asarray(distance * np.exp(-kernel.slopes[head] * (distance - 1)))


def _parts(kernel: Kernel) -> tuple[IntervalKernel | KeyKernel, ...]:
    parts = kernel.parts if isinstance(kernel, SumKernel) else (kernel,)
    differentiable = tuple(part for part in parts if isinstance(part, IntervalKernel | KeyKernel))
    if len(differentiable) < len(parts):
        raise UsageError("gradients need encodings by distance or by key (not sinusoidal or learned) and no chunks")
    return differentiable


def _signed(push: Callable[[Vector], Vector], column: Vector) -> Vector:
    """A push of a column of any sign: of its excess over its least entry, and of that entry everywhere."""
    low = min(float(column.min()), 0.0)
    if low == 0.0:
        return push(column)
    return push(column - low) + low * push(np.ones_like(column))
