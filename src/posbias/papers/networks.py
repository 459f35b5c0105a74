"""Random attention networks that satisfy the papers' assumptions, and ones that violate them on purpose.

States follow X <- (1 - m_l) X + m_l A_l X W_V (m_l = 1 is the attention-only network of Wu et al. 2025, equation 1);
A_l is the masked softmax of X W_Q (X W_K)' + bias. Every instance knows the constants its assumptions promise.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64

from posbias.theory.kernels import masked_softmax

Violation = Literal["none", "weights", "values"]

RUNAWAY_LOGIT = 20.0
"""Growth per layer of the diagonal logit in a network with unbounded weights: e^-20 leaks out of the diagonal."""
VALUE_EXCESS = 0.1
"""Excess of the first value map's norm over 1; it falls as 1/layer^2, so the products stay bounded."""
VALUE_RUNAWAY = 1.5
"""Norm of every value map in a network whose value maps are not bounded in product."""


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
    content_bound: float
    """Largest |content logit| that the promised constants allow: C^2 R^2."""
    state_bound: float
    """Largest row norm of the states that the promised constants allow: R."""
    largest_state: float
    """Largest row norm that occurred."""
    smallest_entry: float
    """Smallest admissible attention weight over all layers: the instance's epsilon."""


def run_network(network: Network, generator: np.random.Generator) -> Run:
    """Draw an input and weights, run the network, and keep every layer's attention.

    Returns:
        Row-stochastic kernels, zero where masked.
    """
    n_positions = len(network.visible)
    runaway = network.violation == "weights"
    states = _first_states(n_positions, n_positions if runaway else network.width, generator)
    if runaway:
        states = np.linalg.qr(states)[0]
    width = states.shape[1]
    excess = VALUE_EXCESS / np.arange(1, len(network.mixing) + 1) ** 2
    state_bound = float(np.linalg.norm(states, axis=1).max() * np.exp(np.sum(network.mixing * excess)))
    kernels = np.empty((len(network.mixing), n_positions, n_positions))
    largest = 0.0
    for layer, mixing in enumerate(network.mixing):
        largest = max(largest, float(np.linalg.norm(states, axis=1).max()))
        kernels[layer] = masked_softmax(network.visible, _content(states, network, layer, generator) + network.bias)
        values = states @ _value_map(network, layer, width, generator)
        states = (1 - mixing) * states + mixing * kernels[layer] @ values
    return Run(
        kernels=kernels,
        content_bound=network.weight_bound**2 * state_bound**2,
        state_bound=state_bound,
        largest_state=max(largest, float(np.linalg.norm(states, axis=1).max())),
        smallest_entry=float(kernels[:, network.visible].min()),
    )


def attention_only(depth: int) -> Float64[np.ndarray, "layers"]:
    """The mixing of a network without residual connections."""
    return np.ones(depth)


def _first_states(n_positions: int, width: int, generator: np.random.Generator) -> Float64[np.ndarray, "n d"]:
    """Gaussian inputs with rows of norm about 1."""
    states: Float64[np.ndarray, "n d"] = generator.standard_normal((n_positions, width)) / np.sqrt(width)
    return states


def _content(
    states: Float64[np.ndarray, "n d"], network: Network, layer: int, generator: np.random.Generator
) -> Float64[np.ndarray, "n n"]:
    """Content logits of one layer: fresh random W_Q, W_K of the promised norm, or a diagonal that runs away."""
    if network.violation == "weights":
        runaway: Float64[np.ndarray, "n n"] = RUNAWAY_LOGIT * (layer + 1) * (states @ states.T)
        return runaway
    width = states.shape[1]
    query, key = (
        network.weight_bound * weights / np.linalg.norm(weights, 2)
        for weights in generator.standard_normal((2, width, width))
    )
    logits: Float64[np.ndarray, "n n"] = (states @ query) @ (states @ key).T
    return logits


def _value_map(network: Network, layer: int, width: int, generator: np.random.Generator) -> Float64[np.ndarray, "d d"]:
    """A random rotation times a norm whose excess over 1 is summable; 1.5 identities where that is violated."""
    if network.violation == "values":
        return VALUE_RUNAWAY * np.eye(width)
    if network.violation == "weights":
        return np.eye(width)
    rotation: Float64[np.ndarray, "d d"] = np.linalg.qr(generator.standard_normal((width, width)))[0]
    return rotation * (1 + VALUE_EXCESS / (layer + 1) ** 2)
