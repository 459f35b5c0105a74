"""The power rollout: the profile that squared attention predicts for a trained model on given prompts.

Each prompt gives one profile from its own forward activations; prompts are normalised, then averaged, with an interval
over prompts. Also the same with one ingredient left out at a time: the distance each costs to the measured profile is
the ingredient table of docs/theory, section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.base import THEORIES, ModelTheory, Prediction
from posbias.theory.power_rollout.prompt_trace import PromptTrace, trace_model
from posbias.theory.power_rollout.trace import check_target
from posbias.theory.power_rollout.walk import THEORY, Walk

Row = Float64[np.ndarray, "n_positions"]
FORMS = ("diagonal", "isotropic")
WHOLE = "whole"
"""Name of the prediction with nothing left out."""
INGREDIENTS: dict[str, dict[str, Any]] = {
    "residual": {"residual": False},
    "mlp": {"mlp": False},
    "norm_position": {"even_norms": True},
    "head_gains": {"even_heads": True},
    "key_path": {"key": False},
    "squares": {"amplitudes": True},
}
"""What leaving each out changes in the walk.

residual: nothing passes by a branch; every path takes every branch in turn.
mlp: no MLP branches.
norm_position: norms of the stream and of branches divide by the mean of sigma over positions (q/k norms, and the final
    norm, which reads one position, stay).
head_gains: every head's received energy is scaled so that all heads of a layer have the layer's mean value gain
    1' N_post^2 W_O^2 W_V^2 N_in^2 1.
key_path: attention weights are constants.
squares: amplitudes add, as in the published rollout, instead of energies: where identity, branches, positions, heads,
    values and keys meet, square roots are summed, so that attention enters as A and not as A^2. Within a weight matrix
    or a norm channels still add as energies, so the local maps are the same.
"""


@THEORIES.register("power_rollout")
@dataclass(frozen=True)
class PowerRollout(ModelTheory):
    """Energies through a trained model: squared attention, values, keys and MLPs (docs/theory, section 5)."""

    form: str = "diagonal"
    """How energies are kept: "diagonal" (per residual channel) or "isotropic" (one per position)."""
    key_path: bool = True
    """Whether keys, which move the attention weights, carry influence beside the values."""
    target: str = "jacobian"
    """Which output of the last position, one of TARGETS: the whole final state, or the predicted token's score. The
    isotropic form does not know directions and gives the same profile for all."""

    def __post_init__(self) -> None:
        if not isinstance(self.key_path, bool):
            raise UsageError(f"power_rollout: key_path must be True or False, got {self.key_path!r}")
        if self.form not in FORMS:
            raise UsageError(f"unknown form {self.form!r} of the power rollout; known: {', '.join(FORMS)}")
        check_target(self.target)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The mean over prompts, with its interval."""
        self.check_reading(subject, prompts, n_positions)
        rows = [power_rollout_prompt(subject, ids, self) for ids in track(prompts.token_ids, "power rollout")]
        return self.mean_of(np.stack(rows), seed)

    def profile_of(self, trace: PromptTrace) -> Row:
        """Of a prompt that was traced for this theory's target.

        Raises:
            RunError: energies are not finite.
        """
        form = trace.diagonal if self.form == "diagonal" else trace.isotropic
        influence = np.asarray(form(Walk(key=self.key_path)).cpu().numpy())
        if not np.all(np.isfinite(influence)):
            raise RunError(
                f"the {self.form} power rollout's energies are not finite; load it in a wider type (float32, float64)"
            )
        return np.asarray(influence / influence.sum())


def power_rollout_prompt(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], theory: PowerRollout | None = None
) -> Row:
    """One prompt's predicted profile; pure, so that a caller may keep it and resume elsewhere.

    Returns:
        Non-negative, sums to 1.

    Raises:
        UsageError: undescribed family or a prompt too long for the model.
        RunError: activations or energies are not finite.
    """
    theory = theory or PowerRollout()
    return theory.profile_of(trace_model(model, token_ids, target=theory.target))


@checked
def ingredients(
    model: Model, prompts: Prompts, *, names: Sequence[str] = tuple(INGREDIENTS), target: str = "jacobian"
) -> dict[str, Float64[np.ndarray, "count n_positions"]]:
    """Predict with the diagonal power rollout as it is, and without each of its ingredients.

    Returns:
        Every prompt's own profile by what was left out, `WHOLE` (nothing) first; rows sum to 1.

    Raises:
        UsageError: undescribed family, an ingredient not among INGREDIENTS, unknown target, prompts too long.
        RunError: activations or energies are not finite.
    """
    check_target(target)
    for name in names:
        if name not in INGREDIENTS:
            raise UsageError(f"unknown ingredient {name!r} of the power rollout; known: {', '.join(INGREDIENTS)}")
    rows = [
        ingredients_of(trace_model(model, ids, target=target), names) for ids in track(prompts.token_ids, "ingredients")
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def ingredients_of(trace: PromptTrace, names: Sequence[str] = tuple(INGREDIENTS)) -> dict[str, Row]:
    """One prompt's profiles, by what was left out, all from its one forward pass; `WHOLE` first."""
    profiles = {}
    for name, change in {WHOLE: {}, **{name: INGREDIENTS[name] for name in names}}.items():
        influence = trace.diagonal(replace(THEORY, **change)).cpu().numpy()
        if not np.all(np.isfinite(influence)) or influence.sum() <= 0:
            raise RunError(f"energies of the power rollout without {name!r} are not finite and positive")
        profiles[name] = np.asarray(influence / influence.sum())
    return profiles
