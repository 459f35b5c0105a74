"""Wu et al. 2025 (arXiv 2502.01951) on the decay mask: lemma 4.4 and theorem 4.5.

The decay mask adds -m (i - j) to causal logits. With r = e^-m, uniform content and queries far from the first token,
t + 1 layers give exactly the negative binomial (1 - r)^(t+1) C(t + d, d) r^d in the distance d. docs/theory, section 3.
"""

import numpy as np
from jaxtyping import Float64, Int64
from scipy.special import gammaln

from posbias.architecture import Causal
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import Network, Run, rollouts, run_network
from posbias_papers.wu2025.masks import BOUNDED, SEEDS, SLACK, VALUES, WEIGHTS_GROW

N_POSITIONS = 40
DEPTH = 8
"""T + 1 layers of theorem 4.5."""
DECAYS = (0.05, 0.223, 1.0)
"""m in logits per position; 0.223 = -log 0.8 is the paper's own."""
WEIGHT_BOUNDS = (0.2, 0.6)
"""Norms of W_Q, W_K: nearly uniform attention, and moderate content."""
LONG = 400
"""Positions of the uniform example: r^200 is below rounding for r = 0.8."""


def decay_logits(n_positions: int, strength: float) -> Float64[np.ndarray, "query key"]:
    """D_ij = -m (i - j)."""
    positions = np.arange(n_positions, dtype=np.float64)
    logits: Float64[np.ndarray, "query key"] = strength * (positions[None, :] - positions[:, None])
    return logits


def distances(n_positions: int) -> Int64[np.ndarray, "query key"]:
    """i - j where j <= i, else 0."""
    positions = np.arange(n_positions)
    distance: Int64[np.ndarray, "query key"] = np.maximum(positions[:, None] - positions[None, :], 0)
    return distance


def log_paths(layers_beyond: int, distance: Int64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """log C(t + d, d): causal walks of t + 1 steps that cover a distance d."""
    paths: Float64[np.ndarray, "*shape"] = (
        gammaln(layers_beyond + distance + 1.0) - gammaln(layers_beyond + 1.0) - gammaln(distance + 1.0)
    )
    return paths


def decay_runs(generator: np.random.Generator, *, broken: bool) -> list[tuple[float, Run]]:
    """Networks with the decay mask: every strength and weight norm, a few draws each."""
    return [
        (
            strength,
            run_network(
                Network(
                    visible=Causal().visible(N_POSITIONS),
                    mixing=np.ones(DEPTH),
                    weight_bound=weight_bound,
                    bias=decay_logits(N_POSITIONS, strength),
                    violation="weights" if broken else "none",
                ),
                generator,
            ),
        )
        for strength in DECAYS
        for weight_bound in WEIGHT_BOUNDS
        for _ in range(SEEDS)
    ]


def log_constants(strength: float, run: Run) -> tuple[float, float, float]:
    """Logarithms of C_min, of C_max as the proof prints it, and of the C_max that covers the first token too.

    The proof bounds every row's sum from below by that of two keys; the first query has one.
    """
    spread = 2 * run.content_bound
    return float(np.log1p(-np.exp(-strength))) - spread, spread - float(np.log1p(np.exp(-strength))), spread


@CLAIMS.register("wu2025/lemma-4.4")
class DecayInOneLayer(Claim):
    """Exponential decay within a layer, with the proof's constants."""

    source = "Lemma 4.4, section 4.2; constants from appendix D"
    statement = "Decay mask: C_min e^-(i-j)m <= A_ij <= C_max e^-(i-j)m with C_min, C_max from the proof."
    assumptions = (BOUNDED, VALUES)
    broken_by = WEIGHTS_GROW
    computed = "largest A_ij / (C_max e^-(i-j)m) with the proof's C_max (should be <= 1)"
    sharper = (
        "the proof's C_max = e^(range)/(1 + e^-m) supposes two visible keys and fails for query 0, which has one "
        "(A_00 = 1); C_max = e^(range) holds for every query (largest ratio {over_upper_corrected:.3f})"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Every entry over its upper bound and under its lower one; constants as printed and corrected."""
        runs = decay_runs(generator, broken=broken)
        visible = Causal().visible(N_POSITIONS)
        above, printed, below = [], [], []
        for strength, run in runs:
            lower, upper_printed, upper = log_constants(strength, run)
            with np.errstate(divide="ignore"):  # -inf where attention underflowed
                ratio = (np.log(run.kernels) - decay_logits(N_POSITIONS, strength))[:, visible]
            above.append(float(np.exp(ratio.max() - upper)))
            printed.append(float(np.exp(ratio.max() - upper_printed)))
            below.append(float(np.exp(lower - ratio.min())))
        corrected = max(above) <= SLACK and max(below) <= SLACK
        return Finding(
            value=max(printed),
            as_stated=corrected and max(printed) <= SLACK,
            corrected=corrected,
            numbers={
                "over_upper_as_printed": max(printed),
                "over_upper_corrected": max(above),
                "lower_over_entry": max(below),
            },
            instances=len(runs),
        )


@CLAIMS.register("wu2025/theorem-4.5")
class DecayOverLayers(Claim):
    """The negative binomial in the distance, and where it peaks."""

    source = "Theorem 4.5, section 4.2"
    statement = "Decay mask, t+1 layers: rollout is Theta(C(t+d,d) e^-dm), not monotone in d, peak at t/(e^m - 1)."
    assumptions = (BOUNDED, VALUES, "attention only: no residual connections", "a fixed number of layers")
    broken_by = WEIGHTS_GROW
    computed = (
        "largest excess over the band C_min^(t+1) ... C_max^(t+1) (<= 1); monotone in {monotone_pairs:.0f} of "
        "{pairs:.0f} pairs (m, t)"
    )
    sharper = (
        "uniform content away from the first token: exactly (1-r)^(t+1) C(t+d,d) r^d, r = e^-m (relative error "
        "{negative_binomial_relative_error:.0e}), peak at floor(t/(e^m - 1)); it only falls when t < e^m - 1 (as at "
        "m = 1, t = 1)"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The two-sided bound C_min^(t+1), C_max^(t+1); the peak, against exact integers; monotone cases counted."""
        runs = decay_runs(generator, broken=broken)
        outside = max(_outside_band(strength, run) for strength, run in runs)
        modes = [(strength, layers, *envelope_mode(layers, strength)) for strength in DECAYS for layers in (1, 2, 4, 8)]
        peak_right = all(mode == int(np.floor(layers / np.expm1(strength))) for strength, layers, mode, _ in modes)
        monotone = [(strength, layers) for strength, layers, _, falls in modes if falls]
        explained = all(layers < np.expm1(strength) for strength, layers in monotone)
        exact = negative_binomial_error(0.8, DEPTH - 1)
        band = outside <= SLACK
        return Finding(
            value=outside,
            as_stated=band and peak_right and not monotone,
            corrected=band and peak_right and explained,
            numbers={
                "excess_over_band": outside,
                "negative_binomial_relative_error": exact,
                "monotone_pairs": float(len(monotone)),
                "pairs": float(len(modes)),
            },
            instances=len(runs),
        )


def _outside_band(strength: float, run: Run) -> float:
    """Largest factor by which the rollout of any number of layers leaves its band."""
    lower, _, upper = log_constants(strength, run)
    visible = Causal().visible(N_POSITIONS)
    worst = -np.inf
    for layers_beyond, cumulative in enumerate(rollouts(list(run.kernels))[1:]):
        with np.errstate(divide="ignore"):
            ratio = (
                np.log(cumulative[visible])
                - (log_paths(layers_beyond, distances(N_POSITIONS)) + decay_logits(N_POSITIONS, strength))[visible]
            )
        steps = layers_beyond + 1
        worst = max(worst, float(ratio.max()) - steps * upper, steps * lower - float(ratio.min()))
    return float(np.exp(worst))


def envelope_mode(layers_beyond: int, strength: float) -> tuple[int, bool]:
    """Distance at which C(t + d, d) e^-dm is largest (the last of equals), and whether it falls from the start."""
    distance = np.arange(LONG)
    log_envelope = log_paths(layers_beyond, distance) - strength * distance
    near_best = np.flatnonzero(log_envelope >= log_envelope.max() - 1e-12)
    return int(near_best[-1]), bool(np.all(np.diff(log_envelope) < 0))


def negative_binomial_error(rate: float, layers_beyond: int) -> float:
    """Largest relative error of the negative binomial on the nearer half of a long uniform context."""
    weights = rate ** distances(LONG) * Causal().visible(LONG)
    kernel = weights / weights.sum(axis=1, keepdims=True)
    profile = np.linalg.matrix_power(kernel, layers_beyond + 1)[-1, ::-1]
    distance = np.arange(LONG)
    exact = np.exp((layers_beyond + 1) * np.log1p(-rate) + log_paths(layers_beyond, distance) + distance * np.log(rate))
    near = distance < LONG // 2
    return float(np.max(np.abs(profile[near] / exact[near] - 1)))
