"""The order of a model's own rollouts: propositions 4.2, 4.3 and 4.5 of arXiv 2602.16837 on measured attention.

They rest on Assumption 4.1, stochastically monotone mean kernels, which is measured here: kernels are means over heads
and prompts, mixing is the mean over prompts. docs/theory, section 3.
"""

from abc import abstractmethod

import numpy as np
from jaxtyping import Float64

from posbias_papers.claims import MODEL_CLAIMS, Finding, Premise
from posbias_papers.kernels import (
    ROUNDING,
    dominance_gap,
    last_row,
    monotonicity_gap,
    transitions,
    violated_share,
)
from posbias_papers.model_claims import ModelClaim, ModelRun, causal
from posbias_papers.rollout2602.claims import diagonal_drift, primacy_drift

OFFSET = 1.0
"""Diagonal logit that is added and taken away, in natural-log units."""

Kernels = Float64[np.ndarray, "layers query key"]
Mixing = Float64[np.ndarray, "layers"]


class OrderOfTheModel(ModelClaim):
    """A drift of the last row's prefix masses, on mean kernels and prompt by prompt."""

    sharper = (
        "on single prompts it fails in {violated_prompts:.0%} of {prompts:.0f}, by up to {largest_on_a_prompt:.2g} of "
        "the mass"
    )

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """Causal and monotone."""
        mean = run.kernels.mean(axis=0)
        gap = max(monotonicity_gap(kernel) for kernel in mean)
        share = float(np.mean([violated_share(kernel) for kernel in mean]))
        return (
            causal(run),
            Premise(
                "Assumption 4.1: stochastically monotone mean kernels",
                gap <= ROUNDING,
                f"largest gap {gap:.3f}, {share:.0%} of its inequalities fail",
            ),
        )

    @abstractmethod
    def drift(self, kernels: Kernels, mixing: Mixing) -> float:
        """Largest move of a prefix mass against the statement."""

    def examine(self, run: ModelRun) -> Finding:
        """On the mean over prompts; single prompts are counted beside it."""
        gap = self.drift(run.kernels.mean(axis=0), run.mixing.mean(axis=0))
        single = [self.drift(*prompt) for prompt in zip(run.kernels, run.mixing, strict=True)]
        violated = float(np.mean([violation > ROUNDING for violation in single]))
        return Finding(
            value=gap,
            as_stated=gap <= ROUNDING,
            numbers={"prompts": len(single), "violated_prompts": violated, "largest_on_a_prompt": max(single)},
            instances=len(single),
        )


@MODEL_CLAIMS.register("rollout-2602.16837/proposition-4.2")
class PrimacyDriftOfTheModel(OrderOfTheModel):
    """Deeper means earlier."""

    computed = "largest fall of a prefix mass of the last row from one depth to the next (0 if always earlier)"

    def drift(self, kernels: Kernels, mixing: Mixing) -> float:
        """Layers added on top, one by one."""
        return primacy_drift(list(kernels), mixing)


@MODEL_CLAIMS.register("rollout-2602.16837/proposition-4.3")
class ResidualDriftOfTheModel(OrderOfTheModel):
    """Stronger residual connections mean more recency."""

    computed = "largest excess of F_k with less mixing (half; none in one layer) over F_k with the model's (0 if none)"

    def drift(self, kernels: Kernels, mixing: Mixing) -> float:
        """Half of every layer's mixing, and each layer's alone taken away."""
        whole, half = (last_row(transitions(list(kernels), share)) for share in (mixing, mixing / 2))
        gaps = [dominance_gap(half, whole)]
        for layer in range(len(mixing)):
            less = np.where(np.arange(len(mixing)) == layer, 0.0, mixing)
            gaps.append(dominance_gap(last_row(transitions(list(kernels), less)), whole))
        return max(gaps)


@MODEL_CLAIMS.register("rollout-2602.16837/proposition-4.5")
class DiagonalDriftOfTheModel(OrderOfTheModel):
    """Content that favours or shuns the query's own position."""

    computed = "largest drift of F_k against the sign of a diagonal logit of +1 or -1 in all layers (0 if none)"

    def drift(self, kernels: Kernels, mixing: Mixing) -> float:
        """The model's kernels, tilted both ways."""
        return diagonal_drift(list(kernels), mixing, np.full(len(mixing), OFFSET))
