"""What a reader needs to judge and repeat a run: its title, the command, and the conditions it ran under."""

from collections.abc import Mapping
from typing import Any

from posbias.records import Record

LONGEST_LIST = 8
"""Values of a list that are written out; a longer one is cut, with its length given."""


def title_of(record: Record) -> str:
    """What the run is about, in a few words: `resolved["title"]`, or the model, or the verb."""
    if record.resolved.get("title"):
        return str(record.resolved["title"])
    model = record.resolved.get("model")
    if isinstance(model, Mapping) and model.get("source"):
        return str(model["source"])
    for key in ("model", "theory"):
        if record.arguments.get(key):
            return str(record.arguments[key])
    return record.verb


def command_of(record: Record) -> str:
    """The command that repeats the run: the shell line where it was recorded, otherwise the same call in Python."""
    if record.resolved.get("command"):
        return str(record.resolved["command"])
    arguments = ", ".join(f"{name}={value!r}" for name, value in record.arguments.items() if value is not None)
    return f"posbias.{record.verb}({arguments})"


def caveats_of(record: Record) -> tuple[str, ...]:
    """What a reader must know of the model, such as an encoding that is not the published one, and of the theories."""
    model = record.resolved.get("model")
    of_model = model.get("caveats", ()) if isinstance(model, Mapping) else ()
    return (*of_model, *record.scalars.get("caveats", ()))


def conditions_of(record: Record) -> dict[str, str]:
    """Model, prompts, seeds and versions as label and text, nested tables written out."""
    resolved = {key: value for key, value in record.resolved.items() if key not in ("command", "title", "related")}
    conditions = _written_out(resolved)
    conditions.update({f"seed: {name}": str(seed) for name, seed in record.seeds.items()})
    conditions.update(_written_out({"environment": record.environment}))
    return {**conditions, "finished": record.created, "run": record.run_id}


def _written_out(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            flat.update(_written_out(value, prefix=f"{prefix}{name}: "))
        elif isinstance(value, list | tuple):
            flat[label] = _list_text(list(value))
        elif value is not None:
            flat[label] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return flat


def _list_text(values: list[Any]) -> str:
    shown = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:LONGEST_LIST])
    return shown if len(values) <= LONGEST_LIST else f"{shown}, ... ({len(values)} values)"
