"""Theories that read a loaded model rather than an architecture; torch is imported when one is used.

`power_rollout` and `shared_direction` need prompts, for they follow the forward activations; `mean_field` describes the
model's initialiser.
"""

from typing import Any

from posbias.errors import UsageError
from posbias.theory.predict import THEORIES, Forecast


@THEORIES.register("power_rollout")
def power_rollout_theory(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """Energies through a trained model: squared attention, values, keys and MLPs (docs/theory, section 5)."""
    from posbias.theory.power_rollout import power_rollout

    _check(subject, prompts, "power_rollout", n_positions)
    return Forecast(power_rollout(subject, prompts).profile.influence, None)


@THEORIES.register("shared_direction")
def shared_direction_theory(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """The power rollout with what positions share carried exactly: closer, at the price of a measurement."""
    from posbias.theory.power_rollout import shared_direction_rollout

    _check(subject, prompts, "shared_direction", n_positions)
    return Forecast(shared_direction_rollout(subject, prompts).profile.influence, None)


@THEORIES.register("mean_field")
def mean_field_theory(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """Jacobian norms at initialisation, from the variances of the model's own weights (docs/theory, section 4)."""
    from posbias.theory.mean_field import mean_field

    return Forecast(mean_field(_at_birth(subject), n_positions, prompts=prompts).profile.influence, None)


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
