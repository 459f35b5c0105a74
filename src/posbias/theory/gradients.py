"""Exact gradients of a rollout profile with respect to mixing, slopes and exponents of gamma keys, by the adjoint.

For a functional <cotangent, profile> with rows x_l pulled from the top and columns v_l pushed from the bottom,
d/dm_l = x (A_l v - v) and d/dtheta = m_l x (dA_l/dtheta) v. A logit rises by f_j dtheta at key j (f = j for slopes,
digamma(j + alpha) for exponents), whatever the query subtracts, so dA v = A (f v) - (A f) (A v): the covariance of f
and v under each query's attention. No matrix is formed: one walk for all causal heads, a few pushes for each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float64
from scipy.special import digamma

from posbias.architecture import Architecture, GammaKey
from posbias.errors import UsageError
from posbias.theory.kernels import Kernel, KeyKernel, LinearKernel, SumKernel
from posbias.theory.kernels.loops import sweep_covariance
from posbias.theory.rollout import Rollout

Vector = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True, eq=False)
class ProfileGradient:
    """Derivatives of sum_j cotangent_j profile_j."""

    value: float
    """The functional itself."""
    mixing: Float64[np.ndarray, "depth"]
    """Derivative by the mixing coefficient of every layer."""
    slopes: Float64[np.ndarray, "depth heads"]
    """Derivative by the slope of every layer and head; nan if the encoding has none, or the mask looks forwards."""
    alphas: Float64[np.ndarray, "depth heads"]
    """Derivative by the exponent of every layer and head; nan if the keys are not gamma keys."""


def profile_gradient(
    architecture: Architecture | Rollout, cotangent: Float64[np.ndarray, "n_positions"]
) -> ProfileGradient:
    """Gradient of <cotangent, profile> with respect to every mixing, slope and exponent.

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
    gradient = ProfileGradient(0.0, np.zeros(shape[0]), np.full(shape, np.nan), np.full(shape, np.nan))
    rows = [rollout.unit(-1)]
    for layer in reversed(range(shape[0])):
        rows.append(rollout.pull_layer(layer, rows[-1]))
    column = cotangent
    for layer, (kernel, mixing) in enumerate(zip(rollout.kernels, rollout.mixing, strict=True)):
        row, mean = rows[-2 - layer], np.zeros_like(column)
        for part in kernel.parts if isinstance(kernel, SumKernel) else (kernel,):
            pushed, slopes, alphas = _derivatives(part, row, column)
            mean += pushed
            for derivatives, found in ((gradient.slopes, slopes), (gradient.alphas, alphas)):
                for heads, derivative in found:
                    derivatives[layer, heads] = float(mixing) / shape[1] * derivative
        gradient.mixing[layer] = row @ (mean - column)
        column = (1 - mixing) * column + mixing * mean
    return replace(gradient, value=float(column[-1]))


Found = list[tuple[np.ndarray, float]]
"""Heads that are alike, with row (dA / dparameter) column of one of them."""


def _derivatives(kernel: Kernel, row: Vector, column: Vector) -> tuple[Vector, Found, Found]:
    """Some heads' part of the layer's push of the column; derivatives by slopes and by exponents."""
    if isinstance(kernel, LinearKernel | KeyKernel) and kernel.walked is not None:
        pushed, derivatives = np.empty_like(column), np.empty_like(kernel.weights)
        gamma = isinstance(kernel, KeyKernel)
        sweep_covariance(column, row, kernel.walked, gamma, kernel.weights, pushed, derivatives)
        found: Found = list(zip(kernel.layer_heads, derivatives.tolist(), strict=True))
        return (pushed, [], found) if gamma else (pushed, found, [])
    slopes: Found = []
    alphas: Found = []
    position = np.arange(column.size, dtype=np.float64)
    if isinstance(kernel, LinearKernel) and kernel.prefix < 2:
        for head, members in enumerate(kernel.layer_heads):
            slopes.append((members, _by_parameter(partial(kernel.push_head, head), position, position, row, column)))
    elif isinstance(kernel, KeyKernel) and isinstance(kernel.encoding, GammaKey):
        for members, single in kernel.unique_heads():
            alpha = kernel.encoding.parameters(kernel.n_heads)[members[0], 0]
            by_alpha = digamma(position + alpha) - digamma(alpha)
            slopes.append((members, _by_parameter(single.push, position, np.zeros_like(row), row, column)))
            alphas.append((members, _by_parameter(single.push, by_alpha, np.zeros_like(row), row, column)))
    return _signed(kernel.push, column), slopes, alphas


def _by_parameter(push: Callable[[Vector], Vector], rise: Vector, less: Vector, row: Vector, column: Vector) -> float:
    """row (dA / dparameter) column, where the logit of key j rises by rise_j - less_i for query i.

    What a query subtracts cancels, unless a sink beside the keys takes a part of its row.
    """
    pushed, missing = _signed(push, column), 1 - push(np.ones_like(row))
    covariance = _signed(push, rise * column) - (push(rise) + less * missing) * pushed
    return float(row @ covariance)


def _signed(push: Callable[[Vector], Vector], column: Vector) -> Vector:
    """A push of a column of any sign: of its excess over its least entry, and of that entry everywhere."""
    low = min(float(column.min()), 0.0)
    if low == 0.0:
        return push(column)
    return push(column - low) + low * push(np.ones_like(column))
