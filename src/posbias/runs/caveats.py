"""Bounds of the trust in a result, and why parts of it are missing, as facts: a name and numbers.

Records keep the facts; sentences are made when they are shown, so that an old run is told in today's words. An error
that a run survives carries such a fact (`refusal`, `failure`); what a server or another library says stays as it is.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from posbias.errors import RunError, UsageError
from posbias.runs.sentences import SENTENCES

Caveat = Mapping[str, Any] | str
"""`caveat`, its name, and its numbers by the names that its sentence has for them; a number may be a caveat itself.
Records of earlier versions hold sentences, which stand for themselves."""


def caveat_text(caveat: Caveat) -> str:
    """The sentence of a caveat; the entries themselves if this version does not know it."""
    if isinstance(caveat, str):
        return caveat
    try:
        return SENTENCES[caveat["caveat"]].format(**{name: _shown(value) for name, value in caveat.items()})
    except (KeyError, TypeError, ValueError):
        return str(caveat)


def _shown(value: Any) -> Any:
    """A number of a caveat as its sentence has it."""
    if isinstance(value, list):
        return ", ".join(str(_shown(entry)) for entry in value)
    return caveat_text(value) if isinstance(value, Mapping) else value


def distinct(caveats: Iterable[Caveat]) -> list[Caveat]:
    """Caveats without repetition, in their order."""
    return list({caveat_text(caveat): caveat for caveat in caveats}.values())


def caveat_facts(caveats: Iterable[Caveat]) -> dict[str, str]:
    """Sentences of caveats by the names they have in a notebook, such as "caveat 1"."""
    return {f"caveat {number}": caveat_text(caveat) for number, caveat in enumerate(caveats, 1)}


def refusal(name: str, **numbers: Any) -> UsageError:
    """The error of a request that does not apply, told by the sentence of that name; a record keeps its fact."""
    return UsageError(caveat_text(fact := _fact(name, numbers)), fact)


def failure(name: str, **numbers: Any) -> RunError:
    """The error of a run that could not be finished, told and kept in the same way."""
    return RunError(caveat_text(fact := _fact(name, numbers)), fact)


def fact_of(error: UsageError | RunError) -> Caveat:
    """The fact of an error that a run survives, for a record: its own, or somebody else's words as they are."""
    return error.fact or {"caveat": "message", "text": str(error)}


def _fact(name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """A fact whose variants, such as an intervention or a mask, are spelled."""
    kept = (type(None), bool, int, float, str, list, Mapping)
    return {"caveat": name} | {key: value if isinstance(value, kept) else str(value) for key, value in numbers.items()}
