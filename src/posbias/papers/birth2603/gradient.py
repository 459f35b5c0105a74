"""'Lost in the Middle at Birth' (arXiv 2603.10123) on gradients: what they are, and how paths add up in their norms.

Linear networks with random value maps, back-propagated exactly. docs/theory, section 2 (items 5 and 6) and section 4.
"""

import numpy as np
from jaxtyping import Float64
from scipy.linalg import expm

from posbias.architecture import Causal
from posbias.papers.birth2603.claims import EXACT, PAPER, RESIDUAL, UNIFORM
from posbias.papers.birth2603.linear_networks import (
    DRAWS,
    TOLERANCE,
    linear_norms,
    measured_norms,
    median_error,
    profile_distance,
    squared_norms,
)
from posbias.papers.claims import CLAIMS, Claim, Figure, Finding, curve
from posbias.theory.kernels import masked_softmax

PUBLISHED_DISTANCE = 0.02
"""The paper's W1 between its closed form and a measured Jacobian."""
TRIAL_GAINS = np.geomspace(0.01, 2, 60)
"""g = m / (1 - m) tried when the mixing is fitted to the measurement."""
GRADIENT_POSITIONS = 16
GRADIENT_WIDTH = 6
GRADIENT_DEPTH = 4


@CLAIMS.register("birth-2603.10123/claim-5-gradient")
class GradientIsAMatrix(Claim):
    """What the gradient is without residual connections."""

    paper = PAPER
    source = "main theorem, and the critics' remark on it; theory section 2, item 5"
    statement = "Without residuals the gradient from the last token to token j is the entry (last, j) of M^H."
    assumptions = (UNIFORM, "no residual connections, norms or MLPs")
    broken_by = "a residual connection is added, and with it other powers of M"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Jacobian of a random linear network by pushing a basis through, against row times product of value maps."""
        cesaro = masked_softmax(Causal().visible(GRADIENT_POSITIONS), np.zeros((GRADIENT_POSITIONS,) * 2))
        weights = generator.standard_normal((GRADIENT_DEPTH, GRADIENT_WIDTH, GRADIENT_WIDTH)) / np.sqrt(GRADIENT_WIDTH)
        jacobian = _jacobian(cesaro, weights, residual=broken)
        row = np.linalg.matrix_power(cesaro, GRADIENT_DEPTH)[-1]
        product = np.linalg.multi_dot(list(weights))
        norms = np.linalg.norm(jacobian, axis=(1, 2))
        factor = float(np.linalg.norm(product))
        error = float(np.abs(jacobian - row[:, None, None] * product).max() / np.abs(jacobian).max())
        as_row = float(np.abs(norms / row - 1).max())
        exponential = float(expm(GRADIENT_DEPTH * (cesaro - np.eye(GRADIENT_POSITIONS)))[-1, 0])
        positions = np.arange(GRADIENT_POSITIONS)
        return Finding(
            computed="largest relative error of ||J_j|| = (M^H)_(last,j)",
            value=as_row,
            as_stated=as_row <= EXACT,
            corrected=error <= EXACT,
            figure=Figure(
                "position",
                "gradient norm",
                [
                    curve("||J_j||_F", positions, norms),
                    curve("(M^H)_(last,j)", positions, row),
                    curve("(M^H)_(last,j) ||W_1...W_H||_F", positions, row * factor),
                ],
                log_y=True,
            ),
            sharper=(
                f"J_j is a d x d matrix, (M^H)_(last,j) W_1...W_H (error {error:.0e}): its norms follow the row up to "
                f"the factor ||W_1...W_H|| = {factor:.2f}; M^H is a power, no exponential (first token "
                f"{row[0]:.3f}, for exp(H(M-1)) {exponential:.3f})"
            ),
            numbers={
                "product_form_error": error,
                "norm_factor": factor,
                "power_first": float(row[0]),
                "exponential_first": exponential,
            },
        )


def _jacobian(
    kernel: Float64[np.ndarray, "n n"], weights: Float64[np.ndarray, "layers d d"], *, residual: bool
) -> Float64[np.ndarray, "n d d"]:
    """dh_last/dx_j of h <- (h +) A h W, every basis vector pushed through the network; axes [j, input, output]."""
    n_positions, width = len(kernel), weights.shape[1]
    states = np.eye(n_positions * width).reshape(n_positions, width, n_positions, width)
    for value_map in weights:
        update = np.einsum("ik,ajkb,bc->ajic", kernel, states, value_map)
        states = states + update if residual else update
    last: Float64[np.ndarray, "n d d"] = states[:, :, -1, :]
    return last


@CLAIMS.register("birth-2603.10123/claim-6-linear-addition")
class LinearAddition(Claim):
    """How paths of different depths add up in a gradient's norm."""

    paper = PAPER
    source = "residual closed form and its validation (W1 0.02); theory section 2, item 6"
    statement = "At initialisation the gradient norm follows the last row of prod ((1-m) I + m C): paths add linearly."
    assumptions = (UNIFORM, RESIDUAL, "independent zero-mean value maps, as initialisers draw them")
    broken_by = "value maps that are not random: identities, for which paths do add linearly"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Simulated Jacobian norms of a linear residual network against linear and squared addition."""
        kernel = masked_softmax(Causal().visible(64), np.zeros((64, 64)))
        layers = [[kernel]] * 8
        gain = 0.5
        measured = measured_norms(layers, generator, maps="identity" if broken else "independent", gain=gain)
        linear, squared = linear_norms(layers, gain=gain), squared_norms(layers, gain=gain)
        fits = [profile_distance(linear_norms(layers, gain=trial), measured) for trial in TRIAL_GAINS]
        distance = profile_distance(linear, measured)
        error = median_error(squared, measured)
        positions = np.arange(len(measured))
        return Finding(
            computed="W1 of linear addition (m = g/(1+g)) to the measured profile (published agreement: 0.02)",
            value=distance,
            as_stated=distance <= PUBLISHED_DISTANCE,
            corrected=error <= TOLERANCE,
            figure=Figure(
                "position",
                "root mean square of the Jacobian norm / sqrt(d)",
                [
                    curve("simulated", positions, measured),
                    curve("linear addition", positions, linear),
                    curve("addition in squares", positions, squared),
                ],
                log_y=True,
            ),
            sharper=(
                f"norms add in squares, sum_k C(L,k) g^2k (C^k)_(last,j)^2: median error {error:.3f}, W1 "
                f"{profile_distance(squared, measured):.4f}; linear addition {median_error(linear, measured):.2f}, "
                f"W1 {distance:.4f}, and {min(fits):.4f} if one mixing is fitted to the result (8 layers, g = {gain})"
            ),
            numbers={
                "error_linear": median_error(linear, measured),
                "error_squares": error,
                "w1_linear": distance,
                "w1_linear_fitted_mixing": min(fits),
                "w1_squares": profile_distance(squared, measured),
            },
            instances=1 if broken else DRAWS,
        )
