"""Attention rollout: rows of R = T_{L-1} ... T_0 with T_l = (1 - m_l) I + m_l A_l, by pulls only, and their gradients.

A row of R says how much each input position influences one output position (docs/theory, section 1). With attention
sinks rows sum to less than 1: the rest flowed in from the sinks, which are no input positions.

Gradients go by the adjoint: for a functional <cotangent, profile> with rows x_l pulled from the top and columns v_l
pushed from the bottom, d/dalpha = m_l x (dA_l/dalpha) v. A logit rises by f_j dalpha at key j, f_j = digamma(j + alpha)
for gamma keys, whatever the query subtracts, so dA v = A (f v) - (A f) (A v): the covariance of f and v under each
query's attention, one walk for all causal heads.
"""

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64

from posbias.architecture import Architecture, HeadGroup, KeyEncoding
from posbias.checks import checked_value
from posbias.theory.kernels import AbsoluteKernel, DistanceKernel, Kernel, KeyKernel
from posbias.theory.kernels.loops import sweep_covariance


def _kernel(group: HeadGroup, n_positions: int) -> Kernel:
    """The fastest kernel of heads that share mask and encoding, each weighted by 1 / (heads of the layer).

    Logits that rise by hundreds of nats with the distance are taken row by row, in O(N^2), as absolute ones are.
    """
    if isinstance(group.encoding, KeyEncoding) or group.linear_slopes() is not None:
        return KeyKernel(group, n_positions)
    kernel = DistanceKernel(group, n_positions) if group.encoding.relative else None
    return AbsoluteKernel(group, n_positions) if kernel is None or kernel.rises_too_far else kernel


def _layer_kernels(architecture: Architecture, n_positions: int) -> tuple[tuple[Kernel, ...], ...]:
    """The mean attention of every layer, layer 0 nearest the input, as a sum over heads that share mask and encoding.

    Equal layers share their kernels.
    """
    by_content: dict[Any, tuple[Kernel, ...]] = {}
    layers = []
    for groups in architecture.head_groups:
        key = tuple(
            (group.mask, group.encoding, group.heads.tobytes(), group.content.tobytes(), group.sinks.tobytes())
            for group in groups
        )
        if key not in by_content:
            by_content[key] = tuple(_kernel(group, n_positions) for group in groups)
        layers.append(by_content[key])
    return tuple(layers)


MOST_STEPS = 10**10
"""Layers times heads times positions that a theory takes, at 10^8 to 10^9 a second."""


class Rollout:
    """The product of all layers of an architecture at one context length, as an operator."""

    def __init__(self, architecture: Architecture, n_positions: int) -> None:
        n_positions = checked_value("n_positions", n_positions, Annotated[int, Ge(1)])
        self.architecture = architecture
        self.n_positions: int = n_positions
        self.kernels = _layer_kernels(architecture, self.n_positions)
        self.mixing = architecture.layer_mixing

    def pull_layer(self, layer: int, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ T_l."""
        mixing = self.mixing[layer]
        if mixing == 0:
            return row
        pulled = np.asarray(sum(kernel.pull(row) for kernel in self.kernels[layer]))
        if mixing < 1:
            pulled *= mixing
            pulled += (1 - mixing) * row
        return pulled

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ T_{L-1} ... T_0."""
        for layer in reversed(range(self.architecture.depth)):
            row = self.pull_layer(layer, row)
        return row

    def unit(self, position: int) -> Float64[np.ndarray, "n_positions"]:
        """1 at a position (0-based; negative counts from the end), 0 elsewhere."""
        vector = np.zeros(self.n_positions)
        vector[position] = 1.0
        return vector


def rollout_profile(architecture: Architecture, *, n_positions: int) -> Float64[np.ndarray, "n_positions"]:
    """Influence of every input position on the last one, by attention rollout.

    rho = e_last T_{L-1} ... T_0, pulled from the top layer down; no N x N matrix is formed.

    Args:
        architecture: Depth, heads, mask, encoding, mixing, content and sinks of the model.
        n_positions: Context length N in positions, >= 1.

    Returns:
        Non-negative; sums to 1 without sinks, with sinks to 1 minus their share. Relative error below 1e-12 per layer
        for every entry above 1e-290.

    Raises:
        UsageError: `n_positions` is not a whole number >= 1.

    Source: arXiv 2602.16837, section 3. Where they build A_l and multiply, we pull; the numbers are the same.
    """
    rollout = Rollout(architecture, n_positions)
    return rollout.pull(rollout.unit(-1))


def exponent_gradient(
    rollout: Rollout, cotangent: Float64[np.ndarray, "n_positions"]
) -> Float64[np.ndarray, "depth heads"]:
    """Gradient of <cotangent, profile> by the exponent of every head of causal layers of gamma keys.

    Args:
        rollout: All its layers have gamma keys without slope and a causal mask, no content and no sinks.
        cotangent: Weight of each position in the functional, finite, of any sign.

    Returns:
        The derivatives, exact up to rounding.
    """
    depth, heads = rollout.architecture.depth, rollout.architecture.heads
    gradient = np.empty((depth, heads))
    rows = [rollout.unit(-1)]
    for layer in reversed(range(depth)):
        rows.append(rollout.pull_layer(layer, rows[-1]))
    column = cotangent
    for layer, ((kernel,), mixing) in enumerate(zip(rollout.kernels, rollout.mixing, strict=True)):
        assert isinstance(kernel, KeyKernel)
        assert kernel.exponents is not None
        pushed, derivatives = np.empty_like(column), np.empty_like(kernel.weights)
        sweep_covariance(column, rows[-2 - layer], kernel.exponents, kernel.weights, pushed, derivatives)
        for members, derivative in zip(kernel.layer_heads, derivatives, strict=True):
            gradient[layer, members] = mixing / heads * derivative
        column = (1 - mixing) * column + mixing * pushed
    return gradient
