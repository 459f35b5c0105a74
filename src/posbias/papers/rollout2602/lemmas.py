"""The residual paper's order lemmas A.2-A.5 (arXiv 2602.16837, appendix A.1), on random laws and kernels.

They carry propositions 4.2-4.5: a monotone kernel keeps the order of laws and of vectors, a residual connection keeps
it monotone, and ordered rows give ordered steps. docs/theory, section 3.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Causal
from posbias.papers.claims import CLAIMS, Claim, Figure, Finding, curve
from posbias.papers.order import (
    ROUNDING,
    dominance_gap,
    monotonicity_gap,
    random_content_kernel,
    random_monotone_kernel,
    transition,
)
from posbias.papers.rollout2602.claims import CONTENT_SPREAD, N_POSITIONS, PAPER

DRAWS = 200
"""Random kernels and laws for each lemma."""
UNORDERED_ROWS = "kernels from random content, whose rows are not ordered"


def random_law(generator: np.random.Generator) -> Float64[np.ndarray, "n"]:
    """A random distribution over positions."""
    return generator.dirichlet(np.full(N_POSITIONS, 0.3))


def ordered_laws(generator: np.random.Generator) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]:
    """A random law and an earlier one: some of its mass moved to smaller positions."""
    recent = random_law(generator)
    earlier: np.ndarray = recent @ random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=1.0)
    return recent, earlier


def lemma_kernel(generator: np.random.Generator, *, broken: bool) -> Float64[np.ndarray, "n n"]:
    """A monotone kernel; a random one where the assumption is violated."""
    if broken:
        return random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=CONTENT_SPREAD)
    return random_monotone_kernel(N_POSITIONS, generator)


class Lemma(Claim):
    """A statement about one random draw at a time: it holds if no draw violates it."""

    paper = PAPER
    computed: ClassVar[str]
    """What the largest gap is, in words."""

    @abstractmethod
    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """By how much one draw violates the statement; 0 if it does not."""

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Largest gap over draws, beside the gaps where the assumption is violated."""
        gaps = np.sort([self.gap(generator, broken=broken) for _ in range(DRAWS)])
        without = np.sort([self.gap(generator, broken=True) for _ in range(DRAWS)])
        violated = float(np.mean(without > ROUNDING))
        draws = np.arange(DRAWS)
        return Finding(
            computed=self.computed,
            value=float(gaps[-1]),
            as_stated=bool(gaps[-1] <= ROUNDING),
            figure=Figure(
                "draw, sorted",
                "gap",
                [curve("as assumed", draws, gaps), curve("assumption violated", draws, without)],
            ),
            sharper=f"without the assumption it fails in {violated:.0%} of draws, by up to {without[-1]:.2g}",
            numbers={"violated_without_the_assumption": violated, "largest_without_the_assumption": float(without[-1])},
            instances=DRAWS,
        )


@CLAIMS.register("rollout-2602.16837/lemma-A.2")
class OrderPreserved(Lemma):
    """A monotone kernel keeps the order of two laws."""

    source = "Lemma A.2, appendix A.1"
    statement = "If one law is more recent than another, it still is after a step with a monotone kernel."
    assumptions = ("stochastically monotone kernel",)
    broken_by = UNORDERED_ROWS
    computed = "largest violation of the order after one step (0 if preserved)"

    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """Largest excess of a prefix mass of the more recent law after the step."""
        recent, earlier = ordered_laws(generator)
        kernel = lemma_kernel(generator, broken=broken)
        return dominance_gap(recent @ kernel, earlier @ kernel)


@CLAIMS.register("rollout-2602.16837/lemma-A.3")
class ResidualInherits(Lemma):
    """Adding a residual connection keeps a kernel monotone."""

    source = "Lemma A.3, appendix A.1"
    statement = "If A is stochastically monotone, so is (1 - m) I + m A for every m in [0, 1]."
    assumptions = ("stochastically monotone kernel",)
    broken_by = UNORDERED_ROWS
    computed = "largest violation of monotonicity with a residual connection (0 if inherited)"

    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """Largest violation of monotonicity of the residual kernel."""
        return monotonicity_gap(transition(lemma_kernel(generator, broken=broken), generator.uniform(0, 1)))


@CLAIMS.register("rollout-2602.16837/lemma-A.4")
class RowwiseDominance(Lemma):
    """Ordered rows give ordered steps, from any law; neither causality nor Assumption 4.1 is needed."""

    source = "Lemma A.4, appendix A.1"
    statement = "If every row of P is more recent than the same row of Q, then rho P is more recent than rho Q."
    assumptions = ("row-wise dominance (neither causality nor Assumption 4.1)",)
    broken_by = "rows of the two kernels that are not ordered"
    computed = "largest violation of the order of rho P and rho Q (0 if dominated)"

    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """Largest excess of a prefix mass of rho P over rho Q."""
        everything = np.ones((N_POSITIONS, N_POSITIONS), dtype=bool)
        recent = random_content_kernel(everything, generator, spread=CONTENT_SPREAD)
        other = random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=CONTENT_SPREAD)
        early = random_content_kernel(everything, generator, spread=CONTENT_SPREAD) if broken else recent @ other
        law = random_law(generator)
        return dominance_gap(law @ recent, law @ early)


@CLAIMS.register("rollout-2602.16837/lemma-A.5")
class MonotoneVectors(Lemma):
    """A monotone kernel keeps falling vectors falling."""

    source = "Lemma A.5, appendix A.1"
    statement = "If A is stochastically monotone and v falls with its index, A v falls with its index."
    assumptions = ("stochastically monotone kernel",)
    broken_by = UNORDERED_ROWS
    computed = "largest rise of A v (0 if it falls)"

    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """Largest rise of A v from one index to the next."""
        falling = np.sort(generator.standard_normal(N_POSITIONS))[::-1]
        image = lemma_kernel(generator, broken=broken) @ falling
        return max(0.0, float(np.diff(image).max()))
