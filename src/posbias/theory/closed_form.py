"""Uniform causal attention exactly, at any context length (docs/theory, section 2).

Products of Cesaro matrices multiply their Hausdorff moments, so the last row needs no matrix:
profile_j = (1/N) sum_k P(K = k) h_{k-1}(1/(j+1), ..., 1/N) + P(K = 0) [j = N - 1],
with K Poisson-binomial in the mixings and h_n the complete homogeneous symmetric polynomial. Every term is
non-negative. Also its continuous limit, a density plus an atom.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64, Int64
from scipy import special

from posbias.checks import checked, checked_value
from posbias.errors import UsageError

EULER_MACLAURIN_TERMS = 12
"""Correction terms; from `DIRECT_TERMS` + r on, the last one is below 1e-17 of the sum."""

DIRECT_TERMS = 40
"""Reciprocals 1/i^r with i below this plus r are added one by one: too near the pole for the expansion."""


@checked
def closed_form(
    n_positions: Annotated[int, Ge(1)],
    positions: Sequence[int] | Int64[np.ndarray, "chosen"],
    mixing: Sequence[float] | np.ndarray,
) -> Float64[np.ndarray, "chosen"]:
    """Exact rollout profile of uniform causal attention at chosen positions, O(L^2) each whatever the length.

    Args:
        n_positions: Context length N, >= 1; 10^12 and more are fine.
        positions: 0-based input positions j, each in 0 ... N - 1.
        mixing: m_l in [0, 1] of every layer.

    Returns:
        Influence of each chosen position on the last one; over all positions it sums to 1.

    Raises:
        UsageError: a position outside the context, a mixing outside [0, 1], or no layer.

    Source: docs/theory, section 2 (moments of Hausdorff matrices, Newton's identities); in the limit arXiv 2603.10123.
    """
    steps = attention_steps(mixing)
    chosen = [int(position) for position in positions]
    for position in chosen:
        if not 0 <= position < n_positions:
            raise UsageError(f"position must lie in 0 ... {n_positions - 1}, got {position}")
    count = np.array([float(n_positions - position) for position in chosen])
    first = np.array([float(position + 1) for position in chosen])
    depth = len(steps) - 1
    sums = np.array([reciprocal_power_sums(first, count, power) for power in range(1, max(depth, 2))])
    homogeneous = _homogeneous(np.log(sums))
    harmonic = sums[0] / first
    terms = [steps[k] * harmonic ** (k - 1) * homogeneous[k - 1] for k in range(1, depth + 1)]
    profile = np.sum(terms, axis=0) / float(n_positions)
    return np.asarray(profile + np.where(count == 1, steps[0], 0.0))


def _homogeneous(log_sums: Float64[np.ndarray, "orders chosen"]) -> Float64[np.ndarray, "degrees chosen"]:
    """h_n / p_1^n, n = 0, 1, ..., from ln p_1, ln p_2, ...: n h_n = sum_r p_r h_{n-r}, all terms positive.

    Divided by p_1^n nothing over- or underflows, and a common factor of the variables drops out.
    """
    orders = np.arange(1, len(log_sums) + 1)[:, None]
    ratios = np.exp(log_sums - orders * log_sums[0])
    homogeneous = np.ones((len(log_sums) + 1, log_sums.shape[1]))
    for degree in range(1, len(homogeneous)):
        homogeneous[degree] = np.sum(ratios[:degree] * homogeneous[:degree][::-1], axis=0) / degree
    return homogeneous


def attention_steps(mixing: Sequence[float] | np.ndarray) -> Float64[np.ndarray, "counts"]:
    """P(K = k), k = 0 ... L: in how many layers the walk takes an attention step rather than the residual.

    Raises:
        UsageError: no layer, or a mixing outside [0, 1].
    """
    values = np.asarray(mixing, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise UsageError(f"mixing needs one value per layer, got shape {list(values.shape)}")
    steps = np.ones(1)
    for value in values:
        if not 0 <= value <= 1:
            raise UsageError(f"mixing must lie in [0, 1], got {value}")
        steps = np.append(steps * (1 - value), 0.0) + np.append(0.0, steps * value)
    return steps


def reciprocal_power_sums(
    first: Float64[np.ndarray, "chosen"], count: Float64[np.ndarray, "chosen"], power: int
) -> Float64[np.ndarray, "chosen"]:
    """sum of (first / i)^power over i = first ... first + count - 1, accurate even for one far-out term.

    Euler-Maclaurin at half-integers, written in the difference of its ends (log1p, expm1), so that no two zeta values
    are ever subtracted; the first few reciprocals, too near the pole, are added directly.
    """
    start = float(DIRECT_TERMS + power)
    last = first + count - 1
    total = np.zeros_like(first)
    for value in range(int(start) - 1, 0, -1):
        total += np.where((first <= value) & (value <= last), np.minimum(first / value, 1.0) ** power, 0.0)
    nearest = np.maximum(first, start) - 0.5
    remaining = np.maximum(last + 0.5 - nearest, 0.0)
    # Far out last + 0.5 - nearest rounds; the count is exact there.
    remaining = np.where(first >= start, count, remaining)
    growth = np.log1p(remaining / nearest)
    integral = growth if power == 1 else -np.expm1((1 - power) * growth) / (power - 1)
    far = nearest * integral
    bernoulli = special.bernoulli(2 * EULER_MACLAURIN_TERMS)
    for term in range(1, EULER_MACLAURIN_TERMS + 1):
        order = 2 * term - 1
        midpoint = (2.0 ** (1 - 2 * term) - 1) * bernoulli[2 * term]
        factor = midpoint * special.poch(power, order) / special.factorial(2 * term)
        far += factor * nearest**-order * -np.expm1(-(power + order) * growth)
    return np.asarray(total + far * (first / nearest) ** power)


def continuous_profile(n_positions: int, mixing: Sequence[float] | np.ndarray) -> Float64[np.ndarray, "n_positions"]:
    """The continuous limit on N positions: its mass in each cell [j/N, (j+1)/N], the atom added to the last position.

    With k attention steps the mass below x is P(Gamma(k) > ln(1/x)).
    """
    checked_value("n_positions", n_positions, Annotated[int, Ge(1)])
    steps = attention_steps(mixing)
    with np.errstate(divide="ignore"):
        edges = -np.log(np.arange(n_positions + 1) / n_positions)
    near, far = edges[1:], edges[:-1]
    profile = np.zeros(n_positions)
    for k in np.flatnonzero(steps[1:]) + 1:
        upper = special.gammaincc(k, near) - special.gammaincc(k, far)
        lower = special.gammainc(k, far) - special.gammainc(k, near)
        profile += steps[k] * np.where(near > k, upper, lower)
    profile[-1] += steps[0]
    return profile
