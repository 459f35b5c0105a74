"""Power rollout: position influence in trained models from squared attention and squared local maps."""

from posbias.theory.power_rollout.actual_attention import (
    ROLLOUTS,
    AttentionRollout,
    AttentionRollouts,
    attention_rollout,
    attention_rollout_prompt,
    attention_rollouts,
)
from posbias.theory.power_rollout.rollout import (
    INGREDIENTS,
    WHOLE,
    IngredientTable,
    PowerRollout,
    ingredients,
    power_rollout,
    power_rollout_of,
    power_rollout_prompt,
)
from posbias.theory.power_rollout.shared_direction import SharedDirection, shared_direction_rollout
from posbias.theory.power_rollout.signed_walks import (
    SignRandomised,
    ValuePath,
    sign_randomised_rollout,
    value_path_share,
)

__all__ = [
    "INGREDIENTS",
    "ROLLOUTS",
    "WHOLE",
    "AttentionRollout",
    "AttentionRollouts",
    "IngredientTable",
    "PowerRollout",
    "SharedDirection",
    "SignRandomised",
    "ValuePath",
    "attention_rollout",
    "attention_rollout_prompt",
    "attention_rollouts",
    "ingredients",
    "power_rollout",
    "power_rollout_of",
    "power_rollout_prompt",
    "shared_direction_rollout",
    "sign_randomised_rollout",
    "value_path_share",
]
