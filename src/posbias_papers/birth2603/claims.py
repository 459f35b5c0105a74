"""'Lost in the Middle at Birth' (arXiv 2603.10123): four statements on profiles, two on gradients at initialisation.

Uniform causal attention, C_ij = 1/(i+1), mixed into a residual stream. Published: the continuous limit's density plus
an atom. Exact at every length: homogeneous symmetric polynomials of the reciprocals.

Jacobians of linear residual networks with random value maps, back-propagated exactly: norms add in squares over sets of
layers. h <- h + g A_l h W_l, W independent, zero mean, variance 1/d. Then E ||J_j||_F^2 / d = G_jj with
G <- G + g^2 A' G A from the top layer down, G = 1 at the last position (docs/theory, section 2, items 5 and 6, and
section 4).
"""

from collections.abc import Sequence
from math import factorial

import numpy as np
from jaxtyping import Float64
from scipy import special
from scipy.linalg import expm

from posbias.architecture import Alibi, Architecture, Causal
from posbias.comparison.metrics import wasserstein
from posbias.errors import UsageError
from posbias.theory import rollout_profile
from posbias.theory.closed_form import attention_steps, closed_form
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import even_kernel

UNIFORM = "uniform causal attention, as at initialisation without ALiBi"
RESIDUAL = "residual connections: mixing m < 1"

N_POSITIONS = 2048
DEPTH = 24
MIXINGS = (0.2, 0.1, 0.05)
CLOSE = 0.1
"""Relative error up to which a printed mass counts as right."""
EXACT = 1e-10
"""Relative error allowed between the finite-N form and the product of matrices."""
ALIBI_SLOPE = 0.02
"""A gentle recency-favouring encoding, for contrast (logits per position)."""


def continuous_density(
    relative_positions: Float64[np.ndarray, "chosen"], mixing: Sequence[float] | np.ndarray
) -> Float64[np.ndarray, "chosen"]:
    """Density of the continuous limit at x in (0, 1], without the atom P(K = 0) = prod_l (1 - m_l) at x = 1.

    sum_{k >= 1} P(K = k) u^(k-1) / (k-1)!,  u = ln(1/x).

    Source: arXiv 2603.10123; equal to (1-m)^L a L^(1)_(L-1)(-a u), a = m / (1 - m), for constant mixing m < 1.
    """
    steps = attention_steps(mixing)
    if relative_positions.size and not (relative_positions.min() > 0 and relative_positions.max() <= 1):
        raise UsageError("the continuous density is defined for relative positions in (0, 1]")
    depth_scale = -np.log(relative_positions)
    orders = np.arange(len(steps) - 1)
    terms = special.xlogy(orders[:, None], depth_scale[None, :]) - special.gammaln(orders + 1)[:, None]
    return np.asarray(steps[1:] @ np.exp(terms))


def uniform_profile(
    n_positions: int, mixing: Sequence[float] | Float64[np.ndarray, "layers"], *, slope: float = 0.0
) -> Float64[np.ndarray, "n_positions"]:
    """Rollout of uniform (or ALiBi) causal attention, one O(N) pull per layer."""
    architecture = Architecture(len(mixing), mixing=mixing, encoding=Alibi((slope,)) if slope else "none")
    return rollout_profile(architecture, n_positions=n_positions)


@CLAIMS.register("birth-2603.10123/claim-1-closed-form")
class ClosedForm(Claim):
    """The density at the head of the context."""

    source = "abstract and main theorem; theory section 2, item 1"
    statement = "The closed-form density gives the exact influence of every position, the first token included."
    assumptions = (UNIFORM, "continuous limit")
    broken_by = "attention is not uniform: ALiBi with slope 0.02"
    computed = "density's first-token mass at H = 12, N = {positions:.0f}; the true one is {true_first_12:.3f}"
    sharper = (
        "the limit needs L << ln N: true first-token mass {true_first_12:.3f} (H=12), {true_first_24:.4f} (H=24), "
        "density {density_first_12:.3f}, {density_first_24:.0e}; (1/N) h_(H-1)(1/(j+1) ... 1/N) is exact at every N "
        "(relative error {finite_form_relative_error:.0e}); at H = 2, N = 1e9 the density is off by "
        "{shallow_error:.3f}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """First-token mass of C^H at N = 2048: density at midpoints against the product; finite-N form against it."""
        slope = 0.02 if broken else 0.0
        true, density, errors = {}, {}, []
        for depth in (12, DEPTH):
            profile = uniform_profile(N_POSITIONS, np.ones(depth), slope=slope)
            exact = closed_form(N_POSITIONS, np.arange(N_POSITIONS), np.ones(depth))
            errors.append(float(np.max(np.abs(exact / profile - 1))))
            true[depth], middle = float(profile[0]), np.array([0.5 / N_POSITIONS])
            density[depth] = float(continuous_density(middle, np.ones(depth))[0]) / N_POSITIONS
        # For two layers L << ln N begins to hold.
        many = 10**9
        limit = continuous_density(np.array([0.5 / many]), [1.0, 1.0])[0] / many
        shallow = float(limit / closed_form(many, [0], [1.0, 1.0])[0])
        worst = max(abs(density[depth] / true[depth] - 1) for depth in true)
        finite_exact = max(errors) <= EXACT
        return Finding(
            value=density[12],
            as_stated=worst <= CLOSE and finite_exact,
            corrected=finite_exact and abs(shallow - 1) <= CLOSE,
            numbers={
                "positions": N_POSITIONS,
                "true_first_12": true[12],
                "true_first_24": true[DEPTH],
                "density_first_12": density[12],
                "density_first_24": density[DEPTH],
                "finite_form_relative_error": max(errors),
                "shallow_error": abs(shallow - 1),
            },
        )


@CLAIMS.register("birth-2603.10123/claim-2-dead-zone")
class DeadZone(Claim):
    """How dead the middle is."""

    source = "abstract; theory section 2, item 2"
    statement = "With residual connections the middle is a factorial dead zone of order 1/(H-1)!."
    assumptions = (UNIFORM, RESIDUAL)
    broken_by = "no residual connections (m = 1), where the k = H term stands alone"
    computed = "least N * profile at the middle over mixings; promised {promised:.0e}, flat profile 1"
    sharper = (
        "1/(H-1)! is the k = H term alone; at H = {layers:.0f} the middle has {middles} of an even share, and next to "
        "the end the profile is L m (1-m)^(L-1) / N"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """N times the profile at the middle for three mixings, H = 24, N = 2048."""
        mixings = (1.0,) if broken else MIXINGS
        profiles = {mixing: uniform_profile(N_POSITIONS, np.full(DEPTH, mixing)) for mixing in mixings}
        middles = {mixing: float(N_POSITIONS * profile[N_POSITIONS // 2]) for mixing, profile in profiles.items()}
        one_step = {mixing: DEPTH * mixing * (1 - mixing) ** (DEPTH - 1) for mixing in mixings}  # share of walks
        near_end = {
            mixing: float(N_POSITIONS * profile[-2]) / max(one_step[mixing], 1e-300)
            for mixing, profile in profiles.items()
        }
        promised = 1 / factorial(DEPTH - 1)
        return Finding(
            value=min(middles.values()),
            as_stated=max(middles.values()) <= 10 * promised,
            corrected=max(middles.values()) <= 0.01,  # of the flat profile: dead
            numbers={
                "layers": DEPTH,
                "promised": promised,
                **{f"middle_m_{mixing:g}": middle for mixing, middle in middles.items()},
                **{f"end_over_one_step_m_{mixing:g}": ratio for mixing, ratio in near_end.items()},
            },
            instances=len(mixings),
            words={"middles": ", ".join(f"{middle:.2g} (m = {mixing:g})" for mixing, middle in middles.items())},
        )


@CLAIMS.register("birth-2603.10123/claim-3-recency-anchor")
class RecencyAnchor(Claim):
    """The weight of the last token's atom."""

    source = "abstract; theory section 2, item 3"
    statement = "Residual connections give the last token an isolated anchor of order 1, whatever the depth."
    assumptions = (UNIFORM, RESIDUAL)
    broken_by = "mixing falls slower than 1/L (m = L^-1/2), where the correction no longer holds either"
    computed = "atom at 192 layers over atom at 12 layers, m = 0.1 (order 1 means near 1)"
    sharper = (
        "the atom is (1-m)^L, exponentially small in depth ({atom_24_layers:.4f} at m=.2, L=24); it is of order "
        "1 only for m = O(1/L): from 12 to 192 layers {law} keeps {kept_scaled_mixing:.2g} of it"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """(1 - m)^L over depths at fixed mixing, and at mixing 1/L."""
        depths = np.array([12.0, 24, 48, 96, 192])
        exponent, law = (-0.5, "m = L^-1/2") if broken else (-1.0, "m = 1/L")
        fixed = {mixing: (1 - mixing) ** depths for mixing in MIXINGS}
        scaled = (1 - depths**exponent) ** depths
        shares = {mixing: float(atoms[-1] / atoms[0]) for mixing, atoms in fixed.items()}
        scaled_kept = float(scaled[-1] / scaled[0])
        return Finding(
            value=shares[0.1],
            as_stated=min(shares.values()) >= 0.5,
            corrected=scaled_kept >= 0.5,
            numbers={
                "law": law,
                **{f"kept_m_{mixing:g}": share for mixing, share in shares.items()},
                "kept_scaled_mixing": scaled_kept,
                "atom_24_layers": float(fixed[0.2][1]),
            },
            instances=len(MIXINGS),
        )


@CLAIMS.register("birth-2603.10123/claim-4-u-shape")
class UShape(Claim):
    """A rise of the profile before its last token."""

    source = "title and abstract; theory section 2, item 4"
    statement = "Causal masking and residual connections alone give a U: influence rises again towards the end."
    assumptions = (UNIFORM, RESIDUAL)
    broken_by = "no residual connections (m = 1): not even the last token stands out"
    computed = "interior recency: penultimate position over the interior minimum (1 means no rise)"
    sharper = (
        "a U by its last token alone, an L and one spike: the minimum is the penultimate token (position "
        "{last_minimum_position:.0f} of {positions:.0f}), the last has {least_spike:.0f} to {largest_spike:.0f} times "
        "as much; ALiBi "
        "(slope {alibi_slope:g}) gives a U: interior recency {alibi_interior_recency:.2g}, minimum at "
        "{alibi_minimum_position:.0f} of {alibi_positions:.0f}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Interior recency, the penultimate position over the interior minimum, uniform and with ALiBi."""
        mixings = (1.0,) if broken else MIXINGS
        profiles = {mixing: uniform_profile(N_POSITIONS, np.full(DEPTH, mixing)) for mixing in mixings}
        recencies = [interior_recency(profile) for profile in profiles.values()]
        minima = [int(np.argmin(profile)) for profile in profiles.values()]
        spikes = [float(profile[-1] / profile[-2]) for profile in profiles.values()]
        # Without the encoding's own recency there is no U; the contrast shows what one looks like.
        shorter = 512
        alibi = uniform_profile(shorter, np.full(DEPTH, 0.1), slope=ALIBI_SLOPE)
        return Finding(
            value=max(recencies),
            as_stated=max(recencies) > 1 + EXACT,
            corrected=all(place == N_POSITIONS - 2 for place in minima) and min(spikes) > 1,
            numbers={
                "positions": N_POSITIONS,
                "minimum_position": float(minima[0]),
                "last_minimum_position": float(minima[-1]),
                "least_spike": min(spikes),
                "largest_spike": max(spikes),
                "alibi_positions": shorter,
                "alibi_slope": ALIBI_SLOPE,
                "alibi_interior_recency": interior_recency(alibi),
                "alibi_minimum_position": float(np.argmin(alibi)),
            },
            instances=len(mixings),
        )


def interior_recency(profile: Float64[np.ndarray, "n_positions"]) -> float:
    """The penultimate position over the least of all but the last: 1 where the profile only falls."""
    return float(profile[-2] / profile[:-1].min())


WIDTH = 24
GAIN = 0.6
"""Size g of a layer's update relative to the residual stream."""
DRAWS = 64
"""Weight draws over which the root mean square is taken."""
TOLERANCE = 0.05
"""Median relative error allowed: ten times the noise of 64 draws at width 24 (below 0.5 %)."""

Layers = Sequence[Float64[np.ndarray, "n n"]]


def measured_norms(
    layers: Layers, generator: np.random.Generator, *, identities: bool = False, gain: float = GAIN
) -> Float64[np.ndarray, "n"]:
    """Root mean square over weight draws of ||dh_last/dx_j||_F / sqrt(d), by exact back-propagation.

    Args:
        layers: Attention kernels, layer 0 nearest the input.
        generator: Source of the weights, Gaussian of variance 1/d.
        identities: Value maps are identities instead.
        gain: Size of a layer's update.
    """
    n_positions = len(layers[0])
    total = np.zeros(n_positions)
    draws = 1 if identities else DRAWS
    for _ in range(draws):
        generator.standard_normal(0 if identities else (WIDTH, WIDTH))  # a map that is not read
        backward = np.zeros((n_positions, WIDTH, WIDTH))
        backward[-1] = np.eye(WIDTH)
        for kernel in reversed(layers):
            drawn = np.eye(WIDTH) if identities else generator.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
            backward = backward + gain * np.tensordot(kernel.T, backward, axes=1) @ drawn.T
        total += np.sum(backward**2, axis=(1, 2)) / WIDTH
    norms: np.ndarray = np.sqrt(total / draws)
    return norms


def squared_norms(layers: Layers, *, gain: float = GAIN) -> Float64[np.ndarray, "n"]:
    """sqrt(G_jj): norms that add in squares over sets of layers."""
    backward = np.zeros(layers[0].shape)
    backward[-1, -1] = 1.0
    for kernel in reversed(layers):
        backward = backward + gain**2 * kernel.T @ backward @ kernel
    return np.sqrt(np.diagonal(backward))


def linear_norms(layers: Layers, *, gain: float = GAIN) -> Float64[np.ndarray, "n"]:
    """Norms that add linearly: the last row of prod_l (I + g A_l), the rollout up to its scale."""
    row: np.ndarray = np.eye(len(layers[0]))[-1]
    for kernel in reversed(layers):
        row = row + gain * row @ kernel
    return row


def profile_distance(first: Float64[np.ndarray, "n"], second: Float64[np.ndarray, "n"]) -> float:
    """Wasserstein distance of two profiles, each normalised first."""
    return float(wasserstein(first / first.sum(), second / second.sum()))


def median_error(predicted: Float64[np.ndarray, "n"], measured: Float64[np.ndarray, "n"]) -> float:
    """Median relative error over positions, scale included."""
    return float(np.median(np.abs(predicted / measured - 1)))


GRADIENT_POSITIONS = 16
GRADIENT_WIDTH = 6
GRADIENT_DEPTH = 4


@CLAIMS.register("birth-2603.10123/claim-5-gradient")
class GradientIsAMatrix(Claim):
    """The gradient without residual connections is a matrix."""

    source = "main theorem, and the critics' remark on it; theory section 2, item 5"
    statement = "Without residuals the gradient from the last token to token j is the entry (last, j) of M^H."
    assumptions = (UNIFORM, "no residual connections, norms or MLPs")
    broken_by = "a residual connection is added, and with it other powers of M"
    computed = "largest relative error of ||J_j|| = (M^H)_(last,j)"
    sharper = (
        "J_j is a d x d matrix, (M^H)_(last,j) W_1...W_H (error {product_form_error:.0e}): its norms follow the row up "
        "to the factor ||W_1...W_H|| = {norm_factor:.2f}; M^H is a power, no exponential (first token "
        "{power_first:.3f}, for exp(H(M-1)) {exponential_first:.3f})"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Jacobian of a random linear network by pushing a basis through, against row times product of value maps."""
        cesaro = even_kernel(Causal().visible(GRADIENT_POSITIONS))
        weights = generator.standard_normal((GRADIENT_DEPTH, GRADIENT_WIDTH, GRADIENT_WIDTH)) / np.sqrt(GRADIENT_WIDTH)
        # Every basis vector pushed through h <- (h +) A h W: dh_last/dx_j by j, input and output.
        states = np.eye(GRADIENT_POSITIONS * GRADIENT_WIDTH).reshape((GRADIENT_POSITIONS, GRADIENT_WIDTH) * 2)
        for value_map in weights:
            update = np.einsum("ik,ajkb,bc->ajic", cesaro, states, value_map)
            states = states + update if broken else update
        jacobian = states[:, :, -1, :]
        row = np.linalg.matrix_power(cesaro, GRADIENT_DEPTH)[-1]
        product = np.linalg.multi_dot(list(weights))
        norms = np.linalg.norm(jacobian, axis=(1, 2))
        factor = float(np.linalg.norm(product))
        error = float(np.abs(jacobian - row[:, None, None] * product).max() / np.abs(jacobian).max())
        as_row = float(np.abs(norms / row - 1).max())
        exponential = float(expm(GRADIENT_DEPTH * (cesaro - np.eye(GRADIENT_POSITIONS)))[-1, 0])
        return Finding(
            value=as_row,
            as_stated=as_row <= EXACT,
            corrected=error <= EXACT,
            numbers={
                "product_form_error": error,
                "norm_factor": factor,
                "power_first": float(row[0]),
                "exponential_first": exponential,
            },
        )


@CLAIMS.register("birth-2603.10123/claim-6-linear-addition")
class LinearAddition(Claim):
    """How paths of different depths add up in a gradient's norm."""

    source = "residual closed form and its validation (W1 0.02); theory section 2, item 6"
    statement = "At initialisation the gradient norm follows the last row of prod ((1-m) I + m C): paths add linearly."
    assumptions = (UNIFORM, RESIDUAL, "independent zero-mean value maps, as initialisers draw them")
    broken_by = "value maps that are not random: identities, for which paths do add linearly"
    computed = "W1 of linear addition (m = g/(1+g)) to the measured profile (published agreement: 0.02)"
    sharper = (
        "norms add in squares, sum_k C(L,k) g^2k (C^k)_(last,j)^2: median error {error_squares:.3f}, W1 "
        "{w1_squares:.4f}; linear addition {error_linear:.2f}, W1 {w1_linear:.4f}, and {w1_linear_fitted_mixing:.4f} "
        "if one mixing is fitted to the result ({layers:.0f} layers, g = {gain:g})"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Simulated Jacobian norms of a linear residual network against linear and squared addition."""
        kernel = even_kernel(Causal().visible(64))
        layers = [kernel] * 8
        gain = 0.5
        measured = measured_norms(layers, generator, identities=broken, gain=gain)
        linear, squared = linear_norms(layers, gain=gain), squared_norms(layers, gain=gain)
        trials = np.geomspace(0.01, 2, 60)  # g = m / (1 - m), the mixing fitted to the measurement
        fits = [profile_distance(linear_norms(layers, gain=trial), measured) for trial in trials]
        distance = profile_distance(linear, measured)
        error = median_error(squared, measured)
        return Finding(
            value=distance,
            as_stated=distance <= 0.02,  # the paper's, between its closed form and a measured Jacobian
            corrected=error <= TOLERANCE,
            numbers={
                "layers": len(layers),
                "gain": gain,
                "error_linear": median_error(linear, measured),
                "error_squares": error,
                "w1_linear": distance,
                "w1_linear_fitted_mixing": min(fits),
                "w1_squares": profile_distance(squared, measured),
            },
            instances=1 if broken else DRAWS,
        )
