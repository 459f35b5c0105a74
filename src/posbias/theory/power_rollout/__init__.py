"""Power rollout: position influence in trained models from squared attention and squared local maps."""

from posbias.theory.power_rollout.actual_attention import (
    ROLLOUTS,
    AttentionRollout,
    AttentionRollouts,
    attention_rollout,
    attention_rollout_of,
    attention_rollout_prompt,
    attention_rollouts,
)
from posbias.theory.power_rollout.ingredient_table import INGREDIENTS, WHOLE, IngredientTable, ingredients
from posbias.theory.power_rollout.prompt_trace import trace_passing
from posbias.theory.power_rollout.rollout import (
    PowerRollout,
    PowerRolloutSettings,
    combine_prompts,
    power_rollout,
    power_rollout_of,
    power_rollout_prompt,
)
from posbias.theory.power_rollout.shared_direction import SharedDirectionRollout, shared_direction_rollout
from posbias.theory.power_rollout.sign_randomised import SignRandomised, sign_randomised_rollout
from posbias.theory.power_rollout.value_path import ValuePathShare, value_path_share

__all__ = [
    "INGREDIENTS",
    "ROLLOUTS",
    "WHOLE",
    "AttentionRollout",
    "AttentionRollouts",
    "IngredientTable",
    "PowerRollout",
    "PowerRolloutSettings",
    "SharedDirectionRollout",
    "SignRandomised",
    "ValuePathShare",
    "attention_rollout",
    "attention_rollout_of",
    "attention_rollout_prompt",
    "attention_rollouts",
    "combine_prompts",
    "ingredients",
    "power_rollout",
    "power_rollout_of",
    "power_rollout_prompt",
    "shared_direction_rollout",
    "sign_randomised_rollout",
    "trace_passing",
    "value_path_share",
]
