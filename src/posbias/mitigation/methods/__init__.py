"""The methods against position bias, one registered class each."""

# Each registers its methods.
from posbias.mitigation.methods import key_bias, passages, pine, positional_channel, rewriting, rotary  # noqa: F401
