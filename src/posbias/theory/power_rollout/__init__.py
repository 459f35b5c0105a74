"""Power rollout: position influence in trained models from squared attention and squared local maps."""

from posbias.theory.power_rollout.actual_attention import AttentionRollout, attention_rollout, attention_rollout_prompt
from posbias.theory.power_rollout.description import SUPPORTED
from posbias.theory.power_rollout.rollout import (
    PowerRollout,
    PowerRolloutSettings,
    combine_prompts,
    power_rollout,
    power_rollout_prompt,
)

__all__ = [
    "SUPPORTED",
    "AttentionRollout",
    "PowerRollout",
    "PowerRolloutSettings",
    "attention_rollout",
    "attention_rollout_prompt",
    "combine_prompts",
    "power_rollout",
    "power_rollout_prompt",
]
