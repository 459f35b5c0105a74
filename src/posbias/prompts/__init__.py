"""Texts and token ids to measure on."""

from posbias.prompts.chat import ChatPrompts, chat_prompts
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts, PromptSource, TokenModel, shuffled, synthetic_prompts

__all__ = [
    "ChatPrompts",
    "PromptSource",
    "Prompts",
    "TokenModel",
    "chat_prompts",
    "load_prompts",
    "shuffled",
    "synthetic_prompts",
]
