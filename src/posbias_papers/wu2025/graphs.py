"""Wu et al. 2025 (arXiv 2502.01951) on masks as graphs: rollout mass ends on the centre nodes, whatever the mask.

The mass outside a set of positions after any number of layers is one vector pulled up through the kernels. If every
block of N - 1 layers leaves at most a share c < 1 outside, the mass outside falls geometrically to 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posbias.architecture import MASKS, Causal, Prefix, SlidingWindow
from posbias.errors import UsageError
from posbias_papers.claims import CLAIMS, Claim, Finding, Verdict, claim_generator, listed
from posbias_papers.kernels import (
    ROUNDING,
    Network,
    centre_nodes,
    closed_positions,
    reachable,
    run_network,
)
from posbias_papers.wu2025.masks import BOUNDED, N_POSITIONS, PREFIX, SEEDS, SETTINGS, VALUES, WINDOW

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
            masks = [_two_groups(mask) for mask in masks]
        factors, closed_factors, left = [], [], []
        for visible in masks:
            depth = max(64, 2 * len(visible))
            for width, weight_bound in SETTINGS:
                run = run_network(Network(visible, np.ones(depth), width=width, weight_bound=weight_bound), generator)
                left.append(float(outside_trail(run.kernels, centre_nodes(visible))[-1]))
                factors.append(_block_factor(run.kernels, centre_nodes(visible)))
                closed_factors.append(_block_factor(run.kernels, closed_positions(visible)))
        centres = centre_nodes(masks[0]).tolist()
        subject = f"{len(masks)} masks" if len(masks) > 1 else f"centre nodes: {listed(centres) or 'none'}"
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
        UsageError: an unknown mask, a file, or a length out of range.
    """
    if text.endswith((".npy", ".csv", ".txt")):
        raise UsageError(
            f"--mask takes a spelling such as prefix(length=4), got the file {text!r}; for a matrix of your own: "
            "posbias_papers.verify_mask(numpy.load('mask.npy').astype(bool)).as_text()"
        )
    if not 2 <= n_positions <= LARGEST_MASK:
        raise UsageError(f"--mask {text!r} needs --length 2 to {LARGEST_MASK}, got {n_positions}")
    return np.asarray(MASKS.parse(text).visible(n_positions))


def _two_groups(visible: Bool[np.ndarray, "n n"]) -> Bool[np.ndarray, "n n"]:
    """The mask cut into two halves that do not see each other; every query keeps itself."""
    side = np.arange(len(visible)) < len(visible) // 2
    cut: Bool[np.ndarray, "n n"] = (visible & (side[:, None] == side[None, :])) | np.eye(len(visible), dtype=bool)
    return cut


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
