"""Mitigation of position bias in finished models, judged by position, with "do not apply" as a possible verdict."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posbias.mitigation.methods.applying import answering_under, mitigated, resolve_method
    from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, PromptMitigation
    from posbias.mitigation.plan import MitigateOptions
    from posbias.mitigation.result import MitigationTrial
    from posbias.mitigation.run import mitigate


_HOMES = {
    **dict.fromkeys(("answering_under", "mitigated", "resolve_method"), "methods.applying"),
    **dict.fromkeys(("MITIGATIONS", "Mitigation", "PromptMitigation"), "methods.base"),
    "MitigateOptions": "plan",
    "MitigationTrial": "result",
    "mitigate": "run",
}


def __getattr__(name: str) -> Any:
    """A name of another module, imported when it is asked for: an evaluation without methods needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
