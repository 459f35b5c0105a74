"""Measuring and predicting the models of arXiv 2603.10123 at initialisation: six cases, each over the same seeds.

A case is a model (Qwen2, Qwen2 without RoPE, GPT-2) on one sort of tokens. With and without RoPE share weights, prompts
and probes, so that their difference is RoPE's alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.comparison import Sample
from posbias.comparison.metrics import wasserstein
from posbias.measurement import combine, measure_prompt, resolve_kinds
from posbias.measurement.prompt import PromptMeasurement
from posbias.models import HuggingFaceModel
from posbias.papers.birth2603.models import FAMILIES, TOKENS, BirthSettings, birth_prompts, born, without_rope
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts import Prompts
from posbias.theory import closed_form, continuous_profile, predict
from posbias.theory.mean_field import mean_field

MODELS = {"qwen2": ("qwen2", "qwen2 without RoPE"), "gpt2": ("gpt2",)}
"""The models of a family, the one as built first."""
TRIAL_MIXINGS = np.geomspace(0.005, 0.9, 120)
"""Constant mixings among which the published density's best is looked for."""


@dataclass(frozen=True)
class Case:
    """One model on one sort of tokens."""

    model: str
    tokens: str

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens}"


@dataclass(frozen=True, eq=False)
class Measured:
    """A case over its initialisations."""

    case: Case
    sample: Sample
    """One normalised Jacobian profile per initialisation."""
    mixing: Float64[np.ndarray, "layers"]
    """Mean over initialisations and tokens of |a| / (|x| + |a|), every layer."""
    theories: dict[str, Profile]
    fitted_mixing: float
    """The constant mixing with which the published density comes closest."""


def measure_cases(settings: BirthSettings) -> list[Measured]:
    """Every case measured, with every theory's prediction."""
    prompts = {tokens: birth_prompts(settings, tokens) for tokens in TOKENS}
    units: dict[Case, list[PromptMeasurement]] = {}
    theories: dict[Case, Profile] = {}
    architectures: dict[Case, Callable[[np.ndarray], Architecture]] = {}
    for family, index in track(
        [(family, k) for family in FAMILIES for k in range(settings.initialisations)], "initialisations"
    ):
        for name, model in _models(family, settings, index):
            for tokens in TOKENS:
                case, chosen = Case(name, tokens), prompts[tokens][family]
                units.setdefault(case, []).append(_measure(model, chosen, index, settings))
                if index == 0:
                    repeats = None if tokens == "random" else chosen
                    theories[case] = mean_field(model, settings.n_positions, prompts=repeats).profile
                    architectures[case] = _architecture(model)
    return [
        _finished(case, measured, theories[case], architectures[case], settings) for case, measured in units.items()
    ]


def published_profiles(
    n_positions: int, mixing: Float64[np.ndarray, "layers"], measured: Float64[np.ndarray, "n_positions"]
) -> tuple[dict[str, Profile], float]:
    """The published theory, from most literal to most favourable, and the constant mixing that favours it most.

    Returns:
        `continuous` and `finite`: limit and exact form with constant mixing, the mean of the measured ones;
        `continuous_fitted`: the limit with the constant mixing nearest to the measurement in W1; `closed_form`: the
        exact form with every layer's measured mixing. And that fitted mixing.
    """
    depth, everywhere = len(mixing), np.arange(n_positions)
    constant = np.full(depth, mixing.mean())
    trials = [continuous_profile(n_positions, np.full(depth, trial)) for trial in TRIAL_MIXINGS]
    distances = [float(wasserstein(trial, measured)) for trial in trials]
    best = int(np.argmin(distances))
    profiles = {
        "continuous": Profile(continuous_profile(n_positions, constant)),
        "continuous_fitted": Profile(trials[best]),
        "finite": Profile(closed_form(n_positions, everywhere, constant)),
        "closed_form": Profile(closed_form(n_positions, everywhere, mixing)),
    }
    return profiles, float(TRIAL_MIXINGS[best])


def ones_probe_share(settings: BirthSettings) -> dict[str, float]:
    """The one-pass surrogate: gradient of the sum of the last hidden state, over that of random probes, in float64.

    Returns:
        By family the root mean square over positions of the all-ones probe's gradient, divided by that of Rademacher
        probes of the same length: 1 for a fair probe, 0 (to round-off) where the vector lies in a null space.
    """
    shares = {}
    for family in FAMILIES:
        model = born(family, settings.size, seed=settings.seed, dtype="float64")
        token_ids = birth_prompts(settings, "random")[family].token_ids[0]
        norms = [
            measure_prompt(model, token_ids, kinds=resolve_kinds([kind]), key=(settings.seed, 0)).norms["jacobian"]
            for kind in ('jacobian(probe="ones")', f"jacobian(probes={settings.probes})")
        ]
        shares[family] = float(np.linalg.norm(norms[0]) / np.linalg.norm(norms[1]))
    return shares


def _models(family: str, settings: BirthSettings, index: int) -> Iterator[tuple[str, HuggingFaceModel]]:
    """One initialisation as built, then without RoPE where it has it."""
    model = born(family, settings.size, seed=settings.seed + index)
    yield MODELS[family][0], model
    for name in MODELS[family][1:]:
        yield name, without_rope(model)


def _measure(model: HuggingFaceModel, prompts: Prompts, index: int, settings: BirthSettings) -> PromptMeasurement:
    kinds = resolve_kinds([f"jacobian(probes={settings.probes})"])
    return measure_prompt(model, prompts.token_ids[index], kinds=kinds, key=(settings.seed, index))


def _architecture(model: HuggingFaceModel) -> Callable[[np.ndarray], Architecture]:
    """The model's architecture as a function of its mixing, which is known only after all initialisations."""
    traits = model.architecture_traits()
    return lambda mixing: Architecture(**traits, mixing=mixing)


def _finished(
    case: Case,
    units: list[PromptMeasurement],
    predicted: Profile,
    architecture: Callable[[np.ndarray], Architecture],
    settings: BirthSettings,
) -> Measured:
    kinds = resolve_kinds([f"jacobian(probes={settings.probes})"])
    measurement = combine(units, kinds=kinds, seed=settings.seed)
    assert measurement.mixing is not None
    sample = Sample.of(measurement.per_prompt["jacobian"])
    published, fitted = published_profiles(settings.n_positions, measurement.mixing, sample.average)
    rollout = predict(architecture(measurement.mixing), settings.n_positions, theory="rollout").profile
    reciprocal = Profile.normalised(1 / np.arange(1.0, settings.n_positions + 1))
    theories = {**published, "rollout": rollout, "mean_field": predicted, "reciprocal": reciprocal}
    return Measured(case, sample, measurement.mixing, theories, fitted)
