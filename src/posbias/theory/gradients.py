"""Exact gradients of a rollout profile with respect to mixing, slopes, rates and content, by the adjoint.

For a functional <cotangent, profile> with rows x_l pulled from the top and columns v_l pushed from the bottom,
d/dm_l = x (A_l v - v) and d/dtheta = m_l x (dA_l/dtheta) v with dA_ij = A_ij (g_ij - sum_k A_ik g_ik), g the derivative
of the logits: [i = j] for content, -|i - j| for slopes. No matrix is formed; a few pulls per layer and head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.errors import UsageError
from posbias.theory.kernels import IntervalKernel, Kernel, LinearKernel, SumKernel
from posbias.theory.kernels.distance import Correlation
from posbias.theory.rollout import Rollout


@dataclass(frozen=True, eq=False)
class ProfileGradient:
    """Derivatives of sum_j cotangent_j profile_j."""

    value: float
    """The functional itself."""
    mixing: Float64[np.ndarray, "depth"]
    """By the mixing coefficient of every layer."""
    content: Float64[np.ndarray, "depth heads"]
    """By the diagonal logit offset of every layer and head."""
    slopes: Float64[np.ndarray, "depth heads"]
    """By the slope of every layer and head; nan where the encoding is not linear in the distance."""
    rates: Float64[np.ndarray, "depth heads"]
    """By the decay rate exp(-slope) of every layer and head; nan likewise."""


@dataclass(frozen=True, eq=False)
class _LayerState:
    """What meets at one layer: the row from above, the column from below, and the layer's mixing over heads."""

    row: Float64[np.ndarray, "n_positions"]
    column: Float64[np.ndarray, "n_positions"]
    share: float


def profile_gradient(architecture: Architecture, cotangent: Float64[np.ndarray, "n_positions"]) -> ProfileGradient:
    """Gradient of <cotangent, profile> with respect to every mixing, content offset, slope and rate.

    Args:
        architecture: Any mask and encoding; content and sinks included.
        cotangent: Weight of each position in the functional, of any sign; its length is the context length N.
            A one-hot vector gives the gradient of one position's influence.

    Returns:
        The functional and its derivatives, exact up to rounding.

    Raises:
        UsageError: an empty cotangent, or one that is not finite.
    """
    if cotangent.size == 0 or not np.all(np.isfinite(cotangent)):
        raise UsageError("the cotangent needs one finite weight per position, at least one")
    rollout = Rollout(architecture, cotangent.size)
    columns = [cotangent]
    for layer in range(architecture.depth):
        columns.append(_signed(partial(rollout.push_layer, layer), columns[-1]))
    shape = (architecture.depth, architecture.heads)
    mixing, content, slopes, rates = np.zeros(shape[0]), np.zeros(shape), np.full(shape, np.nan), np.full(shape, np.nan)
    row = rollout.unit(-1)
    for layer in reversed(range(architecture.depth)):
        kernel, column = rollout.kernels[layer], columns[layer]
        mixing[layer] = row @ (_signed(kernel.push, column) - column)
        state = _LayerState(row, column, float(rollout.mixing[layer]) / architecture.heads)
        for part in _parts(kernel):
            for head in range(len(part.members)):
                heads = part.group.heads[part.members[head]]
                content[layer, heads], slope = _head_gradient(part, head, state)
                if isinstance(part, LinearKernel):
                    slopes[layer, heads] = slope
                    rates[layer, heads] = -slope / part.rates[head]
        row = rollout.pull_layer(layer, row)
    return ProfileGradient(float(columns[-1][-1]), mixing, content, slopes, rates)


def _head_gradient(kernel: IntervalKernel, head: int, state: _LayerState) -> tuple[float, float]:
    """Derivatives by content and slope of each head that the unique head stands for (slope: nan if not linear)."""
    pushed = _signed(lambda column: kernel.push_head(head, column), state.column)
    content = float((state.row * kernel.shares(head).diagonal) @ (state.column - pushed))
    slope = np.nan
    if isinstance(kernel, LinearKernel):
        pulled, mean_distance = _distance_moments(kernel, head, state.row)
        slope = state.share * float((state.row * mean_distance) @ pushed - pulled @ state.column)
    return state.share * content, slope


def _distance_moments(
    kernel: LinearKernel, head: int, row: Float64[np.ndarray, "n_positions"]
) -> tuple[Float64[np.ndarray, "n_positions"], Float64[np.ndarray, "n_positions"]]:
    """row @ (A o |i - j|), and the row sums of A o |i - j|: how far each query looks on average."""
    off = kernel.shares(head).off
    scaled, ones = row * off, np.ones_like(row)
    pulled, mean_distance = np.zeros_like(row), np.zeros_like(row)
    if kernel.window:
        sums = Correlation(_weighted_distances(kernel, head, kernel.window), kernel.n_positions)
        pulled += sums(scaled[::-1].copy())[::-1]
        mean_distance += sums(ones)
    if kernel.prefix > 1:
        prefix = kernel.prefix
        sums = Correlation(_weighted_distances(kernel, head, prefix - 1), prefix)
        pulled[:prefix] += sums(scaled[:prefix].copy())
        mean_distance[:prefix] += sums(ones[:prefix].copy())[::-1]
    return pulled, mean_distance * off


def _weighted_distances(kernel: LinearKernel, head: int, longest: int) -> Float64[np.ndarray, "distances"]:
    """d rate^(d - 1) for d = 1, 2, ...: weights relative to distance 1, as in the kernel's shares."""
    distance = np.arange(1, longest + 1, dtype=np.float64)
    return np.asarray(distance * np.exp(-kernel.slopes[head] * (distance - 1)))


def _parts(kernel: Kernel) -> tuple[IntervalKernel, ...]:
    parts = kernel.parts if isinstance(kernel, SumKernel) else (kernel,)
    absolute = [part for part in parts if not isinstance(part, IntervalKernel)]
    if absolute:
        raise UsageError("gradients need encodings that depend on the distance alone (not sinusoidal or learned)")
    return tuple(part for part in parts if isinstance(part, IntervalKernel))


def _signed(
    push: Callable[[Float64[np.ndarray, "n_positions"]], Float64[np.ndarray, "n_positions"]],
    column: Float64[np.ndarray, "n_positions"],
) -> Float64[np.ndarray, "n_positions"]:
    """A push of a column of any sign, from the pushes of its two non-negative parts."""
    return np.asarray(push(np.maximum(column, 0.0)) - push(np.maximum(-column, 0.0)))
