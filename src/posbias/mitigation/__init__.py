"""Mitigation of position bias in finished models, judged by position, with "do not apply" as a possible verdict."""

from posbias.mitigation import channel, key_bias, passages, positions, prompts
from posbias.mitigation.applying import answering_under, mitigated, resolve_method
from posbias.mitigation.base import MITIGATIONS, Mitigation, PromptMitigation

__all__ = [
    "MITIGATIONS",
    "Mitigation",
    "PromptMitigation",
    "answering_under",
    "channel",
    "key_bias",
    "mitigated",
    "passages",
    "positions",
    "prompts",
    "resolve_method",
]
