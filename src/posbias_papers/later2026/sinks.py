"""What a sink does to perturbations (arXiv 2504.02732) and to gradients (arXiv 2603.17771), with its mass planted.

Rows give a share s of their attention to position 0 and spread the rest evenly, A = s e_0 + (1 - s) C. With random
value maps W per layer, y = x + W A x moves the products of changes at two positions by K <- K + A K A'; gradients of
unrelated queries meet at position 0 with energy sum_i A_i0^2, which is 1 + (N - 1) s^2 and more.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal
from posbias.statistics import mean_of
from posbias_papers.claims import Claim, curves
from posbias_papers.kernels import even_kernel
from posbias_papers.pages.verify import CLAIMS, Finding

SHARES = (0.0, 0.3, 0.6, 0.9)
N_POSITIONS, WIDTH, DEPTH = 64, 32, 6
NETWORKS = 40
PERTURBED = 20
"""Position whose vector changes, unless it is the sink's own."""
LENGTHS = (64, 256, 1024)
STRONG = 0.9
"""Share of the sink whose gradients are looked at."""
CONCENTRATED = 0.5
"""Share of all energy from which a position counts as a gradient sink; causal attention without one gives a third."""


def planted(n_positions: int, share: float, *, sink: bool = True) -> Float64[np.ndarray, "query key"]:
    """Attention with a share on position 0, or on no position (a learned sink), and the rest even."""
    attention = (1 - share) * even_kernel(Causal().visible(n_positions))
    attention[:, 0] += share * sink
    return np.asarray(attention)


def spread(
    generator: np.random.Generator, attention: Float64[np.ndarray, "query key"], position: int
) -> Float64[np.ndarray, "networks"]:
    """Size of the change at all other positions after random layers, over that of the change made at one."""
    changed = np.zeros((NETWORKS, N_POSITIONS, WIDTH))
    changed[:, position] = generator.standard_normal((NETWORKS, WIDTH))
    made = np.linalg.norm(changed[:, position], axis=-1)
    for _ in range(DEPTH):
        values = generator.standard_normal((NETWORKS, WIDTH, WIDTH)) / np.sqrt(WIDTH)
        changed = changed + attention @ changed @ values
    changed[:, position] = 0
    return np.asarray(np.sqrt(np.square(changed).sum(axis=(1, 2))) / made)


def mean_spread(attention: Float64[np.ndarray, "query key"], position: int) -> float:
    """Root mean square of `spread`, K <- K + A K A' from a change of size 1."""
    kernel = np.zeros((N_POSITIONS, N_POSITIONS))
    kernel[position, position] = 1.0
    for _ in range(DEPTH):
        kernel = kernel + attention @ kernel @ attention.T
    return float(np.sqrt(np.trace(kernel) - kernel[position, position]))


@CLAIMS.register("sinks-2504.02732/perturbations")
class SlowerPerturbations(Claim):
    """A token's change reaches others less if they attend to the first."""

    paper = "Why do LLMs attend to the first token?, arXiv 2504.02732v4"
    source = "abstract and summaries (their bounds and trained models were not at hand: planted sinks, random values)"
    statement = "The more attention goes to the first token, the less a perturbation of another token spreads."
    assumptions = ("the perturbed token is not the sink", "attention does not change with the perturbation")
    broken_by = "the first token itself is perturbed"
    computed = (
        "change of all others over the change made after {depth:.0f} layers, share 0.9 over none (95 % {low:.3f} to "
        "{high:.3f}); at shares 0, 0.3, 0.6, 0.9: {spread_0:.2f}, {spread_1:.2f}, {spread_2:.2f}, {spread_3:.2f}"
    )
    sharper = "K <- K + A K A' gives the root mean square over value maps within {formula_error:.3f} at every share"

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The spread over random value maps at every share."""
        position = 0 if broken else PERTURBED
        attention = [planted(N_POSITIONS, share) for share in SHARES]
        spreads = np.stack([spread(generator, rows, position) for rows in attention])
        formula = np.array([mean_spread(rows, position) for rows in attention])
        sizes = [mean_of(row).interval(least=0.0) for row in spreads]
        ratio = mean_of(spreads[-1] / spreads[0].mean()).interval(least=0.0)
        errors = np.abs(np.sqrt(np.square(spreads).mean(axis=1)) / formula - 1)
        return Finding(
            value=ratio.value,
            as_stated=all(more.high < less.low for less, more in pairwise(sizes)),
            figure=curves(
                "share of attention on the first token",
                "change of all other positions",
                SHARES,
                {"random value maps": spreads.mean(axis=1), "K + A K A'": formula},
            ),
            numbers={
                "depth": DEPTH,
                "low": ratio.low,
                "high": ratio.high,
                "formula_error": float(errors.max()),
                **{f"spread_{index}": size.value for index, size in enumerate(sizes)},
            },
            instances=NETWORKS * len(SHARES),
        )


@CLAIMS.register("sinks-2603.17771/gradients")
class GradientSinks(Claim):
    """Gradients along values gather at the position that attention gathers at."""

    paper = "Attention Sinks Induce Gradient Sinks, arXiv 2603.17771v2"
    source = "abstract (its theorems and the training with V-scale were not at hand: one layer, value path)"
    statement = "Under a causal mask, a position that attracts attention gathers gradients on the value path."
    assumptions = ("the sink is a position", "queries' gradients are unrelated")
    broken_by = "the same share goes to a learned sink, which is no position"
    computed = (
        "first position's share of the gradients' energy, {longest:.0f} positions, 0.9 of attention on it (95 % "
        "{low:.4f} to {high:.4f}; {shortest:.0f} positions: {short:.4f}); even attention: {none:.4f}"
    )
    sharper = (
        "the first position's energy is sum_i (s + (1 - s)/i)^2, {formula:.0f} at {longest:.0f} positions, and grows "
        "with the length; with even attention it stays below pi^2/6. A norm would even gradients out if it divided the "
        "first position by {sigma:.0f} times as much as the others"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Gradients A'g of random g at every length, with the sink and without."""

        def energies(n_positions: int, share: float) -> Float64[np.ndarray, "networks n_positions"]:
            attention = planted(n_positions, share, sink=not broken)
            arriving = generator.standard_normal((NETWORKS, n_positions, WIDTH))
            return np.asarray(np.square(attention.T @ arriving).mean(axis=-1))

        def concentration(energy: Float64[np.ndarray, "networks n_positions"]) -> Float64[np.ndarray, "networks"]:
            return np.asarray(energy[:, 0] / energy.sum(axis=1))

        strong = [energies(length, STRONG) for length in LENGTHS]
        even = energies(LENGTHS[-1], 0.0)
        sizes = [mean_of(concentration(energy)).interval(least=0.0, most=1.0) for energy in strong]
        first = np.square(planted(LENGTHS[-1], STRONG)[:, 0]).sum()
        return Finding(
            value=sizes[-1].value,
            as_stated=all(size.low > CONCENTRATED for size in sizes),
            figure=curves(
                "position",
                "energy of the gradient on the value path",
                np.arange(LENGTHS[-1]),
                {"share 0.9": strong[-1].mean(axis=0), "no sink": even.mean(axis=0)},
                log_y=True,
            ),
            numbers={
                "longest": LENGTHS[-1],
                "shortest": LENGTHS[0],
                "low": sizes[-1].low,
                "high": sizes[-1].high,
                "short": sizes[0].value,
                "none": float(concentration(even).mean()),
                "formula": float(first),
                "sigma": float(np.sqrt(strong[-1].mean(axis=0)[0] / strong[-1].mean(axis=0)[1:].mean())),
            },
            instances=NETWORKS * (len(LENGTHS) + 1),
        )
