"""What the power rollout is made of: its prediction with one ingredient left out at a time.

The distance each costs to the measured profile is the ingredient table of docs/theory, section 5. All predictions of a
prompt share its forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.probes import check_request, check_target
from posbias.theory.power_rollout.prompt_trace import trace_model
from posbias.theory.power_rollout.walk import THEORY

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


@dataclass(frozen=True, eq=False)
class IngredientTable:
    """Predictions with nothing (`WHOLE`) and with each ingredient left out, by name, for a set of prompts."""

    profiles: dict[str, Profile]
    """Means over normalised prompts, with pointwise intervals over prompts."""
    per_prompt: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Each prompt's own profile; rows sum to 1."""
    target: str


@checked
def ingredients(
    model: Model,
    prompts: Prompts,
    *,
    names: Sequence[str] = tuple(INGREDIENTS),
    target: str = "jacobian",
) -> IngredientTable:
    """Predict with the diagonal power rollout as it is, and without each of its ingredients.

    Args:
        model: A Hugging Face model of any described family, or a reference model.
        prompts: Equally long prompts.
        names: Ingredients to leave out, one at a time, of INGREDIENTS.
        target: One of TARGETS.

    Returns:
        A profile per ingredient that was left out, and `WHOLE`.

    Raises:
        UsageError: undescribed family, unknown ingredient or target, prompts too long for the model.
        RunError: activations or energies are not finite.

    Source: docs/theory, section 5.
    """
    check_request(model, prompts, target=target)
    rows = [
        ingredients_prompt(model, ids, names=names, target=target) for ids in track(prompts.token_ids, "ingredients")
    ]
    per_prompt = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    profiles = {name: Profile.mean_of(values) for name, values in per_prompt.items()}
    return IngredientTable(profiles, per_prompt, target)


def ingredients_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    *,
    names: Sequence[str] = tuple(INGREDIENTS),
    target: str = "jacobian",
) -> dict[str, Float64[np.ndarray, "n_positions"]]:
    """One prompt's profiles, by what was left out; pure, so that a caller may keep them and resume elsewhere.

    Args:
        model: As for `ingredients`.
        token_ids: One prompt.
        names: As for `ingredients`.
        target: As for `ingredients`.

    Returns:
        Non-negative profiles that sum to 1, `WHOLE` first.
    """
    check_target(target)
    for name in names:
        if name not in INGREDIENTS:
            raise UsageError(f"unknown ingredient {name!r} of the power rollout; known: {', '.join(INGREDIENTS)}")
    trace = trace_model(model, token_ids, target=target)
    profiles = {}
    for name, change in {WHOLE: {}, **{name: INGREDIENTS[name] for name in names}}.items():
        influence = trace.diagonal(replace(THEORY, **change)).cpu().numpy()
        if not np.all(np.isfinite(influence)) or influence.sum() <= 0:
            raise RunError(f"energies of the power rollout without {name!r} are not finite and positive")
        profiles[name] = np.asarray(influence / influence.sum())
    return profiles
