"""Power rollout: position influence in trained models from squared attention and squared local maps."""

from posbias.theory.power_rollout.actual_attention import ROLLOUTS, attention_rollout_prompt, attention_rollouts
from posbias.theory.power_rollout.rollout import PowerRollout, trace_model
