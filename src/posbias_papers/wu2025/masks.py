"""Wu et al. 2025 (arXiv 2502.01951) on masks: lemmas A.1 and B.1, theorems 4.1-4.3.

Random attention-only networks stand for "bounded content"; every bound is evaluated with the instance's own epsilon,
its smallest admissible attention weight over all layers, for every layer, query and key. docs/theory, section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal, Mask, Prefix, SlidingWindow
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import Network, Run, rollouts, run_network, worst_ratio

BOUNDED = "A1: bounded query and key weights"
VALUES = "A2: bounded products of value maps"
WEIGHTS_GROW = "A1 violated: query and key weights grow with depth, so the smallest attention weight goes to 0"

N_POSITIONS = 13
WINDOW = 4
PREFIX = 3
DEPTH = 256
"""Layers: enough for the slowest instance to reach its limit."""
SETTINGS = ((4, 0.5), (8, 1.0), (32, 1.5))
"""Width d and norm of W_Q, W_K."""
SEEDS = 3
SLACK = 1 + 1e-9
"""Relative room for rounding where a bound is attained exactly."""
LIMIT_REST = 1e-3
"""A mass counts as gone when less than this is left after all layers."""


def instances(mask: Mask, generator: np.random.Generator, *, broken: bool, depth: int = DEPTH) -> Iterator[Run]:
    """Attention-only networks under `mask`: three widths and weight norms, three draws each."""
    for width, weight_bound in SETTINGS:
        for _ in range(SEEDS):
            yield run_network(
                Network(
                    visible=mask.visible(N_POSITIONS),
                    mixing=np.ones(depth),
                    width=width,
                    weight_bound=weight_bound,
                    violation="weights" if broken else "none",
                ),
                generator,
            )


@CLAIMS.register("wu2025/lemma-A.1")
class EntriesBoundedBelow(Claim):
    """The smallest attention weight against exp(-2 C^2 R^2) / N."""

    source = "Lemma A.1, appendix A"
    statement = "Every admissible attention weight of every layer stays above one positive epsilon."
    assumptions = (BOUNDED, VALUES)
    broken_by = WEIGHTS_GROW
    computed = "smallest attention weight over exp(-2 C^2 R^2)/N, least over instances (at least 1 if it holds)"
    sharper = "epsilon = exp(-2 C^2 R^2)/N with C the bound of A1 and R the largest state that A2 allows"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Smallest entry over all layers, divided by the bound from the promised constants."""
        runs = list(instances(Causal(), generator, broken=broken))
        bounds = [np.exp(-2 * run.content_bound) / N_POSITIONS for run in runs]
        ratios = [run.smallest_entry / bound for run, bound in zip(runs, bounds, strict=True)]
        return Finding(
            value=min(ratios),
            as_stated=bool(min(ratios) * SLACK >= 1),
            numbers={"smallest_epsilon": min(run.smallest_entry for run in runs), "smallest_bound": min(bounds)},
            instances=len(runs),
        )


@dataclass(frozen=True, eq=False)
class Decay:
    """How one instance's rollout compares with a bound C (1 - (j - free) eps)^(t / stride) at 0-based layer t."""

    ratio: float
    """Largest P_ij / (1 - (j - free) eps)^(t/stride): the smallest constant C that works."""
    rest: float
    """Mass left outside the first `free + 1` positions after all layers."""
    rate: Float64[np.ndarray, "n"]
    """Measured factor per layer of the last row, key by key."""
    diagonal: Float64[np.ndarray, "n"]
    """Slowest geometric mean of a diagonal entry among positions j ... N-1."""
    last: Float64[np.ndarray, "layers n"]


def decay_of(run: Run, *, epsilon: float, offset: int, stride: int = 1) -> Decay:
    """Compare the cumulative attention of an instance with the bound, for all layers, queries and keys.

    Args:
        run: The instance.
        epsilon: The base of the bound: eps, or eps^M for a window.
        offset: 0-based key j has the bound 1 - (j - offset) eps; keys up to `offset` have none.
        stride: The exponent is t / stride.
    """
    cumulative = rollouts(list(run.kernels))[1:]
    keys = np.arange(N_POSITIONS)
    bounded = keys > offset
    log_base = np.log1p(-np.minimum((keys[bounded] - offset) * epsilon, 1 - 1e-16)) / stride
    layers = np.arange(len(cumulative))
    with np.errstate(divide="ignore"):
        # e^-600 stays a normal number, so the rate is read where the mass has not underflowed.
        half, whole = len(cumulative) // 8, len(cumulative) // 4
        rate = np.exp((np.log(cumulative[whole, -1]) - np.log(cumulative[half, -1])) / (whole - half))
        means = np.exp(np.log(np.diagonal(run.kernels, axis1=1, axis2=2))[half:whole].mean(axis=0))
    return Decay(
        ratio=worst_ratio(cumulative[:, :, bounded], layers[:, None, None] * log_base),
        rest=float(1 - cumulative[-1, :, ~bounded].sum(axis=0).min()),
        rate=rate,
        diagonal=np.maximum.accumulate(means[::-1])[::-1],
        last=cumulative[:, -1],
    )


@CLAIMS.register("wu2025/theorem-4.1")
class CausalCollapse(Claim):
    """Collapse onto the first token, with its rate."""

    source = "Theorem 4.1, section 4.1"
    statement = "Causal attention alone: all rollout mass goes to position 0; position j keeps <= C (1 - j eps)^t."
    assumptions = (BOUNDED, VALUES, "attention only: no residual connections")
    broken_by = WEIGHTS_GROW
    computed = "largest rollout/bound over layers, queries, keys (<= 1); mass left after {layers:.0f}: {mass_left:.1e}"
    sharper = (
        "the rate is the slowest diagonal entry among positions j ... i, prod_l A_l[j,j] where diagonals fall with j: "
        "at position 1 measured {measured_rate_position_1:.4f} per layer, diagonal {diagonal_rate_position_1:.4f}, "
        "bound {bound_rate_position_1:.4f}; uniform attention has (1/(j+1))^t"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The bound with C = 1 - eps, as in the proof, and the mass left outside position 0."""
        runs = list(instances(Causal(), generator, broken=broken))
        decays = [decay_of(run, epsilon=run.smallest_entry, offset=0) for run in runs]
        # The proof's constant is C = 1 - eps.
        ratios = [decay.ratio / (1 - run.smallest_entry) for run, decay in zip(runs, decays, strict=True)]
        mass_left = max(decay.rest for decay in decays)
        return Finding(
            value=max(ratios),
            as_stated=max(ratios) <= SLACK and mass_left < LIMIT_REST,
            numbers={
                "layers": DEPTH,
                "mass_left": mass_left,
                "epsilon_min": min(run.smallest_entry for run in runs),
                "measured_rate_position_1": float(decays[0].rate[1]),
                "diagonal_rate_position_1": float(decays[0].diagonal[1]),
                "bound_rate_position_1": 1 - runs[0].smallest_entry,
            },
            instances=len(runs),
        )


@CLAIMS.register("wu2025/theorem-4.2")
class WindowCollapse(Claim):
    """Collapse under a sliding window."""

    source = "Theorem 4.2, section 4.1"
    statement = "Sliding window w: still all mass goes to 0; <= C (1 - j eps^M)^(t/2M), M = ceil((N-1)/(w-1)), C < 1."
    assumptions = (BOUNDED, VALUES, "attention only: no residual connections", "window of at least 2 positions")
    broken_by = WEIGHTS_GROW
    computed = "smallest constant C that works (must be < 1), mass left after {layers:.0f} layers {mass_left:.1e}"
    sharper = (
        "diagonals set the rate here too: {measured_rate_position_1:.3f} per layer at position 1, where the bound "
        "gives 1 - {bound_fall_per_layer:.1e}, that is {bound_halving_layers:.1e} layers to halve"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The smallest C that works, and the mass left outside position 0."""
        hops = -(-(N_POSITIONS - 1) // (WINDOW - 1))
        runs = list(instances(SlidingWindow(WINDOW), generator, broken=broken))
        decays = [decay_of(run, epsilon=run.smallest_entry**hops, offset=0, stride=2 * hops) for run in runs]
        constant, mass_left = max(decay.ratio for decay in decays), max(decay.rest for decay in decays)
        first, epsilon = decays[0], runs[0].smallest_entry
        base = -np.expm1(np.log1p(-min(epsilon**hops, 0.5)) / (2 * hops))
        return Finding(
            value=constant,
            as_stated=constant < 1 and mass_left < LIMIT_REST,
            numbers={
                "layers": DEPTH,
                "mass_left": mass_left,
                "bound_fall_per_layer": float(base),
                "bound_halving_layers": float(np.log(2) / max(base, 1e-300)),
                "measured_rate_position_1": float(first.rate[1]),
                "diagonal_rate_position_1": float(first.diagonal[1]),
            },
            instances=len(runs),
        )


@CLAIMS.register("wu2025/lemma-B.1")
class WindowReachesEverything(Claim):
    """Enough windowed layers see the whole past."""

    source = "Lemma B.1, appendix B"
    statement = "Any (N-1)/(w-1) successive windowed layers together give every earlier key at least a fixed c > 0."
    assumptions = (BOUNDED, VALUES, "window of at least 2 positions")
    broken_by = WEIGHTS_GROW
    computed = (
        "smallest entry of {layers:.0f} successive layers over eps^{layers:.0f}, least over instances (at least 1)"
    )
    sharper = (
        "(N-1)/(w-1) = {layers:.0f} layers are needed: with the N/w = {N_over_w:.0f} layers that the proof writes in "
        "places the smallest entry is {with_N_over_w_layers:.0g}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Smallest entry of every block of M layers over eps^M with A.1's promised epsilon."""
        hops = -(-(N_POSITIONS - 1) // (WINDOW - 1))
        fewer = N_POSITIONS // WINDOW
        causal = np.tril(np.ones((N_POSITIONS, N_POSITIONS), dtype=bool))
        runs = list(instances(SlidingWindow(WINDOW), generator, broken=broken, depth=8 * hops))
        lowest, bounds, short = [], [], []
        for run in runs:
            kernels = list(run.kernels)
            blocks = [rollouts(kernels[start : start + hops])[-1] for start in range(len(kernels) - hops + 1)]
            lowest.append([float(block[causal].min()) for block in blocks])
            bounds.append(float((np.exp(-2 * run.content_bound) / WINDOW) ** hops))
            short.append(float(rollouts(kernels[:fewer])[-1][causal].min()))
        ratio = min(min(entries) / bound for entries, bound in zip(lowest, bounds, strict=True))
        return Finding(
            value=ratio,
            as_stated=ratio * SLACK >= 1,
            numbers={
                "layers": hops,
                "N_over_w": fewer,
                "smallest_entry": min(min(entries) for entries in lowest),
                "with_N_over_w_layers": max(short),
            },
            instances=len(runs),
        )


@CLAIMS.register("wu2025/theorem-4.3")
class PrefixCollapse(Claim):
    """Collapse onto the prefix, each of whose tokens keeps a share."""

    source = "Theorem 4.3, section 4.1"
    statement = "Prefix of K: all mass goes to the prefix, each token of it keeps kappa > 0; j: <= C (1-(j-K+1) eps)^t."
    assumptions = (BOUNDED, VALUES, "attention only: no residual connections")
    broken_by = WEIGHTS_GROW
    computed = "largest rollout/bound (<= 1); outside the prefix {mass_left:.1e}, least share {least_share:.3f}"
    sharper = (
        "(1 - j eps)^t holds as well (largest ratio {sharper_ratio:.3f}): all j earlier keys drain position j, not "
        "j-K+1; kappa = min_l,k,k' A_0[l,k]/(K A_0[l,k'])"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Bound with C = 1 - eps, mass outside the prefix, and the smallest share against its explicit kappa."""
        runs = list(instances(Prefix(PREFIX), generator, broken=broken))
        decays = [decay_of(run, epsilon=run.smallest_entry, offset=PREFIX - 1) for run in runs]
        ratios = [decay.ratio / (1 - run.smallest_entry) for run, decay in zip(runs, decays, strict=True)]
        mass_left = max(decay.rest for decay in decays)
        shares = [float(decay.last[-1, :PREFIX].min()) for decay in decays]
        # kappa from the proof: the worst ratio of two prefix entries of the first layer, over K.
        prefixes = [run.kernels[0][:, :PREFIX] for run in runs]
        kappas = [float((prefix.min(axis=1) / prefix.max(axis=1)).min()) / PREFIX for prefix in prefixes]
        floors = [kappa * (1 - decay.rest) for kappa, decay in zip(kappas, decays, strict=True)]
        sharp = [_sharper_prefix(run) for run in runs]
        least_ratio = min(share / floor if floor > 0 else 0.0 for share, floor in zip(shares, floors, strict=True))
        return Finding(
            value=max(ratios),
            as_stated=max(ratios) <= SLACK and mass_left < LIMIT_REST and least_ratio * SLACK >= 1,
            numbers={
                "mass_left": mass_left,
                "least_share": min(shares),
                "share_over_explicit_kappa": least_ratio,
                "sharper_ratio": max(sharp),
            },
            instances=len(runs),
        )


def _sharper_prefix(run: Run) -> float:
    """Largest P_ij over (1 - eps)(1 - j eps)^t for 0-based j >= K."""
    cumulative = rollouts(list(run.kernels))[1:]
    keys = np.arange(PREFIX, N_POSITIONS)
    epsilon = run.smallest_entry
    log_bound = np.log1p(-epsilon) + np.arange(len(cumulative))[:, None] * np.log1p(-keys * epsilon)
    return worst_ratio(cumulative[:, :, PREFIX:], log_bound[:, None, :])
