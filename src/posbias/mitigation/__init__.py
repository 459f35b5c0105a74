"""Mitigation of position bias in finished models, judged by position, with "do not apply" as a possible verdict."""

from posbias.mitigation.methods.applying import answering_under, mitigated, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, PromptMitigation
from posbias.mitigation.trial.options import MitigateOptions
from posbias.mitigation.trial.result import MitigationTrial
from posbias.mitigation.trial.run import mitigate

__all__ = [
    "MITIGATIONS",
    "MitigateOptions",
    "Mitigation",
    "MitigationTrial",
    "PromptMitigation",
    "answering_under",
    "mitigate",
    "mitigated",
    "resolve_method",
]
