"""Jacobians of linear residual networks with random value maps: norms add in squares over sets of layers.

h <- h + (g / sqrt(H)) sum_h A_lh h W_lh, W independent, zero mean, variance 1/d. Then E ||J_j||_F^2 / d = G_jj
with G <- G + (g^2 / H) sum_h A_h' G A_h from the top layer down, G = 1 at the last position (docs/theory, section 4).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal
from posbias.papers.claims import CLAIMS, Claim, Figure, Finding, curve
from posbias.papers.order import random_content_kernel

N_POSITIONS = 32
DEPTH = 6
HEADS = 2
WIDTH = 24
GAIN = 0.6
"""Size g of a layer's update relative to the residual stream."""
DRAWS = 64
"""Weight draws over which the root mean square is taken."""
TOLERANCE = 0.05
"""Median relative error allowed: ten times the noise of 64 draws at width 24 (below 0.5 %)."""

ValueMaps = Literal["independent", "shared", "identity"]
Layers = Sequence[Sequence[Float64[np.ndarray, "n n"]]]


def measured_norms(
    layers: Layers, generator: np.random.Generator, *, maps: ValueMaps = "independent", gain: float = GAIN
) -> Float64[np.ndarray, "n"]:
    """Root mean square over weight draws of ||dh_last/dx_j||_F / sqrt(d), by exact back-propagation.

    Args:
        layers: Attention kernels by layer and head, layer 0 nearest the input.
        generator: Source of the weights.
        maps: `independent` Gaussian maps, one Gaussian map `shared` by all layers and heads, or the `identity`.
        gain: Size of a layer's update.
    """
    n_positions = len(layers[0][0])
    total = np.zeros(n_positions)
    draws = 1 if maps == "identity" else DRAWS
    for _ in range(draws):
        shared = np.eye(WIDTH) if maps == "identity" else _value_map(generator)
        backward = np.zeros((n_positions, WIDTH, WIDTH))
        backward[-1] = np.eye(WIDTH)
        for heads in reversed(layers):
            update = np.zeros_like(backward)
            for kernel in heads:
                value_map = _value_map(generator) if maps == "independent" else shared
                update += np.tensordot(kernel.T, backward, axes=1) @ value_map.T
            backward = backward + gain / np.sqrt(len(heads)) * update
        total += np.sum(backward**2, axis=(1, 2)) / WIDTH
    norms: np.ndarray = np.sqrt(total / draws)
    return norms


def _value_map(generator: np.random.Generator) -> Float64[np.ndarray, "d d"]:
    """Entries of variance 1/d."""
    entries: Float64[np.ndarray, "d d"] = generator.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return entries


def squared_norms(layers: Layers, *, gain: float = GAIN) -> Float64[np.ndarray, "n"]:
    """sqrt(G_jj): norms that add in squares over sets of layers and heads."""
    backward = np.zeros(layers[0][0].shape)
    backward[-1, -1] = 1.0
    for heads in reversed(layers):
        backward = backward + gain**2 / len(heads) * sum(kernel.T @ backward @ kernel for kernel in heads)
    return np.sqrt(np.diagonal(backward))


def linear_norms(layers: Layers, *, gain: float = GAIN) -> Float64[np.ndarray, "n"]:
    """Norms that add linearly: the last row of prod_l (I + g sum_h A_lh / sqrt(H)), the rollout up to its scale."""
    row = np.zeros(len(layers[0][0]))
    row[-1] = 1.0
    for heads in reversed(layers):
        row = row + gain / np.sqrt(len(heads)) * sum(row @ kernel for kernel in heads)
    return row


def profile_distance(left: Float64[np.ndarray, "n"], right: Float64[np.ndarray, "n"]) -> float:
    """Wasserstein distance of two profiles, each normalised, on positions / (N - 1)."""
    gaps = np.cumsum(left / left.sum() - right / right.sum())
    return float(np.abs(gaps[:-1]).sum() / (len(gaps) - 1))


def median_error(predicted: Float64[np.ndarray, "n"], measured: Float64[np.ndarray, "n"]) -> float:
    """Median relative error over positions, scale included."""
    return float(np.median(np.abs(predicted / measured - 1)))


@CLAIMS.register("linear-networks/sum-of-squares")
class SumOfSquares(Claim):
    """Norms of independent paths add in squares."""

    paper = "docs/theory, section 4 (posbias)"
    source = "docs/theory, sections 2 (item 6) and 4, value path"
    statement = "Linear residual networks, independent weights: E ||J_j||^2 is a sum of squares over sets of layers."
    assumptions = ("independent zero-mean value maps", "linear layers: no MLP, no norm, attention held fixed")
    broken_by = "one value map shared by all layers and heads: paths are correlated"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Simulated root mean square against the recursion, on random-content attention with two heads."""
        causal = Causal().visible(N_POSITIONS)
        layers = [[random_content_kernel(causal, generator, spread=1.0) for _ in range(HEADS)] for _ in range(DEPTH)]
        measured = measured_norms(layers, generator, maps="shared" if broken else "independent")
        squared, linear = squared_norms(layers), linear_norms(layers)
        error = median_error(squared, measured)
        positions = np.arange(N_POSITIONS)
        return Finding(
            computed=f"median relative error of sqrt(G_jj) over positions, {DRAWS} draws",
            value=error,
            as_stated=error <= TOLERANCE,
            figure=Figure(
                "position",
                "root mean square of the Jacobian norm / sqrt(d)",
                [
                    curve("simulated", positions, measured),
                    curve("sum of squares", positions, squared),
                    curve("linear sum", positions, linear),
                ],
                log_y=True,
            ),
            sharper=(
                f"linear addition is off by {median_error(linear, measured):.2f}, W1 "
                f"{profile_distance(linear, measured):.4f}; squares by {error:.3f}, W1 "
                f"{profile_distance(squared, measured):.4f}"
            ),
            numbers={
                "error_squares": error,
                "error_linear": median_error(linear, measured),
                "w1_squares": profile_distance(squared, measured),
                "w1_linear": profile_distance(linear, measured),
            },
            instances=DRAWS,
        )
