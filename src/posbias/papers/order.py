"""The order of distributions on positions: prefix masses, stochastically monotone kernels, rollouts layer by layer.

A law is more recent than another if each of its prefix masses F_k = sum_{j<=k} is smaller. A kernel is monotone
(Assumption 4.1 of arXiv 2602.16837) if its rows become more recent from one query to the next.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64

ROUNDING = 1e-12
"""Prefix masses are sums of at most a few hundred float64 products of numbers below 1."""


def prefix_mass(law: Float64[np.ndarray, "*batch n"]) -> Float64[np.ndarray, "*batch n"]:
    """F_k, the mass on positions 0 ... k."""
    mass: Float64[np.ndarray, "*batch n"] = np.cumsum(law, axis=-1)
    return mass


def dominance_gap(recent: Float64[np.ndarray, "*batch n"], early: Float64[np.ndarray, "*batch n"]) -> float:
    """By how much some prefix mass of `recent` exceeds that of `early` (0 if it is more recent throughout)."""
    return max(0.0, float(np.max(prefix_mass(recent) - prefix_mass(early))))


def monotonicity_gap(kernel: Float64[np.ndarray, "query key"]) -> float:
    """By how much Assumption 4.1 is violated: largest F_k(row i+1) - F_k(row i), 0 for a monotone kernel."""
    return dominance_gap(kernel[1:], kernel[:-1])


def violated_share(kernel: Float64[np.ndarray, "query key"]) -> float:
    """Share of triples (i, i+1, k), k <= i, on which Assumption 4.1 fails."""
    mass = prefix_mass(kernel)
    admissible = np.tril(np.ones(mass.shape, dtype=bool))[:-1]
    return float(np.mean((mass[1:] - mass[:-1] > ROUNDING)[admissible]))


def transition(kernel: Float64[np.ndarray, "n n"], mixing: float) -> Float64[np.ndarray, "n n"]:
    """T = (1 - m) I + m A."""
    return (1 - mixing) * np.eye(len(kernel)) + mixing * kernel


def rollouts(transitions: Sequence[Float64[np.ndarray, "n n"]]) -> Float64[np.ndarray, "depth n n"]:
    """R^(t) = T_t ... T_1 for t = 0 (the identity) up to all layers; the first transition is nearest the input."""
    stack = [np.eye(len(transitions[0]))]
    for step in transitions:
        stack.append(step @ stack[-1])
    return np.stack(stack)


def last_row(transitions: Sequence[Float64[np.ndarray, "n n"]]) -> Float64[np.ndarray, "n"]:
    """The profile: the last row of the whole product."""
    profile: np.ndarray = np.eye(len(transitions[0]))[-1]
    for step in reversed(transitions):
        profile = profile @ step
    return profile


def random_monotone_kernel(
    n_positions: int, generator: np.random.Generator, *, width: int | None = None
) -> Float64[np.ndarray, "n n"]:
    """A random causal kernel that satisfies Assumption 4.1 exactly, with window `width` if given.

    F_i(k) = exp(-sum of w_ab over k < b <= a <= i) with random w >= 0: falls in i, grows in k, is 1 for k >= i.
    """
    weights = np.tril(generator.exponential(size=(n_positions, n_positions)) ** 2) / n_positions
    rows, keys = np.indices((n_positions, n_positions))
    from_key = np.cumsum(np.cumsum(weights, axis=0)[:, ::-1], axis=1)[:, ::-1]
    beyond = np.pad(from_key[:, 1:], ((0, 0), (0, 1)))
    mass = np.where(keys >= rows, 1.0, np.exp(-beyond))
    if width is not None:
        mass = np.where(keys <= rows - width, 0.0, mass)
    return np.diff(mass, axis=1, prepend=0.0)


def random_content_kernel(
    visible: Bool[np.ndarray, "n n"], generator: np.random.Generator, *, spread: float
) -> Float64[np.ndarray, "n n"]:
    """Softmax of independent Gaussian logits of standard deviation `spread`: in general not monotone."""
    weights = np.where(visible, np.exp(spread * generator.standard_normal(visible.shape)), 0.0)
    kernel: Float64[np.ndarray, "n n"] = weights / weights.sum(axis=1, keepdims=True)
    return kernel
