"""Objects that claims are examined on: ordered laws, masks as graphs, random attention kernels and networks.

A law is more recent than another if each of its prefix masses F_k = sum_{j<=k} is smaller. A kernel is monotone
(Assumption 4.1 of arXiv 2602.16837) if its rows become more recent from one query to the next. A centre node of a mask
(Wu et al. 2025, definition 3.1) is a key that every query reaches in some number of layers: seen from the walk that
starts at a query and steps to keys, the centre nodes are the one closed class, if there is only one.

Random networks satisfy the papers' assumptions, or violate them on purpose. States follow
X <- (1 - m_l) X + m_l A_l X W_V (m_l = 1 is the attention-only network of Wu et al. 2025, equation 1); A_l is the
masked softmax of X W_Q (X W_K)' + bias. Every instance knows the constants its assumptions promise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posbias.errors import UsageError
from posbias.theory.kernels import masked_softmax

ROUNDING = 1e-12
"""Prefix masses are sums of at most a few hundred float64 products of numbers below 1."""


def dominance_gap(recent: Float64[np.ndarray, "*batch n"], early: Float64[np.ndarray, "*batch n"]) -> float:
    """Largest excess of a prefix mass of `recent` over that of `early` (0 if `recent` is more recent throughout)."""
    return max(0.0, float(np.max(np.cumsum(recent, axis=-1) - np.cumsum(early, axis=-1))))


def monotonicity_gap(kernel: Float64[np.ndarray, "query key"]) -> float:
    """Violation of Assumption 4.1: the largest F_k(row i+1) - F_k(row i), 0 for a monotone kernel."""
    return dominance_gap(kernel[1:], kernel[:-1])


def violated_share(kernel: Float64[np.ndarray, "query key"]) -> float:
    """Share of triples (i, i+1, k), k <= i, on which Assumption 4.1 fails."""
    mass = np.cumsum(kernel, axis=-1)
    admissible = np.tril(np.ones(mass.shape, dtype=bool))[:-1]
    return float(np.mean((mass[1:] - mass[:-1] > ROUNDING)[admissible]))


def transition(kernel: Float64[np.ndarray, "n n"], mixing: float) -> Float64[np.ndarray, "n n"]:
    """T = (1 - m) I + m A."""
    return (1 - mixing) * np.eye(len(kernel)) + mixing * kernel


def transitions(
    kernels: Sequence[Float64[np.ndarray, "n n"]], mixing: Sequence[float] | Float64[np.ndarray, "layers"]
) -> list[Float64[np.ndarray, "n n"]]:
    """T_l of every layer."""
    return [transition(kernel, float(share)) for kernel, share in zip(kernels, mixing, strict=True)]


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


def worst_ratio(masses: Float64[np.ndarray, "*places"], log_bounds: Float64[np.ndarray, "*bounds"]) -> float:
    """Largest of some masses over their bounds, at most 1 where all bounds hold; 0 of none."""
    with np.errstate(divide="ignore"):
        return float(np.exp((np.log(masses) - log_bounds).max(initial=-np.inf)))


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


def even_kernel(visible: Bool[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """Equal attention over the keys that each query sees."""
    return masked_softmax(visible, np.zeros(visible.shape))


def decay_logits(n_positions: int, strength: float) -> Float64[np.ndarray, "query key"]:
    """D_ij = -m (i - j)."""
    positions = np.arange(n_positions, dtype=np.float64)
    logits: Float64[np.ndarray, "query key"] = strength * (positions[None, :] - positions[:, None])
    return logits


def random_content_kernel(
    visible: Bool[np.ndarray, "n n"], generator: np.random.Generator, *, spread: float
) -> Float64[np.ndarray, "n n"]:
    """Softmax of independent Gaussian logits of standard deviation `spread`: in general not monotone."""
    return masked_softmax(visible, spread * generator.standard_normal(visible.shape))


def centre_nodes(visible: Bool[np.ndarray, "query key"]) -> Int64[np.ndarray, "n_centres"]:
    """Positions that every query attends to, directly or indirectly.

    Args:
        visible: visible[i, j] is true where query i may attend to key j.

    Returns:
        Ascending positions; empty if the mask has no centre (several groups that never look at each other).

    Raises:
        UsageError: the mask is not square, or some query sees no key.
    """
    return np.flatnonzero(reachable(visible).all(axis=0)).astype(np.int64)


def closed_positions(visible: Bool[np.ndarray, "query key"]) -> Int64[np.ndarray, "n_closed"]:
    """Positions whose every reachable key reaches back: where all mass ends, centre or not."""
    closure = reachable(visible)
    returns = (~closure | closure.T).all(axis=1) & closure.diagonal()
    return np.flatnonzero(returns).astype(np.int64)


def reachable(visible: Bool[np.ndarray, "query key"]) -> Bool[np.ndarray, "query key"]:
    """Pairs of which query i reaches key j in one or more layers (the transitive closure, by repeated squaring).

    Raises:
        UsageError: the mask is not square, or some query sees no key.
    """
    if visible.shape[0] != visible.shape[1] or visible.size == 0:
        raise UsageError(f"a mask needs one row and one column per position, got shape {list(visible.shape)}")
    if not visible.any(axis=1).all():
        raise UsageError(f"a mask needs a key for every query; query {int(np.argmin(visible.any(axis=1)))} sees none")
    closure = visible
    while True:
        weights = closure.astype(np.float64)
        wider = closure | (weights @ weights > 0)
        if np.array_equal(wider, closure):
            return np.asarray(closure)
        closure = wider


Violation = Literal["none", "weights", "values"]


@dataclass(frozen=True, eq=False)
class Network:
    """A random network and the constants its assumptions promise."""

    visible: Bool[np.ndarray, "query key"]
    mixing: Float64[np.ndarray, "layers"]
    """m_l in [0, 1]; all ones for attention only."""
    width: int = 8
    weight_bound: float = 1.0
    """Spectral norm of every W_Q and W_K (assumption A1 / 5.1)."""
    bias: Float64[np.ndarray, "query key"] | float = 0.0
    """Positional logits."""
    violation: Violation = "none"
    """weights: W_Q, W_K grow with depth. values: value maps of norm 1.5 in every layer."""


@dataclass(frozen=True, eq=False)
class Run:
    """The attention of a network on one random input."""

    kernels: Float64[np.ndarray, "layers query key"]
    mixing: Float64[np.ndarray, "layers"]
    content_bound: float
    """Largest |content logit| that the promised constants allow: C^2 R^2."""
    state_bound: float
    """Largest row norm of the states that the promised constants allow: R."""
    largest_state: float
    """Largest row norm that occurred."""
    smallest_entry: float
    """Smallest admissible attention weight over all layers: the instance's epsilon."""

    @property
    def rolled(self) -> Float64[np.ndarray, "layers query key"]:
        """R^(t) of T_l = (1 - m_l) I + m_l A_l, t = 1 ... L."""
        return rollouts(transitions(list(self.kernels), self.mixing))[1:]


def random_runs(
    network: Network, generator: np.random.Generator, *, sizes: Sequence[tuple[int, float]], draws: int
) -> list[Run]:
    """Some draws for each width d and norm of W_Q, W_K, otherwise as in `network`."""
    networks = [replace(network, width=width, weight_bound=bound) for width, bound in sizes]
    return [run_network(each, generator) for each in networks for _ in range(draws)]


def run_network(network: Network, generator: np.random.Generator) -> Run:
    """Draw an input and weights, run the network, and keep every layer's attention.

    Returns:
        Row-stochastic kernels, zero where masked.
    """
    n_positions = len(network.visible)
    runaway = network.violation == "weights"
    # Gaussian inputs with rows of norm about 1.
    width = n_positions if runaway else network.width
    states = generator.standard_normal((n_positions, width)) / np.sqrt(width)
    if runaway:
        states = np.linalg.qr(states)[0]
    # Of the value maps' norms over 1: their products stay bounded.
    excess = 0.1 / np.arange(1, len(network.mixing) + 1) ** 2
    state_bound = float(np.linalg.norm(states, axis=1).max() * np.exp(np.sum(network.mixing * excess)))
    kernels = np.empty((len(network.mixing), n_positions, n_positions))
    largest = 0.0
    for layer, mixing in enumerate(network.mixing):
        largest = max(largest, float(np.linalg.norm(states, axis=1).max()))
        if runaway:
            logits, values = 20.0 * (layer + 1) * (states @ states.T), states  # e^-20 leaks out of the diagonal
        else:
            query, key = (
                network.weight_bound * weights / np.linalg.norm(weights, 2)
                for weights in generator.standard_normal((2, width, width))
            )
            logits = (states @ query) @ (states @ key).T
            if network.violation == "values":
                values = 1.5 * states
            else:  # a random rotation times a norm whose excess over 1 is summable
                values = states @ np.linalg.qr(generator.standard_normal((width, width)))[0] * (1 + excess[layer])
        kernels[layer] = masked_softmax(network.visible, logits + network.bias)
        states = (1 - mixing) * states + mixing * kernels[layer] @ values
    return Run(
        kernels=kernels,
        mixing=network.mixing,
        content_bound=network.weight_bound**2 * state_bound**2,
        state_bound=state_bound,
        largest_state=max(largest, float(np.linalg.norm(states, axis=1).max())),
        smallest_entry=float(kernels[:, network.visible].min()),
    )
