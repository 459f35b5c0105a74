"""Theories of a model beside one measured prompt: each that applies as a profile, the others with the reason.

Of the architecture alone: attention only, the residual rollout with measured mixing, its continuous limit. From a
prompt's forward activations: the rollout of the model's own attention and the power rollout. At initialisation: mean
field.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture import Architecture
from posbias.comparison.stored import SubjectProfile
from posbias.errors import UsageError
from posbias.measurement.prompt import PromptMeasurement
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.theory import predict
from posbias.theory.mean_field import SampledHeads, mean_field, network_profiles, spec_of
from posbias.theory.mean_field.prediction import resolve_level
from posbias.theory.power_rollout import PowerRollout, attention_rollout_prompt
from posbias.theory.power_rollout.rollout import Trace, trace_model


def with_theories(
    measured: PromptMeasurement,
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    *,
    initialisation: int | None,
    traced: Callable[[], Trace] | None,
) -> PromptMeasurement:
    """A prompt's measurement with the theories that read the prompt, the rollouts from one forward pass.

    Args:
        measured: The prompt on the model, in the state that it is in.
        model: The same.
        token_ids: The prompt.
        initialisation: Its number, which seeds mean field's sampled heads; None: trained, mean field does not apply.
        traced: The prompt's pass, if it was kept (`traced_beside`).
    """
    traced = cache(traced or partial(trace_model, model, token_ids))
    mixing = measured.mixing.get("token_mean", np.empty(0))

    def attention_rollout() -> np.ndarray:
        trace = None
        with suppress(UsageError):  # no dense decoder: by a pass of its own
            trace = traced()
        return attention_rollout_prompt(model, token_ids, mixing.tolist(), trace)

    theories: dict[str, Callable[[], np.ndarray]] = {"power_rollout": lambda: PowerRollout().profile_of(traced())}
    if mixing.size:
        theories["attention_rollout"] = attention_rollout
    if initialisation is not None:
        theories["mean_field"] = lambda: _mean_field(model, Prompts(token_ids[None]), initialisation)
    found, left_out = _applicable(theories)
    networks = found.get("mean_field")
    if networks is not None:
        found["mean_field"] = networks.mean(axis=0)
    return replace(measured, theories=found, networks=networks, left_out=[*measured.left_out, *left_out])


def architecture_theories(
    model: Model, n_positions: int, mixing: Float64[np.ndarray, "layers"] | None
) -> tuple[dict[str, SubjectProfile], list[str]]:
    """Predictions from the architecture and measured mixing, by name, and why each other does not apply."""
    if mixing is None:
        return {}, ["theories of the architecture: the model's family has no description"]
    try:
        architecture = Architecture.from_model(model, mixing=mixing)
    except UsageError as error:  # some layers have no attention
        return {}, [f"theories of the architecture: {error}"]
    found, left_out = _applicable(
        {
            name: lambda name=name: predict(architecture, n_positions, theory=name).profile.influence  # type: ignore[misc]
            for name in ("attention_only", "rollout", "continuous")  # `closed_form` equals `rollout` where both apply
        }
    )
    return {name: SubjectProfile(Profile(influence)) for name, influence in found.items()}, left_out


def _mean_field(model: Model, prompt: Prompts, seed: int) -> Float64[np.ndarray, "network n_positions"]:
    """At the level its logits call for; the prompt tells which tokens repeat, which matters (W1 .04 without it).

    An audit averages the profiles of single initialisations: where heads are drawn these are of networks, too.
    """
    spec = spec_of(model)
    level = resolve_level(spec, "auto", prompt.n_positions)
    if not isinstance(level, SampledHeads):
        return mean_field(spec, prompt.n_positions, prompts=prompt, level=level).profile.influence[None]
    # 64 heads per layer at every initialisation, as networks of the model's own.
    count = max(2, 64 // max(layer.attention.heads for layer in spec.layers))
    return network_profiles(spec, prompt.n_positions, prompts=prompt, count=count, seed=seed)


def _applicable(theories: dict[str, Callable[[], np.ndarray]]) -> tuple[dict[str, np.ndarray], list[str]]:
    found: dict[str, np.ndarray] = {}
    left_out: list[str] = []
    for name, compute in theories.items():
        try:
            found[name] = compute()
        except UsageError as error:
            left_out.append(f"{name}: {error}")
    return found, left_out
