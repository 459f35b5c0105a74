"""Theories that read a loaded model rather than an architecture; torch is imported when one is used.

All but `mean_field`, which describes the model's initialiser, need prompts, for they follow the forward activations
(docs/theory, sections 4 and 5).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import REPEATS
from posbias.profiles import Profile
from posbias.progress import track
from posbias.theory.predict import THEORIES, Forecast, ModelTheory


@THEORIES.register("power_rollout")
@dataclass(frozen=True)
class PowerRolloutTheory(ModelTheory):
    """Energies through a trained model: squared attention, values, keys and MLPs (docs/theory, section 5)."""

    form: str = "diagonal"
    """"diagonal" (energies per residual channel) or "isotropic" (one per position)."""
    key_path: bool = True
    """Whether keys, which move the attention weights, carry influence beside the values."""
    target: str = "jacobian"
    """"jacobian", "probability" or "logprob"."""

    def __post_init__(self) -> None:
        from posbias.theory.power_rollout import PowerRolloutSettings

        if not isinstance(self.key_path, bool):
            raise UsageError(f"power_rollout: key_path must be True or False, got {self.key_path!r}")
        PowerRolloutSettings(**self.describe())

    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """The mean over prompts, with its interval."""
        from posbias.theory.power_rollout import PowerRolloutSettings, combine_prompts, power_rollout_prompt

        _check(subject, prompts, self.name, n_positions)
        settings = PowerRolloutSettings(**self.describe())
        rows = [power_rollout_prompt(subject, ids, settings) for ids in track(prompts.token_ids, "power rollout")]
        return _of_rows(combine_prompts(rows, settings))


@THEORIES.register("shared_direction")
@dataclass(frozen=True)
class SharedDirectionTheory(ModelTheory):
    """The power rollout with what positions share carried exactly: closer, at the price of a measurement."""

    probes: int = 2
    """Random covectors at the final state, at least 2."""
    directions: int = 1
    """Shared directions, >= 0."""
    target: str = "jacobian"
    """"jacobian", "probability" or "logprob"."""

    def __post_init__(self) -> None:
        _check_target(self.target)
        check_size("probes", self.probes, REPEATS, least=2)
        check_size("directions", self.directions, REPEATS, least=0)

    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """The mean over prompts, with its interval."""
        from posbias.theory.power_rollout import shared_direction_rollout

        _check(subject, prompts, self.name, n_positions)
        return _of_rows(shared_direction_rollout(subject, prompts, **self.describe(), seed=seed))


@THEORIES.register("sign_randomised")
@dataclass(frozen=True)
class SignRandomisedTheory(ModelTheory):
    """Back-propagation with an independent random sign on every path: the reference for incoherence."""

    draws: int = 32
    """Sets of signs per prompt, at least 2."""
    target: str = "jacobian"
    """"jacobian", "probability" or "logprob"."""

    def __post_init__(self) -> None:
        _check_target(self.target)
        check_size("draws", self.draws, REPEATS, least=2)

    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """The mean over prompts, with one interval over prompts and one over draws."""
        from posbias.theory.power_rollout import sign_randomised_rollout

        _check(subject, prompts, self.name, n_positions)
        found = sign_randomised_rollout(subject, prompts, **self.describe(), seed=seed)
        profile = found.profile
        arrays = {"draws/low": found.low, "draws/high": found.high, "draws/energies": found.energies}
        spreads = {
            "half_width_over_draws": _half_width(profile.influence, found.low, found.high),
            "half_width_over_prompts": _half_width(profile.influence, profile.low, profile.high),
        }
        return Forecast(
            profile.influence, None, profile.low, profile.high, found.per_prompt, found=spreads, arrays=arrays
        )


@THEORIES.register("value_path")
@dataclass(frozen=True)
class ValuePathTheory(ModelTheory):
    """The exact Jacobian with attention weights held constant, and the share of it that passes by the weights."""

    probes: int = 8
    """Random probes of the final state per prompt, at least 2; a score's gradient needs none."""
    target: str = "jacobian"
    """"jacobian", "probability" or "logprob"."""

    def __post_init__(self) -> None:
        _check_target(self.target)
        check_size("probes", self.probes, REPEATS, least=2)

    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """The value path's profile, and ||J - J_value|| / ||J|| by position and in total."""
        from posbias.theory.power_rollout import value_path_share

        _check(subject, prompts, self.name, n_positions)
        found = value_path_share(subject, prompts, **self.describe(), seed=seed)
        norms = found.norms[..., 1]
        rows = norms / norms.sum(axis=1, keepdims=True)
        profile = Profile.mean_of(rows)
        shares = {"per_prompt": found.share, "value": found.mean_share, "low": found.low, "high": found.high}
        return Forecast(
            profile.influence,
            None,
            profile.low,
            profile.high,
            rows,
            found={
                "score_path_share": found.mean_total,
                "score_path_share_error_of_probes": float(np.linalg.norm(found.total_error) / len(rows)),
            },
            arrays={f"score_path/{name}": array for name, array in {**shares, "total": found.total}.items()},
        )


@THEORIES.register("mean_field")
@dataclass(frozen=True)
class MeanFieldTheory(ModelTheory):
    """Jacobian norms at initialisation, from the variances of the model's own weights (docs/theory, section 4)."""

    reads_prompts: ClassVar[bool] = False

    level: str = "auto"
    """`value`, `first`, `'sampled(heads=2000)'`, or `auto`."""

    def __post_init__(self) -> None:
        from posbias.theory.mean_field.levels import LEVELS

        if self.level != "auto":
            LEVELS.parse(self.level)

    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """The root mean square over initialisations; where heads are drawn, how far a single one lies from it."""
        from posbias.theory.mean_field import SampledHeads, mean_field, network_profiles, scatter_caveat, spec_of
        from posbias.theory.mean_field.networks import scatter

        model = _at_birth(subject)
        found = mean_field(model, n_positions, prompts=prompts, level=self.level, seed=seed)
        if not isinstance(found.level, SampledHeads):
            return Forecast(found.profile.influence, None)
        networks = network_profiles(spec_of(model), n_positions, prompts=prompts, seed=seed)
        return Forecast(
            found.profile.influence,
            None,
            found={
                "largest_logit_variance": float(found.logit_variance.max()),
                "distance_of_one_initialisation": scatter(networks),
            },
            arrays={"networks": networks},
            caveats=(scatter_caveat(networks),),
        )


def _of_rows(found: Any) -> Forecast:
    """The forecast of a result that holds a profile and each prompt's own."""
    profile = found.profile
    return Forecast(profile.influence, None, profile.low, profile.high, found.per_prompt)


def _half_width(middle: Any, low: Any, high: Any) -> float:
    """Half the width of a pointwise interval as a share of the profile, median over positions with influence."""
    known = middle > 0
    return float(np.median((high - low)[known] / (2 * middle[known])))


def _at_birth(subject: Any) -> Any:
    """A model as given (mean field refuses trained ones), or drawn for a Hugging Face configuration or "config:..."."""
    from posbias.models import HuggingFaceModel, Model, Origin, load_model
    from posbias.models.initialise import random_network
    from posbias.theory.mean_field import MeanFieldSpec

    if isinstance(subject, Model | MeanFieldSpec):
        return subject
    if isinstance(subject, str) and subject.startswith("config:"):
        return load_model(subject)
    if hasattr(subject, "model_type"):
        source = f"config:{subject.model_type}"
        return HuggingFaceModel(random_network(subject, seed=0), origin=Origin(source, init_seed=0))
    raise UsageError(
        f"theory mean_field needs a model (what load_model returns), a Hugging Face configuration or 'config:...', "
        f"got {type(subject).__name__}"
    )


def _check_target(target: str) -> None:
    """Refuse an output that no walk starts from."""
    from posbias.theory.power_rollout.probes import check_target

    check_target(target)


def _check(subject: Any, prompts: Any, theory: str, n_positions: int) -> None:
    """A loaded model and prompts of the length asked for."""
    from posbias.models.model import Model

    if not isinstance(subject, Model):
        raise UsageError(f"theory {theory} needs a model (what load_model returns), got {type(subject).__name__}")
    if prompts is None:
        raise UsageError(f"theory {theory} reads activations: give prompts=load_prompts(...)")
    if prompts.n_positions != n_positions:
        raise UsageError(
            f"theory {theory}: prompts of {prompts.n_positions} positions given for n_positions={n_positions}"
        )
