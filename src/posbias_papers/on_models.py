"""Claims on one model: premises that are checked on it, and the statement's number and verdict.

The statement is examined whether the premises are met or not; if not, the verdict says so, and what became of the
statement all the same. Claims need of a model: mean attention over heads of every layer, mask and mixing,
per prompt, as dense matrices, so contexts are short. Attention is the model's own: of a reference model as it computes
it, of a Hugging Face model recomputed from what its attention modules read. docs/theory, section 3.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from posbias.architecture import Causal, Full, Mask, Prefix, SlidingWindow
from posbias.errors import RunError, UsageError
from posbias.models.attention_blocks import query_blocks
from posbias.models.devices import in_float64
from posbias.models.model import Model
from posbias.models.reference.config import constants_of, stacked
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.network import ReferenceTransformer
from posbias.progress import track
from posbias.prompts import Prompts
from posbias.results.page import first_of
from posbias.theory.power_rollout.actual_attention import trace_attention
from posbias_papers.claims import MODEL_CLAIMS, Finding, Premise, Verdict, selected
from posbias_papers.kernels import (
    ROUNDING,
    centre_nodes,
    dominance_gap,
    last_row,
    monotonicity_gap,
    rollouts,
    transitions,
    violated_share,
)
from posbias_papers.rollout2602.claims import diagonal_drift, drained_ratio, primacy_drift
from posbias_papers.wu2025.masks import SLACK, bound_ratio, outside_trail

MOST_POSITIONS = 256
"""Layers x positions^2 float64 numbers per prompt are kept: 16 MB for 30 layers at 256 positions."""

Kernels = Float64[np.ndarray, "layers query key"]
Trace = tuple[Kernels, Float64[np.ndarray, "layers"], Bool[np.ndarray, "layers query key"]]
"""Mean attention, mixing, and what may be seen."""


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A model's attention on some prompts."""

    kernels: Float64[np.ndarray, "prompts layers query key"]
    """A_l, the mean over heads; rows sum to 1."""
    mixing: Float64[np.ndarray, "prompts layers"]
    """m_l, mean over tokens of |a| / (|x| + |a|); 1 without a residual connection."""
    visible: Bool[np.ndarray, "layers query key"]
    """True for keys that some head of the layer may see."""

    @property
    def epsilons(self) -> Float64[np.ndarray, "prompts"]:
        """Each prompt's smallest admissible weight over all layers."""
        admissible = np.where(self.visible, self.kernels, np.inf)
        return np.asarray(admissible.min(axis=(1, 2, 3)))

    @property
    def mask(self) -> Mask | None:
        """The mask, where all layers have one of the library's; a window that sees everything reads as causal."""
        first, n_positions = self.visible[0], self.visible.shape[1]
        if (self.visible != first).any():
            return None
        reach, ahead = int(first[-1].sum()), int(first[0].sum())
        candidates = (Causal(), Full(), SlidingWindow(reach), Prefix(ahead))
        return next((mask for mask in candidates if np.array_equal(mask.visible(n_positions), first)), None)


def run_model(model: Model, prompts: Prompts) -> ModelRun:
    """Run every prompt and keep its attention.

    Args:
        model: A reference model, or a Hugging Face model of a described family.
        prompts: Equally long, 2 to 256 positions.

    Raises:
        UsageError: too short, too long, or a family whose attention cannot be recomputed.
        RunError: attention or norms are not finite.
    """
    if not 2 <= prompts.n_positions <= MOST_POSITIONS:
        raise UsageError(
            f"claims on a model need prompts of 2 to {MOST_POSITIONS} positions, got {prompts.n_positions}"
        )
    trace = _of_reference if isinstance(model, ReferenceTransformer) else _of_described
    traces = [trace(model, ids) for ids in track(prompts.token_ids, "attention")]
    kernels = np.stack([kernel for kernel, _, _ in traces])
    mixing = np.stack([shares for _, shares, _ in traces])
    if not np.isfinite(kernels).all():
        raise RunError("the model's attention is not finite on a prompt; check its weights for overflow")
    # Rows of float32 softmaxes sum to 1 within 1e-7; the claims are compared to far less.
    return ModelRun(kernels / kernels.sum(-1, keepdims=True), mixing, traces[0][2])


@torch.no_grad()
def _of_reference(model: Any, ids: Int64[np.ndarray, "n_positions"]) -> Trace:
    constants = {name: value.to(model.device) for name, value in constants_of(model.config, len(ids)).items()}
    weights = {name: value.detach() for name, value in model.network.named_parameters()}
    tokens = model.token_tensor([ids.tolist()])
    inputs = tokens if model.config.vocabulary_size is not None else model.embed(tokens)
    maps = attention_maps(model.config, stacked([weights]), stacked([constants]), inputs[None])
    mixing = model.branch_norms(tokens).share().mean(axis=1)
    visible = (constants["bias"] > -torch.inf).any(dim=1).cpu().numpy()
    return in_float64(maps[:, 0, 0]).mean(dim=1).cpu().numpy(), mixing, visible


@torch.no_grad()
def _of_described(model: Any, ids: Int64[np.ndarray, "n_positions"]) -> Trace:
    layers, mixing = trace_attention(model, model.token_tensor([ids.tolist()])[0])
    kernels = np.zeros((len(layers), len(ids), len(ids)))
    visible = np.empty(kernels.shape, dtype=bool)
    for index, seen_again in enumerate(layers):
        state = seen_again()
        for block in query_blocks(state):
            kernels[index, block.queries, block.keys] = in_float64(block.weights).mean((0, 1)).cpu().numpy()
        position = np.arange(len(ids))
        visible[index] = (position >= state.first.numpy()[:, None]) & (position <= position[:, None])
    return kernels, mixing, visible


class ModelClaim(ABC):
    """A published claim in the form in which one model's attention can meet it or not; named as the claim is."""

    name: ClassVar[str]
    computed: ClassVar[str]
    """As those of a `Claim`, like `sharper`."""
    sharper: ClassVar[str] = ""

    @abstractmethod
    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """The assumptions that show in attention, mask and mixing."""

    @abstractmethod
    def examine(self, run: ModelRun) -> Finding:
        """The statement's number on this model, worst over prompts."""

    def check(self, run: ModelRun) -> Verdict:
        """Premises and number together."""
        return Verdict(self.name, self.examine(run), premises=self.premises(run))


def verify_model(model: Model, prompts: Prompts, selection: str | None = None) -> list[Verdict]:
    """Put the claims whose premises show in attention and mixing to the test on a model.

    Args:
        model: A reference model, or a Hugging Face model of a described family.
        prompts: Equally long, 2 to 256 positions; every number is the worst over prompts unless it says otherwise.
        selection: A claim, a paper, or None for every claim with a form for models.

    Returns:
        One verdict per claim.

    Raises:
        UsageError: an unknown claim, or none with a form for models; prompts or a model that cannot be used.
        RunError: attention or norms are not finite.
    """
    names = [name for name in selected(selection) if name in MODEL_CLAIMS]
    if not names:
        raise UsageError(f"claim {selection!r} has no form for models; claims with one: {', '.join(MODEL_CLAIMS)}")
    run = run_model(model, prompts)
    return [MODEL_CLAIMS[name]().check(run) for name in names]


def causal(run: ModelRun) -> Premise:
    """No layer looks ahead."""
    return Premise("no attention to later positions", not bool(np.triu(run.visible, 1).any()))


def attention_only(run: ModelRun) -> Premise:
    """No residual connection."""
    least = float(run.mixing.min())
    return Premise("attention only: no residual connections", 1 - least <= ROUNDING, f"least mixing {least:.3f}")


def bounded_below(run: ModelRun) -> Premise:
    """Every admissible weight above one positive number: what bounded weights and values give at any finite depth."""
    epsilon = float(run.epsilons.min())
    return Premise("every admissible attention weight is positive", epsilon > 0, f"smallest {epsilon:.2e}")


def masked_as(run: ModelRun, kind: str) -> Premise:
    """One of some masks in every layer."""
    mask = run.mask
    met = mask is not None and type(mask).name == kind
    found = "layers or heads differ, or no mask of the library" if mask is None else str(mask)
    return Premise(f"mask {kind} in every layer", met, found)


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

    def examine(self, run: ModelRun) -> Finding:
        """Largest rollout over the bound, and how much mass is still outside the centre."""
        mask, n_positions = run.mask, run.kernels.shape[-1]
        first = min(mask.length, n_positions) if self.kind == "prefix" and isinstance(mask, Prefix) else 1
        width = mask.width if isinstance(mask, SlidingWindow) else n_positions
        hops = -(-(n_positions - 1) // max(width - 1, 1))
        ratios, outside, last = [], [], []
        for kernels, epsilon in zip(run.kernels, run.epsilons, strict=True):
            rolled = rollouts(list(kernels))[1:]
            if self.kind == "sliding_window":  # reported is the smallest C that works
                ratios.append(bound_ratio(rolled, epsilon=float(epsilon) ** hops, first=first, stride=2 * hops))
            else:
                ratios.append(bound_ratio(rolled, epsilon=float(epsilon), first=first) / (1 - float(epsilon)))
            outside.append(float(outside_trail(kernels, np.arange(first))[-1]))
            last.append(rolled[-1, -1, first:].sum())
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
    """R_ij <= C (1 - j eps^M)^(t/2M), C < 1, M = ceil((N - 1) / (w - 1))."""

    kind = "sliding_window"
    computed = "largest rollout/bound with C = 1 over depths, queries, keys, prompts (<= 1)"


@MODEL_CLAIMS.register("wu2025/theorem-4.3")
class PrefixCollapseOfTheModel(MaskCollapse):
    """R_ij <= (1 - eps)(1 - (j - K + 1) eps)^t for j >= K."""

    kind = "prefix"


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
                f"centre nodes {first_of(centres.tolist())}" if len(centres) else "none",
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


@MODEL_CLAIMS.register("rollout-2602.16837/theorem-5.5-infinite")
class CollapseOfTheModel(ModelClaim):
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
        ratios, sharp, outside = [], [], []
        for kernels, mixing, epsilon in zip(run.kernels, run.mixing, run.epsilons, strict=True):
            rolled = rollouts(transitions(list(kernels), mixing))[1:]
            ratios.append(drained_ratio(rolled, mixing, float(epsilon)))
            sharp.append(drained_ratio(rolled, mixing, float(epsilon), by_position=True))
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
class NoCollapseOfTheModel(ModelClaim):
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
        for kernels, mixing, product in zip(run.kernels, run.mixing, products, strict=True):
            diagonal = np.diagonal(rollouts(transitions(list(kernels), mixing))[1:], axis1=1, axis2=2)
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
    def drift(self, kernels: Kernels, mixing: Float64[np.ndarray, "layers"]) -> float:
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

    def drift(self, kernels: Kernels, mixing: Float64[np.ndarray, "layers"]) -> float:
        """Layers added on top, one by one."""
        return primacy_drift(list(kernels), mixing)


@MODEL_CLAIMS.register("rollout-2602.16837/proposition-4.3")
class ResidualDriftOfTheModel(OrderOfTheModel):
    """Stronger residual connections mean more recency."""

    computed = "largest excess of F_k with less mixing (half; none in one layer) over F_k with the model's (0 if none)"

    def drift(self, kernels: Kernels, mixing: Float64[np.ndarray, "layers"]) -> float:
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

    def drift(self, kernels: Kernels, mixing: Float64[np.ndarray, "layers"]) -> float:
        """The model's kernels, tilted both ways."""
        return diagonal_drift(list(kernels), mixing, np.ones(len(mixing)))
