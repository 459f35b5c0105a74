"""Collapse of a model's own attention with depth: Wu et al. 2025 and theorem 5.5 of arXiv 2602.16837.

Bounds take the model's own epsilon, its smallest admissible weight (mean over heads), per prompt, at every depth.
docs/theory, section 3.
"""

from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Prefix, SlidingWindow
from posbias_papers.claims import MODEL_CLAIMS, Finding, Premise, listed
from posbias_papers.kernels import ROUNDING, centre_nodes, rollouts, transitions, worst_ratio
from posbias_papers.model_claims import ModelClaim, ModelRun, attention_only, bounded_below, causal, masked_as
from posbias_papers.wu2025.graphs import outside_trail
from posbias_papers.wu2025.masks import SLACK

Rollouts = Float64[np.ndarray, "layers query key"]


@MODEL_CLAIMS.register("wu2025/lemma-A.1")
class EntriesOfTheModel(ModelClaim):
    """The model's epsilon."""

    computed = "smallest admissible attention weight (mean over heads) over layers and prompts (positive)"
    sharper = (
        "equal weights would have {equal_weights:.4f}, {equal_over_epsilon:.3g} times as much: by so much per step do "
        "bounds made of epsilon fall short of equal attention"
    )

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """Finite weights and depth, which every model has."""
        return (Premise("bounded weights, finite depth", True, f"{run.kernels.shape[1]} layers"),)

    def examine(self, run: ModelRun) -> Finding:
        """The smallest admissible weight, beside that of equal weights."""
        epsilon, equal = float(run.epsilons.min()), 1 / int(run.visible.sum(axis=-1).max())
        return Finding(
            value=epsilon,
            as_stated=epsilon > 0,
            numbers={
                "epsilon": epsilon,
                "equal_weights": equal,
                "equal_over_epsilon": equal / max(epsilon, 1e-300),
            },
            instances=len(run.kernels),
        )


class MaskCollapse(ModelClaim):
    """Attention alone, rolled out, against a bound for every key that is not in the centre."""

    kind: ClassVar[str]
    """Name of the mask."""
    computed = "largest rollout/bound with C = 1 - eps over depths, queries, keys, prompts (<= 1)"
    sharper = (
        "after {layers:.0f} layers of attention alone the last query has {outside_last_query:.3g} of its mass outside "
        "{centre} (prompts from {outside_last_query_least:.3g} to {outside_last_query_most:.3g})"
    )

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """The theorem's mask, no residual connection, positive weights."""
        return (masked_as(run, self.kind), attention_only(run), bounded_below(run))

    def log_bounds(self, run: ModelRun, epsilon: float) -> Float64[np.ndarray, "layers keys"]:
        """log of the bound without its constant for every key after the centre, by depth."""
        first = self.centre(run)
        drains = np.arange(first, run.kernels.shape[-1]) - first + 1
        steps = np.arange(run.kernels.shape[1])[:, None]
        return np.asarray(steps * np.log1p(-np.minimum(drains * epsilon, 1 - 1e-16)))

    def centre(self, run: ModelRun) -> int:
        """Leading positions that all mass goes to."""
        return 1

    def constant(self, epsilon: float) -> float:
        """The proof's C."""
        return 1 - epsilon

    def examine(self, run: ModelRun) -> Finding:
        """Largest rollout over the bound, and how much mass is still outside the centre."""
        first, ratios = self.centre(run), []
        for kernels, epsilon in zip(run.kernels, run.epsilons, strict=True):
            cumulative = rollouts(list(kernels))[1:, :, first:]
            worst = worst_ratio(cumulative, self.log_bounds(run, float(epsilon))[:, None, :])
            ratios.append(worst / self.constant(float(epsilon)))
        outside = [float(outside_trail(kernels, np.arange(first))[-1]) for kernels in run.kernels]
        last = [rollouts(list(kernels))[-1, -1, first:].sum() for kernels in run.kernels]
        return Finding(
            value=max(ratios),
            as_stated=max(ratios) <= SLACK,
            numbers={
                "layers": run.kernels.shape[1],
                "centre_nodes": first,
                "epsilon": float(run.epsilons.min()),
                "outside_worst_query": max(outside),
                "outside_last_query": float(np.mean(last)),
                "outside_last_query_least": float(min(last)),
                "outside_last_query_most": float(max(last)),
            },
            instances=len(run.kernels),
            words={"centre": "position 0" if first == 1 else f"the first {first} positions"},
        )


@MODEL_CLAIMS.register("wu2025/theorem-4.1")
class CausalCollapseOfTheModel(MaskCollapse):
    """R_ij <= (1 - eps)(1 - j eps)^t."""

    kind = "causal"


@MODEL_CLAIMS.register("wu2025/theorem-4.2")
class WindowCollapseOfTheModel(MaskCollapse):
    """R_ij <= C (1 - j eps^M)^(t/2M), C < 1."""

    kind = "sliding_window"
    computed = "largest rollout/bound with C = 1 over depths, queries, keys, prompts (<= 1)"

    def log_bounds(self, run: ModelRun, epsilon: float) -> Float64[np.ndarray, "layers keys"]:
        """Bounds with eps^M and t / 2M, M = ceil((N - 1) / (w - 1))."""
        mask, n_positions = run.mask, run.kernels.shape[-1]
        width = mask.width if isinstance(mask, SlidingWindow) else n_positions
        hops = -(-(n_positions - 1) // max(width - 1, 1))
        slower: np.ndarray = super().log_bounds(run, epsilon**hops) / (2 * hops)
        return slower

    def constant(self, epsilon: float) -> float:
        """Any below 1: what is reported is the smallest that works."""
        return 1.0


@MODEL_CLAIMS.register("wu2025/theorem-4.3")
class PrefixCollapseOfTheModel(MaskCollapse):
    """R_ij <= (1 - eps)(1 - (j - K + 1) eps)^t for j >= K."""

    kind = "prefix"

    def centre(self, run: ModelRun) -> int:
        """The prefix."""
        mask = run.mask
        return min(mask.length, run.kernels.shape[-1]) if isinstance(mask, Prefix) else 1


@MODEL_CLAIMS.register("wu2025/centre-nodes")
class CentreNodesOfTheModel(ModelClaim):
    """Whatever the mask: what is on its centre nodes stays there, and more comes."""

    computed = "share outside the centre nodes after {layers:.0f} layers, worst query and prompt"
    sharper = "{needed_layers:.0f} layers are enough for any mask with a centre; this model has {layers:.0f}"

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """One mask in all layers, with a centre; no residual connection."""
        centres = centre_nodes(run.visible[0])
        depth, needed = run.kernels.shape[1], run.kernels.shape[-1] - 1
        same = bool((run.visible == run.visible[0]).all())
        enough = f"at least N - 1 = {needed} layers, so that any mask has brought some mass"
        return (
            Premise("one mask in every layer", same, "" if same else "layers differ"),
            Premise(
                "the mask has a centre node",
                len(centres) > 0,
                f"centre nodes {listed(centres.tolist())}" if len(centres) else "none",
            ),
            attention_only(run),
            bounded_below(run),
            Premise(enough, depth >= needed, str(depth)),
        )

    def examine(self, run: ModelRun) -> Finding:
        """Largest share of any query outside the centre nodes after all layers."""
        centres = centre_nodes(run.visible[0])
        outside = max(float(outside_trail(kernels, centres)[-1]) for kernels in run.kernels)
        return Finding(
            value=outside,
            as_stated=outside < 1 - ROUNDING,
            numbers={
                "outside": outside,
                "centre_nodes": float(len(centres)),
                "layers": run.kernels.shape[1],
                "needed_layers": run.kernels.shape[-1] - 1,
            },
            instances=len(run.kernels),
        )


class ResidualBound(ModelClaim):
    """T_l = (1 - m_l) I + m_l A_l with measured attention and measured mixing."""

    def rolled(self, run: ModelRun) -> list[Rollouts]:
        """R^(t) of every prompt, t = 1 ... L."""
        prompts = zip(run.kernels, run.mixing, strict=True)
        return [rollouts(transitions(list(kernels), mixing))[1:] for kernels, mixing in prompts]


@MODEL_CLAIMS.register("rollout-2602.16837/theorem-5.5-infinite")
class CollapseOfTheModel(ResidualBound):
    """R_ij <= prod_l (1 - eps m_l) for j > 0."""

    computed = "largest R_ij / prod (1 - eps m_l) over depths, queries, keys j > 0, prompts (<= 1)"
    sharper = (
        "against prod (1 - j eps m_l) the largest ratio is {sharper_ratio:.3g}; the last query really has "
        "{outside_last_query:.3g} of its mass outside position 0, where exp(-eps sum m_l) allows {allowed:.3f} for "
        "each key"
    )

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """Causal, with positive weights; depth is finite, so that only the bound is put to the test."""
        total = run.mixing.sum(axis=1)
        return (
            masked_as(run, "causal"),
            bounded_below(run),
            Premise(
                "a bound for any total mixing (its limit needs an infinite one)",
                True,
                f"sum m_l from {total.min():.2f} to {total.max():.2f}",
            ),
        )

    def examine(self, run: ModelRun) -> Finding:
        """Largest R_ij over its bound, and the mass outside position 0 beside exp(-eps sum m_l)."""
        ratios: list[float] = []
        sharp: list[float] = []
        outside = []
        keys = np.arange(1, run.kernels.shape[-1])
        for rolled, mixing, epsilon in zip(self.rolled(run), run.mixing, run.epsilons, strict=True):
            columns = rolled.max(axis=1)[:, 1:]
            for into, drains in ((ratios, np.ones(len(keys))), (sharp, keys)):
                steps = np.log1p(-np.minimum(mixing[:, None] * epsilon * drains, 1 - 1e-16))
                into.append(worst_ratio(columns, np.cumsum(steps, axis=0)))
            outside.append(rolled[-1, -1, 1:].sum())
        allowed = np.exp(-run.epsilons * run.mixing.sum(axis=1))
        return Finding(
            value=max(ratios),
            as_stated=max(ratios) <= SLACK,
            numbers={
                "sharper_ratio": max(sharp),
                "epsilon": float(run.epsilons.min()),
                "outside_last_query": float(np.mean(outside)),
                "allowed": float(allowed.max()),
                "total_mixing": float(run.mixing.sum(axis=1).mean()),
            },
            instances=len(run.kernels),
        )


@MODEL_CLAIMS.register("rollout-2602.16837/theorem-5.5-finite")
class NoCollapseOfTheModel(ResidualBound):
    """R_ii >= prod_l (1 - m_l)."""

    computed = "least R_ii - prod (1 - m_l) over depths, positions, prompts (>= 0)"
    sharper = (
        "the last position keeps {last_position_keeps:.3g} of itself through {layers:.0f} layers; prod (1 - m_l) is "
        "{product:.3g}, what attention to oneself adds is not in it"
    )

    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """Causal, and a residual connection in every layer."""
        most = float(run.mixing.max())
        return (
            causal(run),
            Premise("a residual connection in every layer", most < 1, f"largest mixing {most:.3f}"),
        )

    def examine(self, run: ModelRun) -> Finding:
        """Least R_ii over the product, with the share that the last position keeps of itself."""
        ratios, last_shares = [], []
        products = np.cumprod(1 - run.mixing, axis=1)
        for rolled, product in zip(self.rolled(run), products, strict=True):
            diagonal = np.diagonal(rolled, axis1=1, axis2=2)
            ratios.append(float((diagonal - product[:, None]).min()))
            last_shares.append(diagonal[-1, -1])
        least = min(ratios)
        return Finding(
            value=least,
            as_stated=least >= -ROUNDING,
            numbers={
                "layers": run.kernels.shape[1],
                "product": float(products[:, -1].mean()),
                "last_position_keeps": float(np.mean(last_shares)),
            },
            instances=len(run.kernels),
        )
