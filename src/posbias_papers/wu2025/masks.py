"""Wu et al. 2025 (arXiv 2502.01951) on masks: lemmas A.1 and B.1, theorems 4.1-4.3, and masks as graphs.

Random attention-only networks stand for "bounded content"; every bound is evaluated with the instance's own epsilon,
its smallest admissible attention weight over all layers, for every layer, query and key. docs/theory, section 3.

Rollout mass ends on the centre nodes, whatever the mask. The mass outside a set of positions after any number of layers
is one vector pulled up through the kernels. If every block of N - 1 layers leaves at most a share c < 1 outside, the
mass outside falls geometrically to 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posbias.architecture import MASKS, Causal, Mask, Prefix, SlidingWindow
from posbias.errors import UsageError
from posbias.results.page import first_of
from posbias_papers.claims import CLAIMS, Claim, Finding, Verdict, claim_generator
from posbias_papers.kernels import (
    ROUNDING,
    Network,
    Run,
    centre_nodes,
    closed_positions,
    random_runs,
    reachable,
    rollouts,
    run_network,
    worst_ratio,
)

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


def instances(mask: Mask, generator: np.random.Generator, *, broken: bool, depth: int = DEPTH) -> list[Run]:
    """Attention-only networks under `mask`: three widths and weight norms, three draws each."""
    network = Network(mask.visible(N_POSITIONS), np.ones(depth), violation="weights" if broken else "none")
    return random_runs(network, generator, sizes=SETTINGS, draws=SEEDS)


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
        runs = instances(Causal(), generator, broken=broken)
        bounds = [np.exp(-2 * run.content_bound) / N_POSITIONS for run in runs]
        ratios = [run.smallest_entry / bound for run, bound in zip(runs, bounds, strict=True)]
        return Finding(
            value=min(ratios),
            as_stated=bool(min(ratios) * SLACK >= 1),
            numbers={"smallest_epsilon": min(run.smallest_entry for run in runs), "smallest_bound": min(bounds)},
            instances=len(runs),
        )


def bound_ratio(
    rolled: Float64[np.ndarray, "layers query key"],
    *,
    epsilon: float,
    first: int,
    offset: int | None = None,
    stride: int = 1,
) -> float:
    """Largest P_ij / (1 - (j - offset) eps)^(t / stride) for keys j >= first and 0-based layers t.

    Args:
        rolled: The cumulative attention after every layer.
        epsilon: The base of the bound: eps, or eps^M for a window.
        first: 0-based key that is bounded first.
        offset: first - 1 by default.
        stride: The exponent is t / stride.

    Returns:
        The smallest constant C with which the bound holds.
    """
    drains = np.arange(first, rolled.shape[-1]) - (first - 1 if offset is None else offset)
    log_base = np.log1p(-np.minimum(drains * epsilon, 1 - 1e-16)) / stride
    return worst_ratio(rolled[:, :, first:], np.arange(len(rolled))[:, None, None] * log_base)


def rates(run: Run, rolled: Float64[np.ndarray, "layers query key"]) -> tuple[Float64[np.ndarray, "n"], ...]:
    """Factor per layer of the last row, key by key; and the slowest geometric mean of diagonals among j ... N-1."""
    with np.errstate(divide="ignore"):
        # e^-600 stays a normal number, so the rate is read where the mass has not underflowed.
        half, whole = len(rolled) // 8, len(rolled) // 4
        rate = np.exp((np.log(rolled[whole, -1]) - np.log(rolled[half, -1])) / (whole - half))
        means = np.exp(np.log(np.diagonal(run.kernels, axis1=1, axis2=2))[half:whole].mean(axis=0))
    return rate, np.maximum.accumulate(means[::-1])[::-1]


def rest_outside(rolled: Float64[np.ndarray, "layers query key"], *, first: int) -> float:
    """Mass left outside the first positions after all layers."""
    return float(1 - rolled[-1, :, :first].sum(axis=1).min())


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
        runs = instances(Causal(), generator, broken=broken)
        rolled = [run.rolled for run in runs]
        # The proof's constant is C = 1 - eps.
        ratio = max(
            bound_ratio(each, epsilon=run.smallest_entry, first=1) / (1 - run.smallest_entry)
            for run, each in zip(runs, rolled, strict=True)
        )
        mass_left = max(rest_outside(each, first=1) for each in rolled)
        rate, diagonal = rates(runs[0], rolled[0])
        return Finding(
            value=ratio,
            as_stated=ratio <= SLACK and mass_left < LIMIT_REST,
            numbers={
                "layers": DEPTH,
                "mass_left": mass_left,
                "epsilon_min": min(run.smallest_entry for run in runs),
                "measured_rate_position_1": float(rate[1]),
                "diagonal_rate_position_1": float(diagonal[1]),
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
        runs = instances(SlidingWindow(WINDOW), generator, broken=broken)
        rolled = [run.rolled for run in runs]
        constant = max(
            bound_ratio(each, epsilon=run.smallest_entry**hops, first=1, stride=2 * hops)
            for run, each in zip(runs, rolled, strict=True)
        )
        mass_left = max(rest_outside(each, first=1) for each in rolled)
        (rate, diagonal), epsilon = rates(runs[0], rolled[0]), runs[0].smallest_entry
        base = -np.expm1(np.log1p(-min(epsilon**hops, 0.5)) / (2 * hops))
        return Finding(
            value=constant,
            as_stated=constant < 1 and mass_left < LIMIT_REST,
            numbers={
                "layers": DEPTH,
                "mass_left": mass_left,
                "bound_fall_per_layer": float(base),
                "bound_halving_layers": float(np.log(2) / max(base, 1e-300)),
                "measured_rate_position_1": float(rate[1]),
                "diagonal_rate_position_1": float(diagonal[1]),
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
        runs = instances(SlidingWindow(WINDOW), generator, broken=broken, depth=8 * hops)
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
        runs = instances(Prefix(PREFIX), generator, broken=broken)
        ratios, sharp, shares, floors, rests = [], [], [], [], []
        for run in runs:
            rolled, epsilon = run.rolled, run.smallest_entry
            ratios.append(bound_ratio(rolled, epsilon=epsilon, first=PREFIX) / (1 - epsilon))
            sharp.append(bound_ratio(rolled, epsilon=epsilon, first=PREFIX, offset=0) / (1 - epsilon))
            shares.append(float(rolled[-1, -1, :PREFIX].min()))
            rests.append(rest_outside(rolled, first=PREFIX))
            # kappa from the proof: the worst ratio of two prefix entries of the first layer, over K.
            prefix = run.kernels[0][:, :PREFIX]
            floors.append(float((prefix.min(axis=1) / prefix.max(axis=1)).min()) / PREFIX * (1 - rests[-1]))
        mass_left = max(rests)
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


LARGEST_MASK = 256
"""Positions of a user's mask: the attention of 512 layers is then 270 MB."""


def example_masks(generator: np.random.Generator) -> Iterator[Bool[np.ndarray, "n n"]]:
    """Masks with a centre: the three of the paper, a chain turned round, and random graphs."""
    for mask in (Causal(), SlidingWindow(WINDOW), Prefix(PREFIX)):
        yield mask.visible(N_POSITIONS)
    yield Causal().visible(N_POSITIONS).T
    drawn_masks = 0
    while drawn_masks < SEEDS:
        visible = (generator.random((N_POSITIONS, N_POSITIONS)) < 0.12) | np.eye(N_POSITIONS, dtype=bool)
        centres = centre_nodes(visible)
        if 0 < len(centres) < N_POSITIONS:
            drawn_masks += 1
            yield visible


@CLAIMS.register("wu2025/centre-nodes")
@dataclass(frozen=True, eq=False)
class CentreNodes(Claim):
    """Any mask as a graph: the centre nodes take everything."""

    visible: Bool[np.ndarray, "query key"] | None = None
    """The mask to examine; None takes the paper's masks and random graphs."""

    source = "Definition 3.1 and the discussion after theorem 4.3"
    statement = "Any mask: rollout mass converges onto the centre nodes, the positions that every query can reach."
    assumptions = (BOUNDED, VALUES, "attention only: no residual connections", "the mask has a centre node")
    broken_by = "the mask has no centre node: two groups of positions that never look at each other"
    computed = "share outside the centre nodes that any N-1 layers leave, at most ({subject})"
    sharper = (
        "with or without a centre the mass ends in the closed groups of the graph: factor "
        "{factor_outside_closed_groups:.4f} per N-1 layers; a centre node exists where there is one such group"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Share that N - 1 successive layers leave outside the centre nodes: largest of masks, draws, blocks, queries.

        A factor below 1 for every block means that the mass outside falls geometrically to 0.
        """
        masks = [self.visible] if self.visible is not None else list(example_masks(generator))
        if broken:
            sides = [np.arange(len(mask)) < len(mask) // 2 for mask in masks]
            masks = [
                (mask & (side[:, None] == side)) | np.eye(len(mask), dtype=bool)
                for mask, side in zip(masks, sides, strict=True)
            ]
        factors, closed_factors, left = [], [], []
        for visible in masks:
            depth = max(64, 2 * len(visible))
            for width, weight_bound in SETTINGS:
                run = run_network(Network(visible, np.ones(depth), width=width, weight_bound=weight_bound), generator)
                left.append(float(outside_trail(run.kernels, centre_nodes(visible))[-1]))
                factors.append(_block_factor(run.kernels, centre_nodes(visible)))
                closed_factors.append(_block_factor(run.kernels, closed_positions(visible)))
        centres = centre_nodes(masks[0]).tolist()
        subject = f"{len(masks)} masks" if len(masks) > 1 else f"centre nodes: {first_of(centres) or 'none'}"
        return Finding(
            value=max(factors),
            as_stated=max(factors) < 1 - ROUNDING,
            numbers={
                "masks": len(masks),
                "mass_left_most": max(left),
                "factor_outside_closed_groups": max(closed_factors),
                "centres_of_first_mask": centres,
            },
            instances=len(left),
            words={"subject": subject},
        )


def verify_mask(visible: Bool[np.ndarray, "query key"], *, seed: int = 0) -> Verdict:
    """Put the claim on centre nodes to the test on one mask, with random bounded content.

    Args:
        visible: visible[i, j] is true where query i may attend to key j; 2 to 256 positions.
        seed: Seed of the content.

    Raises:
        UsageError: not square, too large or too small, or a query that sees no key.
    """
    if not 2 <= len(visible) <= LARGEST_MASK:
        raise UsageError(f"a mask to verify needs 2 to {LARGEST_MASK} positions, got {len(visible)}")
    reachable(visible)
    return CentreNodes(visible).check(claim_generator(CentreNodes.name, seed))


def spelled_mask(text: str, n_positions: int) -> Bool[np.ndarray, "query key"]:
    """A mask from its literal spelling at `n_positions`.

    Raises:
        UsageError: an unknown mask, or a length out of range.
    """
    if not 2 <= n_positions <= LARGEST_MASK:
        raise UsageError(f"--mask {text!r} needs --length 2 to {LARGEST_MASK}, got {n_positions}")
    return np.asarray(MASKS.parse(text).visible(n_positions))


def outside_trail(
    kernels: Float64[np.ndarray, "layers n n"], nodes: Int64[np.ndarray, "k"]
) -> Float64[np.ndarray, "layers_plus_1"]:
    """Rollout mass outside `nodes` after 0, 1, 2 ... layers, for the query that has most left."""
    outside = np.ones(kernels.shape[1])
    outside[nodes] = 0.0
    trail = [outside.max()]
    for kernel in kernels:
        outside = kernel @ outside
        trail.append(outside.max())
    return np.array(trail)


def _block_factor(kernels: Float64[np.ndarray, "layers n n"], nodes: Int64[np.ndarray, "k"]) -> float:
    """Largest mass outside `nodes` after any N - 1 successive layers."""
    block = max(1, kernels.shape[1] - 1)
    return max(
        float(outside_trail(kernels[start : start + block], nodes)[-1])
        for start in range(0, len(kernels) - block + 1, block)
    )
