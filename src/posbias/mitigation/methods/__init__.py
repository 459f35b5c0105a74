"""The methods against position bias, one registered class each."""

# Each registers its methods.
from posbias.mitigation.methods import (  # noqa: F401
    adapter,
    key_bias,
    passage_attention,
    pine,
    positional_channel,
    prompt_changes,
    rotary,
)
