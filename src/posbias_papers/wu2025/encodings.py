"""Wu et al. 2025 (arXiv 2502.01951) on encodings: the decay mask (lemma 4.4, theorem 4.5), RoPE (4.6, 4.7, I.1, I.2).

The decay mask adds -m (i - j) to causal logits. With r = e^-m, uniform content and queries far from the first token,
t + 1 layers give exactly the negative binomial (1 - r)^(t+1) C(t + d, d) r^d in the distance d.

RoPE: content lies in a cone, so that every query-key angle stays within delta theta_1 in every layer; feature pair l
turns by alpha_l theta_1 per position. Constants are derived here with n the product of a segment pair's norms:
n_min - n_max (d^2 alpha^2 + delta^2) theta^2 <= n cos(psi) <= n_max - n_min (2/pi^2)(d^2 alpha^2/2 - delta^2) theta^2.
docs/theory, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import brentq, minimize_scalar
from scipy.special import gammaln

from posbias.architecture import Causal
from posbias.theory.kernels import masked_softmax
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import Network, Run, Violation, decay_logits, random_runs, rollouts
from posbias_papers.wu2025.masks import BOUNDED, SEEDS, SLACK, VALUES, WEIGHTS_GROW

N_POSITIONS = 40
DEPTH = 8
"""T + 1 layers of theorem 4.5."""
DECAYS = (0.05, 0.223, 1.0)
"""m in logits per position; 0.223 = -log 0.8 is the paper's own."""
SIZES = ((8, 0.2), (8, 0.6))
"""Width d and norm of W_Q, W_K: nearly uniform attention, and moderate content."""
LONG = 400
"""Positions of the uniform example: r^200 is below rounding for r = 0.8."""


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


Bounds = tuple[Float64[np.ndarray, "entries"], Float64[np.ndarray, "entries"]]


def band_excess(kernels: Float64[np.ndarray, "layers query key"], band: Callable[[int], Bounds]) -> float:
    """Largest factor by which the rollout of any number s of layers leaves a band around C(s - 1 + d, d).

    Args:
        kernels: Causal attention of every layer.
        band: Logarithms of the band's lower and upper end for s layers, over the visible entries, row by row.
    """
    visible = Causal().visible(kernels.shape[-1])
    distance = distances(kernels.shape[-1])[visible]
    worst = -np.inf
    for steps, rolled in enumerate(rollouts(list(kernels))[1:], 1):
        with np.errstate(divide="ignore"):  # -inf where attention underflowed
            scaled = np.log(rolled[visible]) - log_paths(steps - 1, distance)
        lower, upper = band(steps)
        worst = max(worst, float((scaled - upper).max()), float((lower - scaled).max()))
    return float(np.exp(worst))


def decay_runs(generator: np.random.Generator, *, broken: bool) -> list[tuple[float, Run]]:
    """Networks with the decay mask: every strength and weight norm, a few draws each."""
    visible, runs = Causal().visible(N_POSITIONS), []
    violation: Violation = "weights" if broken else "none"
    for strength in DECAYS:
        network = Network(visible, np.ones(DEPTH), bias=decay_logits(N_POSITIONS, strength), violation=violation)
        runs += [(strength, run) for run in random_runs(network, generator, sizes=SIZES, draws=SEEDS)]
    return runs


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
        outside = max(band_excess(run.kernels, _decay_band(strength, run)) for strength, run in runs)
        modes = [(strength, layers, *envelope_mode(layers, strength)) for strength in DECAYS for layers in (1, 2, 4, 8)]
        peak_right = all(mode == int(np.floor(layers / np.expm1(strength))) for strength, layers, mode, _ in modes)
        monotone = [(strength, layers) for strength, layers, _, falls in modes if falls]
        explained = all(layers < np.expm1(strength) for strength, layers in monotone)
        exact = negative_binomial_error(0.8, DEPTH - 1)
        held = outside <= SLACK
        return Finding(
            value=outside,
            as_stated=held and peak_right and not monotone,
            corrected=held and peak_right and explained,
            numbers={
                "excess_over_band": outside,
                "negative_binomial_relative_error": exact,
                "monotone_pairs": float(len(monotone)),
                "pairs": float(len(modes)),
            },
            instances=len(runs),
        )


def _decay_band(strength: float, run: Run) -> Callable[[int], Bounds]:
    lower, _, upper = log_constants(strength, run)
    decay = decay_logits(N_POSITIONS, strength)[Causal().visible(N_POSITIONS)]
    return lambda steps: (steps * lower + decay, steps * upper + decay)


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


ROPE_POSITIONS = 24
ROPE_DEPTH = 6
CONE = 0.15
"""Half-angle of the content cone in every feature pair (radians)."""
SPEEDS: dict[int, tuple[float, ...]] = {1: (1.0,), 2: (1.0, 2.0)}
"""Turning rates alpha_l by number of feature pairs."""
ANGLES = "query-key angles within delta theta_1, and no rotation beyond pi over the context"
TOO_FAST = "rotation six times beyond the angle condition: the farthest keys come round again"
SHARE = "A3: every feature pair keeps a share beta of the norm"
GROWTH_LENGTHS = (32, 64, 128, 256)
STEADY = 0.1
"""Growth exponent in N below which a constant counts as independent of N."""


@dataclass(frozen=True, eq=False)
class RopeRun:
    """Attention of a RoPE network on one input in a cone, and what its constants are made of."""

    kernels: Float64[np.ndarray, "layers query key"]
    logits: Float64[np.ndarray, "layers query key"]
    speeds: tuple[float, ...]
    angle: float
    """theta_1 (radians per position)."""
    condition: float
    """Left side over right side of the angle condition; at most 1 where the assumption holds."""
    norms: tuple[float, float]
    """Smallest and largest product of a query's and a key's segment norms."""
    segment_angle: float
    """The bound delta' theta_1 on a segment pair's angle before rotation."""

    @property
    def fall(self) -> float:
        """theta_1^2 sum_l alpha_l^2."""
        return self.angle**2 * float(np.sum(np.square(self.speeds)))


def rope_run(pairs: int, generator: np.random.Generator, *, broken: bool) -> RopeRun:
    """A network whose value maps rotate and whose queries and keys share one rotation; content stays in its cone."""
    speeds = np.array(SPEEDS[pairs])
    states = generator.uniform(1.0, 1.5, (ROPE_POSITIONS, pairs)) * np.exp(
        1j * generator.uniform(-CONE, CONE, (ROPE_POSITIONS, pairs))
    )
    # The angle condition: (delta + N - 1) theta_1 <= pi in lemma 4.6, in I.1 (delta pi / beta + 2 (N - 1) alpha_max)
    # theta_1 <= 2 pi. The rotation takes what the content's own angle leaves of a half turn.
    most_turned = (ROPE_POSITIONS - 1) * float(speeds.max())
    angle = (np.pi - _segment_angle(states)) / most_turned * (6 if broken else 0.98)
    positions = np.arange(ROPE_POSITIONS)[:, None]
    kernels, logits, everything = [], [], []
    for _ in range(ROPE_DEPTH):
        everything.append(states)
        turned = states * np.exp(1j * positions * speeds * angle)
        logits.append((turned @ turned.conj().T).real)
        kernels.append(masked_softmax(Causal().visible(ROPE_POSITIONS), logits[-1]))
        states = kernels[-1] @ (states * np.exp(1j * generator.uniform(-np.pi, np.pi, pairs)))
    segment_angle = _segment_angle(np.stack(everything))
    norms = np.abs(np.stack(everything))
    return RopeRun(
        kernels=np.stack(kernels),
        logits=np.stack(logits),
        speeds=SPEEDS[pairs],
        angle=angle,
        condition=(segment_angle + most_turned * angle) / np.pi,
        norms=(float((norms.min(axis=1) ** 2).min()), float((norms.max(axis=1) ** 2).max())),
        segment_angle=segment_angle,
    )


def _segment_angle(states: np.ndarray) -> float:
    """The bound delta' theta_1 on a segment pair's angle before rotation, over all layers.

    The largest query-key angle delta theta_1; with several pairs pi / (2 beta) times that, beta the smallest share of a
    segment in its vector's norm.
    """
    reach = 0.0
    for layer in states.reshape((-1, *states.shape[-2:])):
        size = np.linalg.norm(layer, axis=1)
        cosine = (layer @ layer.conj().T).real / np.outer(size, size)
        reach = max(reach, float(np.arccos(np.clip(cosine, -1, 1)).max()))
    share = float((np.abs(states) / np.linalg.norm(states, axis=-1, keepdims=True)).min())
    return reach if states.shape[-1] == 1 else np.pi / 2 * reach / share


def _share_beyond_printed(run: RopeRun) -> float:
    """Share of admissible logits that violate the inequality of appendix F (or I.2), n_min and n_max measured."""
    low, high = run.norms
    distance = distances(ROPE_POSITIONS)
    visible = Causal().visible(ROPE_POSITIONS)
    lower, upper = np.zeros(distance.shape), np.zeros(distance.shape)
    for speed in run.speeds:
        turned = distance * speed * run.angle
        lower += low * np.cos(turned + run.segment_angle)
        upper += high * np.cos(np.abs(turned - run.segment_angle))
    outside = (run.logits < lower - 1e-12) | (run.logits > upper + 1e-12)
    return float(np.mean(outside[:, visible]))


def _excess(run: RopeRun, depth: int) -> float:
    """Largest factor by which the rollout leaves C_min^s C(t+d,d) e^-cD ... C_max^s C(t+d,d) e^-c'D/s, s = t + 1.

    For one layer these are the corrected bounds on every entry; the largest over all layers, each by itself.
    """
    (low, high), pairs = run.norms, len(run.speeds)
    slack = pairs * run.segment_angle**2
    # Logarithms of C_min and C_max from the corrected inequality; exponents are n_max and n_min / pi^2.
    lower = pairs * low - high * slack - pairs * high - np.log(ROPE_POSITIONS)
    upper = 2 * pairs * high + low * (2 / np.pi**2) * slack
    squared = run.fall * distances(ROPE_POSITIONS)[Causal().visible(ROPE_POSITIONS)] ** 2.0

    def band(steps: int) -> Bounds:
        return steps * lower - high * squared, steps * upper - low / np.pi**2 * squared / steps

    return max(band_excess(run.kernels[start : start + depth], band) for start in range(0, len(run.kernels), depth))


def least_squared_steps(distance: int, steps: int) -> float:
    """The least sum of squares of `steps` whole steps that cover `distance`, as a share of distance^2."""
    short, longer = divmod(distance, steps)
    return ((steps - longer) * short**2 + longer * (short + 1) ** 2) / distance**2


def constant_rope_kernel(n_positions: int, pairs: int) -> tuple[Float64[np.ndarray, "query key"], float]:
    """Attention with equal content of norm 1 that turns by pi over the whole context; and theta_1^2 sum alpha^2."""
    speeds = np.array(SPEEDS[pairs])
    angle = np.pi / (n_positions - 1) / speeds.max()
    logits = np.cos(distances(n_positions)[..., None] * speeds * angle).sum(axis=-1)
    return masked_softmax(Causal().visible(n_positions), logits), angle**2 * float(np.sum(speeds**2))


def envelope_spread(n_positions: int, pairs: int) -> float:
    """Largest over smallest ratio of the last row's rollout to C(t+d,d) e^-cD, for the single c that suits it best."""
    kernel, fall = constant_rope_kernel(n_positions, pairs)
    distance = np.arange(n_positions)[::-1]
    rollout = np.linalg.matrix_power(kernel, ROPE_DEPTH)[-1]
    scaled = np.log(rollout) - log_paths(ROPE_DEPTH - 1, distance)
    squared = fall * distance**2.0
    best = minimize_scalar(lambda rate: np.ptp(scaled + rate * squared), bounds=(0.0, 20.0), method="bounded")
    return float(np.exp(best.fun))


class RopeLayer(Claim):
    """A statement on one layer, for one or two feature pairs (frequencies 1 and 2)."""

    broken_by = TOO_FAST
    pairs: ClassVar[int] = 1
    computed = "share of logits outside the proof's C_min cos((d+delta)theta) <= q.k <= C_max cos(|d-delta| theta)"
    sharper = (
        "beyond pi/2 the cosine is negative and the norms' roles swap, and |psi| >= |d - delta| theta fails for "
        "d < delta; right constants are c = n_max, c' = n_min/pi^2, n a product of segment norms (largest ratio "
        "{excess_over_corrected_bounds:.3f}, must be <= 1); within the condition the exponential falls by a constant "
        "factor at most"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The proof's inequality on the logits, and the two bounds with derived constants."""
        runs = [rope_run(self.pairs, generator, broken=broken) for _ in range(3 * SEEDS)]
        printed = [_share_beyond_printed(run) for run in runs]
        bounds = [_excess(run, 1) for run in runs]
        corrected = max(bounds) <= SLACK
        return Finding(
            value=max(printed),
            as_stated=corrected and max(printed) == 0,
            corrected=corrected,
            numbers={
                "share_outside_printed": max(printed),
                "excess_over_corrected_bounds": max(bounds),
                "condition": max(run.condition for run in runs),
                "least_exponential_factor": min(
                    float(np.exp(-run.norms[0] / np.pi**2 * (ROPE_POSITIONS - 1) ** 2 * run.fall)) for run in runs
                ),
            },
            instances=len(runs),
        )


class RopeStack(Claim):
    """A statement on several layers, likewise."""

    broken_by = TOO_FAST
    pairs: ClassVar[int] = 1
    computed = "exponent p of the envelope constants' growth, C_max/C_min ~ N^p at {layers:.0f} layers (0 if uniform)"
    sharper = (
        "the proof's exponent c'/2 must be c'/(t+1): {layers:.0f} steps can have squares summing to "
        "{least_sum_of_squared_steps:.3f} d^2, not 1/2; the constants are not uniform in N (spread "
        "{envelope_spread_shortest:.0e} at N={shortest:.0f}, {envelope_spread_longest:.0e} at N={longest:.0f}); the "
        "envelope peaks at d = {envelope_peak:.1f}, the rollout at d = {rollout_peak:.0f} of {largest_distance:.0f}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The proof's exponent, the two-sided bound that does hold, and the constants as N grows."""
        runs = [rope_run(self.pairs, generator, broken=broken) for _ in range(3 * SEEDS)]
        excess = max(_excess(run, ROPE_DEPTH) for run in runs)
        least = least_squared_steps(ROPE_POSITIONS - 1, ROPE_DEPTH)
        spreads = [envelope_spread(n_positions, self.pairs) for n_positions in GROWTH_LENGTHS]
        growth = float(np.polyfit(np.log(GROWTH_LENGTHS), np.log(spreads), 1)[0])
        kernel, fall = constant_rope_kernel(GROWTH_LENGTHS[1], self.pairs)
        peak = np.argmax(np.linalg.matrix_power(kernel, ROPE_DEPTH)[-1, ::-1])
        # Stationary point of L(x) = log C(t + x, x) - x^2 fall under Stirling's approximation, as in the paper.
        predicted = brentq(lambda x: np.log((ROPE_DEPTH - 1 + x) / x) - 2 * fall * x, 1e-6, 1e6)
        corrected = excess <= SLACK
        return Finding(
            value=growth,
            as_stated=corrected and least >= 0.5 and growth < STEADY,
            corrected=corrected,
            numbers={
                "layers": ROPE_DEPTH,
                "shortest": GROWTH_LENGTHS[0],
                "longest": GROWTH_LENGTHS[-1],
                "largest_distance": GROWTH_LENGTHS[1] - 1,
                "excess_over_corrected_band": excess,
                "least_sum_of_squared_steps": least,
                "envelope_spread_shortest": spreads[0],
                "envelope_spread_longest": spreads[-1],
                "envelope_peak": float(predicted),
                "rollout_peak": float(peak),
            },
            instances=len(runs),
        )


@CLAIMS.register("wu2025/lemma-4.6")
class RopeInOneLayer(RopeLayer):
    """Gaussian decay of RoPE attention with one frequency."""

    source = "Lemma 4.6, section 4.3; constants from appendix F"
    statement = "RoPE, one frequency: C_min e^-c(i-j)^2 theta^2 <= A_ij <= C_max e^-c'(i-j)^2 theta^2."
    assumptions = (BOUNDED, VALUES, ANGLES)


@CLAIMS.register("wu2025/lemma-I.1")
class RopeInOneLayerManyFrequencies(RopeLayer):
    """Gaussian decay of RoPE attention with several frequencies."""

    pairs = 2
    source = "Lemma I.1, appendix I"
    statement = "RoPE, several frequencies: the bounds of lemma 4.6 with sum_l alpha_l^2 in the exponent."
    assumptions = (BOUNDED, VALUES, ANGLES, SHARE)


@CLAIMS.register("wu2025/theorem-4.7")
class RopeOverLayers(RopeStack):
    """RoPE over layers with one frequency."""

    source = "Theorem 4.7, section 4.3; proof in appendix G"
    statement = "RoPE, t+1 layers: rollout is Theta(C(t+d,d) e^-c d^2 theta^2) with one c; its peak moves out with t."
    assumptions = (BOUNDED, VALUES, ANGLES, "attention only: no residual connections", "a fixed number of layers")


@CLAIMS.register("wu2025/theorem-I.2")
class RopeOverLayersManyFrequencies(RopeStack):
    """RoPE over layers with several frequencies."""

    pairs = 2
    source = "Theorem I.2, appendix I"
    statement = "RoPE, several frequencies, t+1 layers: Theta(C(t+d,d) e^-c d^2 sum_l alpha_l^2 theta^2) with one c."
    assumptions = (BOUNDED, VALUES, ANGLES, SHARE, "attention only: no residual connections")
