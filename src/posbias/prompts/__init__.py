"""Texts and token ids to measure on."""

from posbias.prompts.controls import shuffled, synthetic_prompts
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts
from posbias.prompts.tokens import TokenModel

__all__ = ["Prompts", "TokenModel", "load_prompts", "shuffled", "synthetic_prompts"]
