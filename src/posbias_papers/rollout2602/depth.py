"""The residual paper (arXiv 2602.16837) at infinite depth: lemma 5.4 and both branches of theorem 5.5.

States follow X <- (1 - m_l) X + m_l A_l X W_V with random bounded weights, ALiBi or no positional logits; every bound
uses the instance's own epsilon. Kernels are lower triangular, so R_ii = prod_l (1 - m_l + m_l A_l[i,i]) exactly.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal, PowerDecay
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import Network, Run, Violation, rollouts, run_network, transitions, worst_ratio
from posbias_papers.wu2025.decay import decay_logits
from posbias_papers.wu2025.masks import LIMIT_REST, SETTINGS, SLACK

BOUNDED = "Assumption 5.1: bounded query and key weights"
VALUES = "Assumption 5.2: summable excess norm of the value maps"
BIAS = "Assumption 5.3: bounded range of positional logits within a row"
WEIGHTS_GROW = "Assumption 5.1 violated: query and key weights grow with depth, so attention closes on the diagonal"

N_POSITIONS = 12
DEPTH = 400
SLOPES = (0.0, 0.1)
"""ALiBi slopes: range of positional logits 0 and 1.1."""
SEEDS = 2


def residual_runs(
    mixing: Float64[np.ndarray, "layers"], generator: np.random.Generator, *, violation: Violation = "none"
) -> list[tuple[float, Run]]:
    """Random residual networks with the given mixing: widths, norms, slopes and draws. Each with its slope."""
    runs = []
    for width, weight_bound in SETTINGS:
        for slope in SLOPES:
            network = Network(
                visible=Causal().visible(N_POSITIONS),
                mixing=mixing,
                width=width,
                weight_bound=weight_bound,
                bias=decay_logits(N_POSITIONS, slope),
                violation=violation,
            )
            runs += [(slope, run_network(network, generator)) for _ in range(SEEDS)]
    return runs


@CLAIMS.register("rollout-2602.16837/lemma-5.4")
class StatesStayBounded(Claim):
    """Bounded states and attention bounded below, at any depth."""

    source = "Lemma 5.4, section 5"
    statement = "States stay below R exp(sum of excess), and every admissible weight above exp(-2 C^2 R^2 - B)/N."
    assumptions = (BOUNDED, VALUES, BIAS)
    broken_by = "Assumption 5.2 violated: every value map has norm 1.5, so the excess is not summable"
    computed = "largest of state/bound and bound/attention weight over layers and instances (<= 1 if it holds)"
    sharper = "the bound is R = R_0 exp(sum m_l e_l), e_l the excess of a value map's norm over 1"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Largest state over its bound, and bound over smallest attention weight, the larger of the two."""
        mixing = np.full(DEPTH, 0.3)
        runs = residual_runs(mixing, generator, violation="values" if broken else "none")
        states = [run.largest_state / run.state_bound for _, run in runs]
        bounds = [np.exp(-2 * run.content_bound - slope * (N_POSITIONS - 1)) / N_POSITIONS for slope, run in runs]
        with np.errstate(divide="ignore"):
            weights = [
                float(np.divide(bound, run.smallest_entry)) for bound, (_, run) in zip(bounds, runs, strict=True)
            ]
        return Finding(
            value=max(*states, *weights),
            as_stated=max(*states, *weights) <= SLACK,
            numbers={
                "state_over_bound": max(states),
                "bound_over_weight": max(weights),
                "smallest_epsilon": min(run.smallest_entry for _, run in runs),
            },
            instances=len(runs),
        )


@dataclass(frozen=True, eq=False)
class Trail:
    """The rollout of a residual network, layer by layer."""

    diagonal: Float64[np.ndarray, "layers n"]
    """R_ii."""
    column: Float64[np.ndarray, "layers n"]
    """Largest R_ij over queries i, for every key j."""
    outside: Float64[np.ndarray, "layers"]
    """Mass outside position 0, of the query that has most."""


def trail_of(kernels: Float64[np.ndarray, "layers n n"], mixing: Float64[np.ndarray, "layers"]) -> Trail:
    """Roll out T_l = (1 - m_l) I + m_l A_l and keep what the theorem speaks of."""
    rolled = rollouts(transitions(list(kernels), mixing))[1:]
    return Trail(
        diagonal=np.diagonal(rolled, axis1=1, axis2=2),
        column=rolled.max(axis=1),
        outside=rolled[:, :, 1:].sum(axis=2).max(axis=1),
    )


@CLAIMS.register("rollout-2602.16837/theorem-5.5-finite")
class NoCollapse(Claim):
    """Finite total mixing keeps the diagonal."""

    source = "Theorem 5.5 (i), section 5"
    statement = "If sum m_l is finite, R_ii stays above prod_l (1 - m_l) > 0: no collapse onto the first token."
    assumptions = (BOUNDED, VALUES, BIAS, "finite total mixing")
    broken_by = "the mixing is not summable: 0.3 in every layer"
    computed = (
        "prod (1 - m_l) over {layers:.0f} layers (positive); least R_ii over it is {smallest_ratio:.3f} (at least 1)"
    )
    sharper = (
        "exactly R_ii = prod_l (1 - m_l + m_l A_l[i,i]) (relative error {exact_product_relative_error:.0e}), which "
        "stays positive even where some m_l = 1 makes the printed product 0"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Smallest R_ii over the product, and the product itself; m_l = 0.5 / (l+1)^2."""
        mixing = np.full(DEPTH, 0.3) if broken else PowerDecay(start=0.5, exponent=2.0).per_layer(DEPTH)
        products = np.cumprod(1 - mixing)
        runs = residual_runs(mixing, generator)
        trails = [trail_of(run.kernels, mixing) for _, run in runs]
        ratio = min(float((trail.diagonal / products[:, None]).min()) for trail in trails)
        exact = max(
            float(np.abs(trail.diagonal / _diagonal_product(run.kernels, mixing) - 1).max())
            for trail, (_, run) in zip(trails, runs, strict=True)
        )
        return Finding(
            value=float(products[-1]),
            as_stated=bool(ratio * SLACK >= 1 and products[-1] > LIMIT_REST),
            numbers={
                "layers": DEPTH,
                "product": float(products[-1]),
                "smallest_diagonal": min(float(trail.diagonal[-1].min()) for trail in trails),
                "smallest_ratio": ratio,
                "exact_product_relative_error": exact,
            },
            instances=len(runs),
        )


def _diagonal_product(
    kernels: Float64[np.ndarray, "layers n n"], mixing: Float64[np.ndarray, "layers"]
) -> Float64[np.ndarray, "layers n"]:
    """prod_l (1 - m_l + m_l A_l[i,i]) after every layer."""
    diagonal = np.diagonal(kernels, axis1=1, axis2=2)
    product: Float64[np.ndarray, "layers n"] = np.cumprod(1 - mixing[:, None] * (1 - diagonal), axis=0)
    return product


@CLAIMS.register("rollout-2602.16837/theorem-5.5-infinite")
class Collapse(Claim):
    """Infinite total mixing collapses, with a rate."""

    source = "Theorem 5.5 (ii), section 5"
    statement = "If sum m_l is infinite, R_i0 -> 1, and R_ij <= prod_l (1 - eps m_l) <= exp(-eps sum m_l) for j > 0."
    assumptions = (BOUNDED, VALUES, BIAS, "infinite total mixing")
    broken_by = WEIGHTS_GROW
    computed = "mass outside position 0 after {layers:.0f} layers, mixing 0.3; largest R_ij/bound {largest_ratio:.3f}"
    sharper = (
        "prod_l (1 - j eps m_l) holds too (largest ratio {sharper_ratio:.3f}): j keys drain position j; the rate is "
        "the diagonals' prod_l (1 - m_l (1 - A_l[j,j])); under harmonic mixing {mass_left_harmonic:.2f} is still "
        "outside after {layers:.0f} layers"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Both bounds for constant mixing 0.3 and harmonic mixing 0.5/(l+1); the limit for the constant one."""
        violation: Violation = "weights" if broken else "none"
        schedules = {"constant": np.full(DEPTH, 0.3), "harmonic": PowerDecay(0.5, 1.0).per_layer(DEPTH)}
        ratios, sharp, rests = [], [], {}
        for name, mixing in schedules.items():
            runs = residual_runs(mixing, generator, violation=violation)
            rolled = [trail_of(run.kernels, mixing) for _, run in runs]
            rests[name] = max(float(trail.outside[-1]) for trail in rolled)
            for trail, (_, run) in zip(rolled, runs, strict=True):
                ratios.append(_excess(trail, mixing, run.smallest_entry, np.ones(N_POSITIONS - 1)))
                sharp.append(_excess(trail, mixing, run.smallest_entry, np.arange(1.0, N_POSITIONS)))
        return Finding(
            value=rests["constant"],
            as_stated=max(ratios) <= SLACK and rests["constant"] < LIMIT_REST,
            numbers={
                "layers": DEPTH,
                "largest_ratio": max(ratios),
                "sharper_ratio": max(sharp),
                "mass_left_constant": rests["constant"],
                "mass_left_harmonic": rests["harmonic"],
            },
            instances=len(ratios),
        )


def _excess(
    trail: Trail,
    mixing: Float64[np.ndarray, "layers"],
    epsilon: float,
    drains: Float64[np.ndarray, "others"],
) -> float:
    """Largest R_ij over prod_l (1 - drains_j eps m_l), j > 0, over layers."""
    log_bound = np.cumsum(np.log1p(-mixing[:, None] * epsilon * drains), axis=0)
    return worst_ratio(trail.column[:, 1:], log_bound)
