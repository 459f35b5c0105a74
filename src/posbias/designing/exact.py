"""Key biases that realise a rollout profile exactly (docs/theory, section 7).

With one key bias in every layer, w_j = exp(b_j) and r_j = w_j / (w_0 + ... + w_j),

    profile_j = r_j prod_{i>j} (1 - r_i) sum_k P(K = k) h_{k-1}(r_j, ..., r_{N-1})  +  P(K = 0) [j = N - 1],

K the number of attention steps. Given the later r, position j rises with r_j from 0 to all that is left: one root per
position, from the last to the first, reaches any target. Gamma keys whose exponents telescope hold theirs at every
length.
"""

from typing import no_type_check

import numpy as np
from jaxtyping import Float64
from numba import njit

from posbias.architecture.keys import MAX_BIAS
from posbias.errors import UsageError
from posbias.theory.closed_form import attention_steps

Vector = Float64[np.ndarray, "n_positions"]


def key_bias_for(profile: Vector, mixing: Float64[np.ndarray, "depth"]) -> Vector:
    """The key bias which, in every layer, gives this rollout profile under a causal mask.

    Args:
        profile: Positive, summing to 1; the last position has more than P(K = 0) = prod_l (1 - m_l).
        mixing: m_l in [0, 1], not all 0.

    Returns:
        b_j, in nats, the middle of its range at 0.

    Raises:
        UsageError: the bias would span more than a float64 weight holds.

    Source: ours.
    """
    steps = attention_steps(mixing)
    moved = profile.copy()
    moved[-1] -= steps[0]
    share, remaining = _shares(moved / np.cumsum(moved), steps)
    # W_j = W_{j-1} / (1 - r_j), w_j = r_j W_j; in logarithms, from the first position up.
    with np.errstate(divide="ignore"):
        log_total = -np.concatenate([[0.0], np.cumsum(np.log(remaining[1:]))])
        bias = np.log(share) + log_total
    if not np.all(np.isfinite(bias)) or np.ptp(bias) > 2 * MAX_BIAS:
        raise UsageError(
            f"the target needs key biases that span more than {2 * MAX_BIAS:g} nats; "
            "a target nearer to uniform, or fewer layers, would do"
        )
    return np.asarray(bias - (bias.max() + bias.min()) / 2)


def telescoping_alphas(exponent: float, mixing: Float64[np.ndarray, "depth"]) -> Float64[np.ndarray, "depth"]:
    """Exponents of gamma keys whose rollout is the power law `exponent` at every row and length.

    alpha_0 = 1 + exponent, alpha_{l+1} = alpha_l / (1 - m_l): the moments' product telescopes to
    (a + P0 s) / (a + s). Layers that mix everything take the last places.

    Returns:
        Exponents, inf for a second layer that mixes everything: its attention must stay on the query's own position.
        A gamma key holds at most MAX_ALPHA.
    """
    order = np.argsort(mixing == 1, kind="stable")
    alphas = np.empty(len(mixing))
    with np.errstate(divide="ignore", over="ignore"):
        alphas[order] = (1 + exponent) / np.concatenate([[1.0], np.cumprod(1 - mixing[order][:-1])])
    return alphas


@njit(cache=True)
@no_type_check
def _row(states, share, steps, out):
    """Terms T_n = sum_m r^m H_{n-m} in `out`; returns r sum_k P(k) T_{k-1}, the position's mass, and its slope."""
    total = 0.0
    slope = 0.0
    term = 0.0
    rise = 0.0
    for n in range(states.size):
        rise = term + share * rise
        term = states[n] + share * term
        out[n] = term
        total += steps[n + 1] * term
        slope += steps[n + 1] * rise
    return share * total, total + share * slope


@njit(cache=True)
@no_type_check
def _shares(fractions, steps):
    """r_j and 1 - r_j of every position, from the last to the first.

    fractions_j is what position j gets of all that reaches positions up to j, so that rounding at late positions is not
    left to the early ones. The state H_n = prod_{i>j} (1 - r_i) h_n(r_{j+1}, ...) holds everything about the later
    positions; the mass of position j is a polynomial of r_j with non-negative coefficients, convex and rising, so
    Newton's method from above falls onto the root.
    """
    n_positions = fractions.size
    depth = steps.size - 1
    share = np.empty(n_positions)
    remaining = np.empty(n_positions)
    states = np.zeros(depth)
    states[0] = 1.0
    terms = np.empty(depth)
    for j in range(n_positions - 1, -1, -1):
        r = 1.0
        if j > 0:
            all_mass, _ = _row(states, 1.0, steps, terms)
            aimed = fractions[j] * all_mass
            for _ in range(200):
                mass, slope = _row(states, r, steps, terms)
                lower = r - (mass - aimed) / slope
                if not lower < r:
                    break
                r = max(lower, 0.0)
        _row(states, r, steps, terms)
        share[j] = r
        remaining[j] = 1.0 - r
        for n in range(depth):
            states[n] = remaining[j] * terms[n]
    return share, remaining
