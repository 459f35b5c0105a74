"""Which theories apply to a model in a given state, and what they predict for it.

From the architecture alone: attention only, the residual rollout with measured mixing, its continuous limit. From a
prompt's forward activations: the rollout of the model's own attention and the power rollout. At birth: mean field.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture import Architecture
from posbias.comparison import TheoryProfile
from posbias.errors import UsageError
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.theory import predict
from posbias.theory.mean_field import SampledHeads, mean_field, network_profiles, spec_of
from posbias.theory.mean_field.prediction import resolve_level
from posbias.theory.power_rollout import attention_rollout_prompt, power_rollout_prompt

ARCHITECTURE_THEORIES = ("attention_only", "rollout", "continuous")
"""Theories of the architecture with measured mixing; `closed_form` equals `rollout` wherever both apply."""

SAMPLED_HEADS = 64
"""Heads per layer that mean field draws for every birth, where it has to sample: as networks of the model's own."""

Row = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True, eq=False)
class PromptTheories:
    """Predictions that read one prompt."""

    profiles: dict[str, Row]
    left_out: list[str]
    """A sentence for each theory that does not apply."""
    networks: Float64[np.ndarray, "network n_positions"] | None = None
    """Of which mean field is the mean; a single row where it draws no heads."""


def prompt_theories(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    *,
    mixing: Float64[np.ndarray, "layers"] | None,
    birth: int | None,
) -> PromptTheories:
    """Predictions that read the prompt, by name, and a sentence for each theory that does not apply.

    Args:
        model: The model in the state that is measured.
        token_ids: The prompt.
        mixing: Measured mixing of this prompt per layer (mean over tokens); None without a family description.
        birth: Number of the birth, which seeds mean field's sampled heads; None for trained weights, of which
            mean field does not speak.
    """
    theories: dict[str, Callable[[], np.ndarray]] = {"power_rollout": lambda: power_rollout_prompt(model, token_ids)}
    if mixing is not None:
        theories["attention_rollout"] = lambda: attention_rollout_prompt(model, token_ids, mixing.tolist())
    found, left_out = _applicable(theories)
    if birth is None:
        return PromptTheories(found, left_out)
    networks, refused = _applicable({"mean_field": lambda: _mean_field(model, Prompts(token_ids[None]), birth)})
    found.update({name: rows.mean(axis=0) for name, rows in networks.items()})
    return PromptTheories(found, [*left_out, *refused], networks.get("mean_field"))


def architecture_theories(
    model: Model, n_positions: int, mixing: Float64[np.ndarray, "layers"] | None
) -> tuple[dict[str, TheoryProfile], list[str]]:
    """Predictions from the architecture and measured mixing, by name, and a sentence for each that does not apply."""
    if mixing is None:
        return {}, ["theories of the architecture: the model's family has no description"]
    architecture = Architecture.from_model(model, mixing=mixing)
    found, left_out = _applicable(
        {
            name: lambda name=name: predict(architecture, n_positions, theory=name).profile.influence  # type: ignore[misc]
            for name in ARCHITECTURE_THEORIES
        }
    )
    return {name: TheoryProfile(Profile(influence)) for name, influence in found.items()}, left_out


def _mean_field(model: Model, prompt: Prompts, seed: int) -> Float64[np.ndarray, "network n_positions"]:
    """At the level its logits call for; the prompt tells which tokens repeat, which matters (W1 .04 without it).

    An audit averages the births' own profiles, so that where heads are drawn these are profiles of networks too.
    """
    spec = spec_of(model)
    level = resolve_level(spec, "auto", prompt.n_positions)
    if not isinstance(level, SampledHeads):
        return mean_field(spec, prompt.n_positions, prompts=prompt, level=level).profile.influence[None]
    heads = max(layer.attention.heads for layer in spec.layers if layer.attention is not None)
    count = max(2, SAMPLED_HEADS // heads)
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
