"""Key biases for a model's own initialisation: a quick mean field is searched, the full one corrects, networks judge.

The quick one takes attention as if all contents were equal, on wide bins: hundredths of a second at 2048 positions. The
full one is the level that the model needs: first order, or sampled heads where logits are large. Their quotient changes
slowly with the design, so it is held while the quick one is searched again, until the full one says that nothing more
is gained (space mapping: Bandler et al. 2004).
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture, Encoding, GammaKey
from posbias.comparison.distances import Sample, compare_with_prompts
from posbias.designing.result import Design, MeasuredNetworks
from posbias.designing.solving import Problem, misfit_of
from posbias.errors import UsageError
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.networks import reinitialise
from posbias.profiles import Profile
from posbias.progress import announce, track
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field import SampledHeads, mean_field, spec_of
from posbias.theory.mean_field.bins import MOST_BINS, Bins, growing_bins
from posbias.theory.mean_field.prediction import resolve_level
from posbias.theory.mean_field.recursion import Level, Setting, ValueOnly, input_kernel, run_backward, run_forward
from posbias.theory.mean_field.spec import MeanFieldSpec

QUICK_WIDTH = 0.06
"""Width of a quick bin over its position: norms agree within a few percent, which the correction takes away."""
ROUNDS = 6
"""Most searches, each after a correction."""
GAIN = 0.9
"""Another round, as long as the full theory's misfit falls below this share of the one before."""
SAMPLED_SHARE = 8
"""Divisor of the number of heads that mean field draws by itself: a correction averaged over bins has less noise."""
KIND = "jacobian(probes=8)"
"""What is measured of networks that a design never saw."""
Vector = Float64[np.ndarray, "n_positions"]
Values = Float64[np.ndarray, "_"]


@dataclass(frozen=True, eq=False)
class Initialisation:
    """A model at initialisation, and its mean-field profiles under key biases."""

    model: Model
    seed: int = 0
    """Seed of sampled heads, the same for every design, so that designs compare."""
    full_profiles: dict[tuple[str, int], Vector] = field(init=False, default_factory=dict)
    """Full profiles that were computed, by the biases and the length."""

    @cached_property
    def spec(self) -> MeanFieldSpec:
        """The model as it is, without key biases."""
        return spec_of(self.model)

    def keyed(self, architecture: Architecture) -> MeanFieldSpec:
        """The model with the gamma keys of an architecture added, layer by layer."""
        layers = []
        for layer, groups in zip(self.spec.layers, architecture.head_groups, strict=True):
            bias, attention = groups[0].encoding, layer.attention
            if isinstance(bias, GammaKey):
                attention = replace(attention, encoding=_beside(attention.encoding, attention.heads, bias))
            layers.append(replace(layer, attention=attention))
        return replace(self.spec, layers=tuple(layers))

    def level(self, n_positions: int) -> Level:
        """The level that the full theory computes."""
        chosen = resolve_level(self.spec, "auto", n_positions)
        return SampledHeads(-(-chosen.heads // SAMPLED_SHARE)) if isinstance(chosen, SampledHeads) else chosen

    @property
    def reach(self) -> float:
        """The longest context that the full theory and the model hold."""
        single = isinstance(self.level(2), SampledHeads) or self.spec.single_positions
        return min(MOST_BINS if single else np.inf, self.model.max_positions or np.inf)

    def full(self, architecture: Architecture, n_positions: int) -> Vector:
        """The profile at the level that the model needs."""
        key = str(architecture.describe()), n_positions
        if key not in self.full_profiles:
            level = self.level(n_positions)
            prediction = mean_field(self.keyed(architecture), n_positions, level=level, seed=self.seed)
            self.full_profiles[key] = prediction.profile.influence
        return self.full_profiles[key]

    def quick(self, architecture: Architecture, n_positions: int) -> Vector:
        """The profile by values alone, on wide bins."""
        spec, bins = self.keyed(architecture), self.bins(n_positions)
        level, setting = ValueOnly(), Setting(bins, spec.width, np.random.default_rng(self.seed))
        forward = run_forward(spec, input_kernel(spec, bins), level, setting)
        norms = np.sqrt(bins.spread(run_backward(spec, forward, level, setting).same))
        return np.asarray(norms / norms.sum())

    def bins(self, n_positions: int) -> Bins:
        """Wide bins of a context."""
        return growing_bins(n_positions, relative_width=QUICK_WIDTH, windows=self.spec.windows(n_positions))

    def correction(self, architecture: Architecture, n_positions: int) -> Vector:
        """The full profile over the quick one, averaged in logarithms over each bin."""
        gaps = np.log(self.full(architecture, n_positions)) - np.log(self.quick(architecture, n_positions))
        bins = self.bins(n_positions)
        return np.asarray(np.exp(bins.spread(np.add.reduceat(gaps, bins.starts) / bins.sizes)))


def _beside(encoding: Encoding, heads: int, bias: GammaKey) -> GammaKey:
    """A gamma key beside slopes: -slope (i - j) is slope j and what is the same for all keys of a query."""
    slopes = encoding.linear_slopes(heads)
    if slopes is None:
        raise UsageError(f"no theory has a key bias beside {encoding}; allowed: none and alibi")
    return replace(bias, slope=tuple((slopes + bias.slope).tolist()))


def solve_at_initialisation(born: Initialisation, problem: Problem, *, starts: int, seed: int) -> Values:
    """The values of the free parameters whose full profiles are nearest to the target, at lengths within the reach."""
    lengths, target = problem.lengths, problem.target
    corrections = dict.fromkeys(lengths, np.ones(1))

    def corrected(architecture: Architecture, n_positions: int) -> Vector:
        return np.asarray(born.quick(architecture, n_positions) * corrections[n_positions])

    problem = replace(problem, profile=corrected)
    near: Values | None = None
    best, least = np.empty(0), np.inf
    for index in range(ROUNDS):
        near = problem.solve(starts=starts, seed=seed, near=near)
        nearest = problem.architecture(near)
        misfit = float(np.mean([misfit_of(born.full(nearest, n), target)[0] for n in lengths]))
        announce(f"search {index + 1}: rms log deviation from the target {np.sqrt(misfit):.4f} in full mean field")
        enough = misfit > GAIN * least
        if misfit < least:
            best, least = near, misfit
        if enough:
            break
        corrections = {n: born.correction(nearest, n) for n in lengths}
    return best


def measure_design(design: Design, model: HuggingFaceModel, prompts: Prompts, *, seed: int = 0) -> MeasuredNetworks:
    """Measure the designed model and the model as it was on fresh initialisations, one for each prompt.

    Args:
        design: A key bias.
        model: A model whose configuration counts; its weights are drawn anew, network k with the seed `seed` + k.
        prompts: At least two, of any length that the key bias reaches.
        seed: Seed of initialisations, probes and halvings.
    """
    target = design.target.shape(prompts.n_positions)
    # The residual stream decides the last position, unless the target says what is there.
    counted = slice(None if design.target.whole else -1)
    (kind,) = resolve_kinds(KIND)
    rows: dict[str, list[np.ndarray]] = {"designed": [], "before": []}
    for index, ids in enumerate(track(prompts.token_ids, f"measuring initialisations at {prompts.n_positions}")):
        network = reinitialise(model, seed + index)
        for state, context in (
            ("designed", intervened(network, design.intervention)),
            ("before", nullcontext(network)),
        ):
            with context as changed:
                norms = measure_prompt(changed, ids, kinds=[kind], key=(seed, index), options=PassOptions()).norms
            rows[state].append(norms[kind.name] / norms[kind.name].sum())
    designed, before = np.stack(rows["designed"]), np.stack(rows["before"])
    generator = np.random.default_rng(seed)
    aim = Profile.normalised(target[counted])
    # Networks are averaged before they are normalised again.
    samples = [Sample.of(part, scales=part.sum(axis=1)) for part in (designed[:, counted], before[:, counted])]
    after, was = (compare_with_prompts(aim, part, generator=generator) for part in samples)
    return MeasuredNetworks(designed, before, after.distance, was.distance, noise=after.noise.mean)
