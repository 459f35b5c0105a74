"""Texts and token ids to measure on."""

from posbias.prompts.prompts import Prompts, PromptSource
