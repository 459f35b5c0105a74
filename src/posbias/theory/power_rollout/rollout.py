"""`power_rollout`: the profile that squared attention predicts for a trained model on given prompts.

Each prompt gives one profile from its own forward activations; prompts are normalised, then averaged, with an
interval over prompts (docs/theory, section 5).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.prompt_trace import PromptTrace, trace_model
from posbias.theory.power_rollout.trace import TARGETS
from posbias.theory.power_rollout.walk import Walk

FORMS = ("diagonal", "isotropic")
"""How energies are kept: per residual channel, or one number per position."""


@dataclass(frozen=True)
class PowerRolloutSettings:
    """Which form of the theory, and for which output of the last position."""

    form: str = "diagonal"
    """One of FORMS."""
    key_path: bool = True
    """Whether keys, which move the attention weights, carry influence beside the values."""
    query_path: bool = False
    """Whether queries do; diagonal form only. It changes little and costs a product more per layer."""
    target: str = "jacobian"
    """One of TARGETS; the isotropic form does not know directions and gives the same profile for all."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"unknown form {self.form!r} of the power rollout; known: {', '.join(FORMS)}")
        if self.target not in TARGETS:
            raise UsageError(f"unknown target {self.target!r} of the power rollout; known: {', '.join(TARGETS)}")
        if self.query_path and self.form == "isotropic":
            raise UsageError("query_path=True needs form='diagonal', got form='isotropic'")

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class PowerRollout:
    """The prediction for a set of prompts."""

    profile: Profile
    """Mean over normalised prompts, with pointwise intervals over prompts."""
    per_prompt: Float64[np.ndarray, "count n_positions"]
    """Each prompt's own profile; rows sum to 1."""
    settings: PowerRolloutSettings


@checked
def power_rollout(
    model: Model, prompts: Prompts, *, form: str = "diagonal", key_path: bool = True, target: str = "jacobian"
) -> PowerRollout:
    """Predict how much each input position influences the last one, from forward activations alone.

    Args:
        model: A pretrained or random Hugging Face model of any described family, or a reference model.
        prompts: Equally long prompts.
        form: "diagonal" (energies per residual channel) or "isotropic" (one energy per position).
        key_path: Follow the attention weights' dependence on keys beside the values.
        target: "jacobian" (the whole final state), "probability" or "logprob" of the predicted token.

    Returns:
        The mean profile with its interval, and one profile per prompt.

    Raises:
        UsageError: undescribed family, unknown form or target, prompts too long for the model.
        RunError: activations are not finite.

    Source: docs/theory, section 5.
    """
    settings = PowerRolloutSettings(form=form, key_path=key_path, target=target)
    rows = [power_rollout_prompt(model, ids, settings) for ids in track(prompts.token_ids, "power rollout")]
    return combine_prompts(rows, settings)


def power_rollout_prompt(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], settings: PowerRolloutSettings | None = None
) -> Float64[np.ndarray, "n_positions"]:
    """One prompt's predicted profile; pure, so that a caller may keep it and resume elsewhere.

    Args:
        model: As for `power_rollout`.
        token_ids: One prompt.
        settings: Form, paths and target; None is the default.

    Returns:
        Non-negative, sums to 1.

    Raises:
        UsageError: undescribed family or a prompt too long for the model.
        RunError: activations or energies are not finite.
    """
    settings = settings or PowerRolloutSettings()
    return power_rollout_of(trace_model(model, token_ids, target=settings.target), settings)


def power_rollout_of(trace: PromptTrace, settings: PowerRolloutSettings) -> Float64[np.ndarray, "n_positions"]:
    """The predicted profile of a prompt that was traced before.

    Args:
        trace: For the target that `settings` name.
        settings: Form and paths.

    Returns:
        Non-negative, sums to 1.

    Raises:
        RunError: energies are not finite.
    """
    walk = Walk(key=settings.key_path, query=settings.query_path)
    form = trace.diagonal if settings.form == "diagonal" else trace.isotropic
    influence = np.asarray(form(walk).cpu().numpy())
    if not np.all(np.isfinite(influence)):
        raise RunError(
            f"the {settings.form} power rollout's energies are not finite; load it in a wider type (float32, float64)"
        )
    return np.asarray(influence / influence.sum())


def combine_prompts(rows: Sequence[Float64[np.ndarray, "n_positions"]], settings: PowerRolloutSettings) -> PowerRollout:
    """Average normalised prompts, with a pointwise interval over prompts.

    Args:
        rows: One profile per prompt, at least 1, equally long.
        settings: What they were computed with.

    Raises:
        UsageError: no rows.
    """
    if not rows:
        raise UsageError("the power rollout needs at least 1 prompt, got 0")
    per_prompt = np.stack(list(rows))
    return PowerRollout(Profile.mean_of(per_prompt), per_prompt, settings)
