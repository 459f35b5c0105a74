"""Wu et al. 2025 (arXiv 2502.01951) on RoPE: lemmas 4.6 and I.1, theorems 4.7 and I.2.

Content lies in a cone, so that every query-key angle stays within delta theta_1 in every layer; feature pair l turns
by alpha_l theta_1 per position. Constants are derived here with n the product of a segment pair's norms:
n_min - n_max (d^2 alpha^2 + delta^2) theta^2 <= n cos(psi) <= n_max - n_min (2/pi^2)(d^2 alpha^2/2 - delta^2) theta^2.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq, minimize_scalar

from posbias.architecture import Causal
from posbias.theory.kernels import masked_softmax
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import rollouts
from posbias_papers.wu2025.decay import distances, log_paths
from posbias_papers.wu2025.masks import BOUNDED, SEEDS, SLACK, VALUES

N_POSITIONS = 24
DEPTH = 6
CONE = 0.15
"""Half-angle of the content cone in every feature pair (radians)."""
NORMS = (1.0, 1.5)
"""Range of the segments' norms."""
SPEEDS: dict[int, tuple[float, ...]] = {1: (1.0,), 2: (1.0, 2.0)}
"""Turning rates alpha_l by number of feature pairs."""
BROKEN_TURNS = 6.0
"""How many times too fast the rotation is where the angle condition is violated."""
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
    states = generator.uniform(*NORMS, (N_POSITIONS, pairs)) * np.exp(
        1j * generator.uniform(-CONE, CONE, (N_POSITIONS, pairs))
    )
    angle = _fastest_angle(states, speeds) * (BROKEN_TURNS if broken else 0.98)
    positions = np.arange(N_POSITIONS)[:, None]
    kernels, logits, everything = [], [], []
    for _ in range(DEPTH):
        everything.append(states)
        turned = states * np.exp(1j * positions * speeds * angle)
        logits.append((turned @ turned.conj().T).real)
        kernels.append(masked_softmax(Causal().visible(N_POSITIONS), logits[-1]))
        states = kernels[-1] @ (states * np.exp(1j * generator.uniform(-np.pi, np.pi, pairs)))
    reach, share = _angles(np.stack(everything))
    norms = np.abs(np.stack(everything))
    return RopeRun(
        kernels=np.stack(kernels),
        logits=np.stack(logits),
        speeds=SPEEDS[pairs],
        angle=angle,
        condition=_condition(reach, share, angle, speeds),
        norms=(float((norms.min(axis=1) ** 2).min()), float((norms.max(axis=1) ** 2).max())),
        segment_angle=reach if pairs == 1 else np.pi / 2 * reach / share,
    )


def _angles(states: np.ndarray) -> tuple[float, float]:
    """Largest query-key angle delta theta_1 and smallest share beta of a segment in its vector's norm, all layers."""
    layers = states.reshape((-1, *states.shape[-2:]))
    reach = 0.0
    for layer in layers:
        size = np.linalg.norm(layer, axis=1)
        cosine = (layer @ layer.conj().T).real / np.outer(size, size)
        reach = max(reach, float(np.arccos(np.clip(cosine, -1, 1)).max()))
    return reach, float((np.abs(states) / np.linalg.norm(states, axis=-1, keepdims=True)).min())


def _fastest_angle(states: np.ndarray, speeds: np.ndarray) -> float:
    """The largest theta_1 that the angle condition allows for these first states."""
    reach, share = _angles(states)
    if len(speeds) == 1:
        return float((np.pi - reach) / (N_POSITIONS - 1))
    return float((2 * np.pi - reach * np.pi / share) / (2 * (N_POSITIONS - 1) * speeds.max()))


def _condition(reach: float, share: float, angle: float, speeds: np.ndarray) -> float:
    """Lemma 4.6: (delta + N - 1) theta_1 / pi. Lemma I.1: (delta pi / beta + 2 (N - 1) alpha_max) theta_1 / 2 pi."""
    turned = (N_POSITIONS - 1) * float(speeds.max()) * angle
    if len(speeds) == 1:
        return (reach + turned) / np.pi
    return (reach * np.pi / share + 2 * turned) / (2 * np.pi)


def log_constants(run: RopeRun) -> tuple[float, float]:
    """Logarithms of C_min and C_max from the corrected inequality; exponents are n_max and n_min / pi^2."""
    low, high = run.norms
    pairs = len(run.speeds)
    slack = pairs * run.segment_angle**2
    lower = pairs * low - high * slack - pairs * high - np.log(N_POSITIONS)
    return lower, 2 * pairs * high + low * (2 / np.pi**2) * slack


def _exponential_factor(run: RopeRun) -> float:
    """The upper bound's exponential at the largest distance."""
    return float(np.exp(-run.norms[0] / np.pi**2 * (N_POSITIONS - 1) ** 2 * run.fall))


def _share_beyond_printed(run: RopeRun) -> float:
    """Share of admissible logits that violate the inequality of appendix F (or I.2), n_min and n_max measured."""
    low, high = run.norms
    distance = distances(N_POSITIONS)
    visible = Causal().visible(N_POSITIONS)
    lower, upper = np.zeros(distance.shape), np.zeros(distance.shape)
    for speed in run.speeds:
        turned = distance * speed * run.angle
        lower += low * np.cos(turned + run.segment_angle)
        upper += high * np.cos(np.abs(turned - run.segment_angle))
    outside = (run.logits < lower - 1e-12) | (run.logits > upper + 1e-12)
    return float(np.mean(outside[:, visible]))


def _worst_excess(run: RopeRun) -> float:
    """Largest factor by which an entry leaves the corrected bounds."""
    low, high = run.norms
    lower, upper = log_constants(run)
    visible = Causal().visible(N_POSITIONS)
    squared = run.fall * distances(N_POSITIONS)[visible] ** 2.0
    entries = np.log(run.kernels[:, visible])
    above = entries + low / np.pi**2 * squared - upper
    below = lower - high * squared - entries
    return float(np.exp(max(above.max(), below.max())))


def _rollout_excess(run: RopeRun) -> float:
    """Largest factor by which the rollout leaves C_min^s C(t+d,d) e^-cD ... C_max^s C(t+d,d) e^-c'D/s, s = t + 1."""
    low, high = run.norms
    lower, upper = log_constants(run)
    visible = Causal().visible(N_POSITIONS)
    distance = distances(N_POSITIONS)[visible]
    squared = run.fall * distance**2.0
    worst = -np.inf
    for layers_beyond, cumulative in enumerate(rollouts(list(run.kernels))[1:]):
        steps = layers_beyond + 1
        scaled = np.log(cumulative[visible]) - log_paths(layers_beyond, distance)
        above = scaled + low / np.pi**2 * squared / steps - steps * upper
        below = steps * lower - high * squared - scaled
        worst = max(worst, float(above.max()), float(below.max()))
    return float(np.exp(worst))


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
    rollout = np.linalg.matrix_power(kernel, DEPTH)[-1]
    scaled = np.log(rollout) - log_paths(DEPTH - 1, distance)
    squared = fall * distance**2.0

    def spread(rate: float) -> float:
        return float(np.ptp(scaled + rate * squared))

    return float(np.exp(minimize_scalar(spread, bounds=(0.0, 20.0), method="bounded").fun))


def _peaks(pairs: int) -> tuple[int, float]:
    """Distances at which the rollout of DEPTH layers and the theorem's L(x) peak."""
    n_positions = GROWTH_LENGTHS[1]
    kernel, fall = constant_rope_kernel(n_positions, pairs)
    rollout = np.linalg.matrix_power(kernel, DEPTH)[-1, ::-1]
    # Stationary point of L(x) = log C(t + x, x) - x^2 fall under Stirling's approximation, as in the paper.
    predicted = brentq(lambda x: np.log((DEPTH - 1 + x) / x) - 2 * fall * x, 1e-6, 1e6)
    return int(np.argmax(rollout)), float(predicted)


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
        bounds = [_worst_excess(run) for run in runs]
        corrected = max(bounds) <= SLACK
        return Finding(
            value=max(printed),
            as_stated=corrected and max(printed) == 0,
            corrected=corrected,
            numbers={
                "share_outside_printed": max(printed),
                "excess_over_corrected_bounds": max(bounds),
                "condition": max(run.condition for run in runs),
                "least_exponential_factor": min(_exponential_factor(run) for run in runs),
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
        excess = max(_rollout_excess(run) for run in runs)
        least = least_squared_steps(N_POSITIONS - 1, DEPTH)
        spreads = [envelope_spread(n_positions, self.pairs) for n_positions in GROWTH_LENGTHS]
        growth = float(np.polyfit(np.log(GROWTH_LENGTHS), np.log(spreads), 1)[0])
        peak, predicted = _peaks(self.pairs)
        corrected = excess <= SLACK
        return Finding(
            value=growth,
            as_stated=corrected and least >= 0.5 and growth < STEADY,
            corrected=corrected,
            numbers={
                "layers": DEPTH,
                "shortest": GROWTH_LENGTHS[0],
                "longest": GROWTH_LENGTHS[-1],
                "largest_distance": GROWTH_LENGTHS[1] - 1,
                "excess_over_corrected_band": excess,
                "least_sum_of_squared_steps": least,
                "envelope_spread_shortest": spreads[0],
                "envelope_spread_longest": spreads[-1],
                "envelope_peak": predicted,
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
