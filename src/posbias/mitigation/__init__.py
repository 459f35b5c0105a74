"""Mitigation of position bias in finished models, judged by position, with "do not apply" as a possible verdict."""

from posbias.mitigation import channel, key_bias, passages, pine, positions, prompts
from posbias.mitigation.applying import answering_under, mitigated, resolve_method
from posbias.mitigation.arms import MitigateOptions
from posbias.mitigation.base import MITIGATIONS, Mitigation, PromptMitigation
from posbias.mitigation.run import mitigate

__all__ = [
    "MITIGATIONS",
    "MitigateOptions",
    "Mitigation",
    "PromptMitigation",
    "answering_under",
    "channel",
    "key_bias",
    "mitigate",
    "mitigated",
    "passages",
    "pine",
    "positions",
    "prompts",
    "resolve_method",
]
