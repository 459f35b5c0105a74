"""The residual paper (arXiv 2602.16837): propositions 4.2-4.5, order lemmas A.2-A.5, lemma 5.4 and theorem 5.5.

At finite depth everything rests on Assumption 4.1, stochastically monotone kernels. Each claim runs on kernels that
satisfy it exactly (uniform, windowed, ALiBi, random) and, with `broken`, on kernels that do not. The lemmas carry the
propositions: a monotone kernel keeps the order of laws and of vectors, a residual connection keeps it monotone, and
ordered rows give ordered steps.

At infinite depth states follow X <- (1 - m_l) X + m_l A_l X W_V with random bounded weights, ALiBi or no positional
logits; every bound uses the instance's own epsilon. Kernels are lower triangular, so that
R_ii = prod_l (1 - m_l + m_l A_l[i,i]) exactly. docs/theory, section 3.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float64

from posbias.architecture import Causal, Mask, SlidingWindow
from posbias.theory.kernels import masked_softmax
from posbias_papers.claims import CLAIMS, Claim, Finding
from posbias_papers.kernels import (
    ROUNDING,
    Network,
    Run,
    Violation,
    decay_logits,
    dominance_gap,
    even_kernel,
    last_row,
    monotonicity_gap,
    random_content_kernel,
    random_monotone_kernel,
    random_runs,
    rollouts,
    transition,
    transitions,
    violated_share,
    worst_ratio,
)
from posbias_papers.wu2025.masks import LIMIT_REST, SETTINGS, SLACK

MONOTONE = "Assumption 4.1: stochastically monotone mean kernels"
CAUSAL = "causal or causal sliding-window masking"
NOT_MONOTONE = "Assumption 4.1 violated: kernels from random content, whose rows are not ordered"

N_POSITIONS = 16
DEPTH = 6
WINDOW = 5
STACKS = 40
"""Random stacks of layers for each claim."""
CONTENT_SPREAD = 6.0
"""Standard deviation of the content logits of kernels that are not monotone."""

Kernels = Sequence[Float64[np.ndarray, "n n"]]


def monotone_stack(mask: Mask, generator: np.random.Generator) -> Kernels:
    """Layers that satisfy Assumption 4.1: random ones, uniform ones and ALiBi ones in random order."""
    visible = mask.visible(N_POSITIONS)
    width = None if mask.reach(N_POSITIONS) == N_POSITIONS else mask.reach(N_POSITIONS)
    stack = []
    for _ in range(DEPTH):
        strength = generator.uniform(0, 0.5)
        alibi = masked_softmax(visible, decay_logits(N_POSITIONS, strength))
        choices = (random_monotone_kernel(N_POSITIONS, generator, width=width), even_kernel(visible), alibi)
        stack.append(choices[generator.integers(len(choices))])
    return stack


def disordered_stack(mask: Mask, generator: np.random.Generator) -> Kernels:
    """Layers that violate it: softmax of random content."""
    visible = mask.visible(N_POSITIONS)
    return [random_content_kernel(visible, generator, spread=CONTENT_SPREAD) for _ in range(DEPTH)]


def stacks(generator: np.random.Generator, *, broken: bool) -> list[Kernels]:
    """Half of them causal, half with a window."""
    draw = disordered_stack if broken else monotone_stack
    return [draw(mask, generator) for mask in (Causal(), SlidingWindow(WINDOW)) for _ in range(STACKS // 2)]


NEEDED = (
    "on kernels that violate Assumption 4.1 it fails in {violated_without_the_assumption:.0%} of "
    "{stacks_without_the_assumption:.0f} stacks, by up to {without_the_assumption:.2g} of the mass"
)


def needed(contrast: Sequence[float]) -> dict[str, float]:
    """How often and by how much a statement fails on kernels that violate Assumption 4.1."""
    return {
        "violated_without_the_assumption": float(np.mean([gap > ROUNDING for gap in contrast])),
        "stacks_without_the_assumption": len(contrast),
        "without_the_assumption": max(contrast),
    }


def some_layers(generator: np.random.Generator) -> Bool[np.ndarray, "depth"]:
    """One layer or several at random: where every layer changes at once, violations of the order rarely show."""
    chosen: np.ndarray = generator.random(DEPTH) < generator.choice([0.0, 0.4])
    chosen[generator.integers(DEPTH)] = True
    return chosen


class Proposition(Claim):
    """A drift of the profile's prefix masses, on stacks of monotone kernels and on others."""

    assumptions: ClassVar[tuple[str, ...]] = (MONOTONE, CAUSAL)
    broken_by = NOT_MONOTONE
    sharper = NEEDED
    directions: ClassVar[int] = 1
    """Statements that each stack is examined for."""

    @abstractmethod
    def drift(self, stack: Kernels, generator: np.random.Generator) -> float:
        """Largest move of a prefix mass against the statement on one stack."""

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """The worst drift over stacks, beside that on kernels that violate Assumption 4.1."""
        layers = stacks(generator, broken=broken)
        gap = max(self.drift(stack, generator) for stack in layers)
        contrast = [self.drift(stack, generator) for stack in stacks(generator, broken=True)]
        kernels = [kernel for stack in layers for kernel in stack]
        return Finding(
            value=gap,
            as_stated=gap <= ROUNDING,
            numbers={
                **needed(contrast),
                "violated_triples_share": float(np.mean([violated_share(kernel) for kernel in kernels])),
                "largest_monotonicity_gap": max(monotonicity_gap(kernel) for kernel in kernels),
            },
            instances=self.directions * len(layers),
        )


@CLAIMS.register("rollout-2602.16837/proposition-4.2")
class PrimacyDrift(Proposition):
    """Deeper means earlier."""

    source = "Proposition 4.2, section 4"
    statement = "Every prefix mass of the last row grows with each further layer: F_k(rho^(t+1)) >= F_k(rho^(t))."
    computed = "largest fall of any prefix mass when a layer is added (0 if the drift is always towards primacy)"
    sharper = (
        f"{NEEDED}; but a layer added below all others needs causality only (largest fall on such kernels "
        "{largest_fall_layer_added_below:.0e})"
    )

    def drift(self, stack: Kernels, generator: np.random.Generator) -> float:
        """Largest fall of a prefix mass from one depth to the next, a layer added on top."""
        return primacy_drift(stack, generator.uniform(0.05, 1, DEPTH))

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Also the largest fall when a layer is put under the others, on kernels that are not monotone."""
        found, falls = super().examine(generator, broken=broken), []
        for mask in (Causal(), SlidingWindow(WINDOW)):
            steps = transitions(disordered_stack(mask, generator), [0.5] * DEPTH)
            laws = [last_row(steps[start:]) for start in range(DEPTH)]
            falls += [dominance_gap(shallow, deep) for deep, shallow in pairwise(laws)]
        return replace(found, numbers={"largest_fall_layer_added_below": max(falls), **found.numbers})


def primacy_drift(kernels: Kernels, mixing: Float64[np.ndarray, "layers"]) -> float:
    """Largest fall of a prefix mass of the last row from one depth to the next."""
    return max(dominance_gap(*pair) for pair in pairwise(rollouts(transitions(kernels, mixing))[:, -1]))


@CLAIMS.register("rollout-2602.16837/proposition-4.3")
class ResidualDrift(Proposition):
    """Stronger residual connections mean more recency."""

    source = "Proposition 4.3, section 4"
    statement = "Less attention mixing in every layer (m_l <= m'_l) gives a more recent profile: F_k(rho) <= F_k(rho')."
    computed = "largest excess of F_k with less mixing over F_k with more (0 if always more recent)"

    def drift(self, stack: Kernels, generator: np.random.Generator) -> float:
        """Excess of the prefix masses with less mixing, in some of the layers."""
        more = generator.uniform(0, 1, DEPTH)
        less = more * np.where(some_layers(generator), generator.uniform(0, 1, DEPTH), 1.0)
        return dominance_gap(*(last_row(transitions(stack, mixing)) for mixing in (less, more)))


@CLAIMS.register("rollout-2602.16837/proposition-4.4")
class EncodingDrift(Claim):
    """Recency-favouring positional logits mean more recency."""

    source = "Proposition 4.4, section 4"
    statement = "Positional logits that grow with the key's position make the profile more recent: every F_k falls."
    assumptions = (MONOTONE, CAUSAL, "positional logits that do not fall with the key's position")
    broken_by = "the positional logits fall with the key's position: they favour early keys"
    computed = "largest excess of F_k with the encoding over F_k without (0 if always more recent)"
    sharper = NEEDED

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Largest excess of F_k with the encoding over F_k without, kernels averaged over shuffled content."""
        masks = (Causal(), SlidingWindow(WINDOW))
        sign = -1 if broken else 1
        gap = max(_encoding_drift(masks[number % 2], generator, sign=sign, shuffled=True) for number in range(STACKS))
        contrast = [_encoding_drift(masks[number % 2], generator, sign=1, shuffled=False) for number in range(STACKS)]
        return Finding(
            value=gap,
            as_stated=gap <= ROUNDING,
            numbers=needed(contrast),
            instances=STACKS,
        )


def _encoding_drift(mask: Mask, generator: np.random.Generator, *, sign: int, shuffled: bool) -> float:
    """Excess of the prefix masses with the encoding in some layers; content `shuffled` (monotone mean) or as drawn."""
    plain, encoded = [], []
    for chosen in some_layers(generator):
        bias = sign * np.cumsum(generator.exponential(0.3, (N_POSITIONS, N_POSITIONS)), axis=1) * chosen
        if shuffled:
            without, with_bias = averaged_kernels(mask, bias, generator)
        else:
            content = generator.normal(0, CONTENT_SPREAD, bias.shape)
            visible = mask.visible(N_POSITIONS)
            without, with_bias = masked_softmax(visible, content), masked_softmax(visible, content + bias)
        mixing = generator.uniform(0.05, 1)
        plain.append(transition(without, mixing))
        encoded.append(transition(with_bias, mixing))
    return dominance_gap(last_row(encoded), last_row(plain))


def averaged_kernels(
    mask: Mask, bias: Float64[np.ndarray, "n n"], generator: np.random.Generator
) -> tuple[Float64[np.ndarray, "n n"], Float64[np.ndarray, "n n"]]:
    """Mean attention over a data set without and with positional logits.

    A row's inputs are all cyclic shifts of random content over its visible keys, so that the mean without encoding is
    exactly uniform, hence monotone, while no single input's attention is.
    """
    visible = mask.visible(N_POSITIONS)
    without, encoded = np.zeros(visible.shape), np.zeros(visible.shape)
    for query in range(N_POSITIONS):
        keys = np.flatnonzero(visible[query])
        content = generator.normal(0, CONTENT_SPREAD, len(keys))
        shifted = np.stack([np.roll(content, shift) for shift in range(len(keys))])
        for target, logits in ((without, shifted), (encoded, shifted + bias[query, keys])):
            target[query, keys] = masked_softmax(np.ones(logits.shape, dtype=bool), logits).mean(axis=0)
    return without, encoded


@CLAIMS.register("rollout-2602.16837/proposition-4.5")
class DiagonalDrift(Proposition):
    """Content that favours or shuns the query's own position."""

    source = "Proposition 4.5, section 4"
    statement = "Content c0 + c [i = j]: c >= 0 in all layers lowers every F_k (recency), c <= 0 raises them (primacy)."
    assumptions = (MONOTONE + ", of the baseline without diagonal content", CAUSAL)
    computed = "largest drift of a prefix mass against the sign of c (0 if the sign decides)"
    directions = 2

    def drift(self, stack: Kernels, generator: np.random.Generator) -> float:
        """Drift against the sign of diagonal content in some of the layers."""
        mixing = generator.uniform(0.05, 1, DEPTH)
        strengths = np.where(some_layers(generator), generator.exponential(1.5, DEPTH), 0.0)
        return diagonal_drift(stack, mixing, strengths)


def diagonal_drift(
    kernels: Kernels, mixing: Float64[np.ndarray, "layers"], strengths: Float64[np.ndarray, "layers"]
) -> float:
    """Largest drift against the sign of a diagonal logit."""
    own = np.eye(len(kernels[0]), dtype=bool)
    laws = []
    for sign in (0, 1, -1):
        factors = [np.where(own, np.exp(sign * strength), 1.0) for strength in strengths]
        tilted = [kernel * factor for kernel, factor in zip(kernels, factors, strict=True)]
        laws.append(last_row(transitions([each / each.sum(axis=1, keepdims=True) for each in tilted], mixing)))
    baseline, positive, negative = laws
    return max(dominance_gap(positive, baseline), dominance_gap(baseline, negative))


DRAWS = 200
"""Random kernels and laws for each lemma."""
UNORDERED_ROWS = "kernels from random content, whose rows are not ordered"


def lemma_kernel(generator: np.random.Generator, *, broken: bool) -> Float64[np.ndarray, "n n"]:
    """A monotone kernel; a random one where the assumption is violated."""
    if broken:
        return random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=CONTENT_SPREAD)
    return random_monotone_kernel(N_POSITIONS, generator)


class Lemma(Claim):
    """A statement about one random draw at a time: it holds if no draw violates it."""

    sharper = (
        "without the assumption it fails in {violated_without_the_assumption:.0%} of draws, by up to "
        "{largest_without_the_assumption:.2g}"
    )

    @abstractmethod
    def gap(self, generator: np.random.Generator, *, broken: bool) -> float:
        """Violation of the statement by one draw; 0 if it holds."""

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Largest gap over draws, beside the gaps where the assumption is violated."""
        gap = max(self.gap(generator, broken=broken) for _ in range(DRAWS))
        without = [self.gap(generator, broken=True) for _ in range(DRAWS)]
        violated = float(np.mean([each > ROUNDING for each in without]))
        return Finding(
            value=gap,
            as_stated=gap <= ROUNDING,
            numbers={"violated_without_the_assumption": violated, "largest_without_the_assumption": max(without)},
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
        recent = generator.dirichlet(np.full(N_POSITIONS, 0.3))
        # Some of its mass moved to smaller positions.
        earlier = recent @ random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=1.0)
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
        backwards = random_content_kernel(Causal().visible(N_POSITIONS), generator, spread=CONTENT_SPREAD)
        early = random_content_kernel(everything, generator, spread=CONTENT_SPREAD) if broken else recent @ backwards
        law = generator.dirichlet(np.full(N_POSITIONS, 0.3))
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


BOUNDED = "Assumption 5.1: bounded query and key weights"
VALUES = "Assumption 5.2: summable excess norm of the value maps"
BIAS = "Assumption 5.3: bounded range of positional logits within a row"
WEIGHTS_GROW = "Assumption 5.1 violated: query and key weights grow with depth, so attention closes on the diagonal"

FEW_POSITIONS = 12
LAYERS = 400
SLOPES = (0.0, 0.1)
"""ALiBi slopes: range of positional logits 0 and 1.1."""
SEEDS = 2


def residual_runs(
    mixing: Float64[np.ndarray, "layers"], generator: np.random.Generator, *, violation: Violation = "none"
) -> list[tuple[float, Run]]:
    """Random residual networks with the given mixing: widths, norms, slopes and draws. Each with its slope."""
    visible, runs = Causal().visible(FEW_POSITIONS), []
    for size in SETTINGS:
        for slope in SLOPES:
            network = Network(visible, mixing, bias=decay_logits(FEW_POSITIONS, slope), violation=violation)
            runs += [(slope, run) for run in random_runs(network, generator, sizes=[size], draws=SEEDS)]
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
        mixing = np.full(LAYERS, 0.3)
        runs = residual_runs(mixing, generator, violation="values" if broken else "none")
        states = [run.largest_state / run.state_bound for _, run in runs]
        bounds = [np.exp(-2 * run.content_bound - slope * (FEW_POSITIONS - 1)) / FEW_POSITIONS for slope, run in runs]
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
        mixing = np.full(LAYERS, 0.3) if broken else 0.5 / np.arange(1.0, LAYERS + 1) ** 2
        products = np.cumprod(1 - mixing)
        runs = residual_runs(mixing, generator)
        diagonals = [np.diagonal(run.rolled, axis1=1, axis2=2) for _, run in runs]
        ratio = min(float((diagonal / products[:, None]).min()) for diagonal in diagonals)
        exact = max(
            float(np.abs(diagonal / np.cumprod(1 - mixing[:, None] * (1 - own), axis=0) - 1).max())
            for diagonal, own in zip(
                diagonals, (np.diagonal(run.kernels, axis1=1, axis2=2) for _, run in runs), strict=True
            )
        )
        return Finding(
            value=float(products[-1]),
            as_stated=bool(ratio * SLACK >= 1 and products[-1] > LIMIT_REST),
            numbers={
                "layers": LAYERS,
                "product": float(products[-1]),
                "smallest_diagonal": min(float(diagonal[-1].min()) for diagonal in diagonals),
                "smallest_ratio": ratio,
                "exact_product_relative_error": exact,
            },
            instances=len(runs),
        )


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
        schedules = {"constant": np.full(LAYERS, 0.3), "harmonic": 0.5 / np.arange(1.0, LAYERS + 1)}
        ratios, sharp, rests = [], [], {}
        for name, mixing in schedules.items():
            outside = []
            for _, run in residual_runs(mixing, generator, violation=violation):
                rolled = run.rolled
                outside.append(float(rolled[-1, :, 1:].sum(axis=1).max()))
                ratios.append(drained_ratio(rolled, mixing, run.smallest_entry))
                sharp.append(drained_ratio(rolled, mixing, run.smallest_entry, by_position=True))
            rests[name] = max(outside)
        return Finding(
            value=rests["constant"],
            as_stated=max(ratios) <= SLACK and rests["constant"] < LIMIT_REST,
            numbers={
                "layers": LAYERS,
                "largest_ratio": max(ratios),
                "sharper_ratio": max(sharp),
                "mass_left_constant": rests["constant"],
                "mass_left_harmonic": rests["harmonic"],
            },
            instances=len(ratios),
        )


def drained_ratio(
    rolled: Float64[np.ndarray, "layers n n"],
    mixing: Float64[np.ndarray, "layers"],
    epsilon: float,
    *,
    by_position: bool = False,
) -> float:
    """Largest R_ij over prod_l (1 - eps m_l), j > 0, over layers; `by_position`: over prod_l (1 - j eps m_l)."""
    drains = np.arange(1.0, rolled.shape[-1]) if by_position else np.ones(rolled.shape[-1] - 1)
    steps = np.log1p(-np.minimum(mixing[:, None] * epsilon * drains, 1 - 1e-16))
    return worst_ratio(rolled.max(axis=1)[:, 1:], np.cumsum(steps, axis=0))
