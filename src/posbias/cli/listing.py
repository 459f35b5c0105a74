"""`posbias list`: the variants that posbias knows, and `posbias models get`: models that need more than a hub."""

import dataclasses
import inspect
import textwrap
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

from posbias.checks import described
from posbias.cli import options
from posbias.cli.output import tell
from posbias.errors import UsageError

SORTS = {
    "masks": "posbias.architecture:MASKS",
    "encodings": "posbias.architecture:ENCODINGS",
    "theories": "posbias.theory:THEORIES",
    "kinds": "posbias.measurement.kinds:KINDS",
    "outputs": "posbias.measurement.outputs:OUTPUTS",
    "metrics": "posbias.comparison.metrics:METRICS",
    "claims": "posbias_papers.published:CLAIMS",
    "interventions": "posbias.interventions:INTERVENTIONS",
    "mitigations": "posbias.mitigation.methods.base:MITIGATIONS",
    "optimisers": "posbias.training.members:OPTIMISERS",
    "stopping-rules": "posbias.training.members:STOPPING",
    "tasks": "posbias.tasks.language:LANGUAGE_TASKS",
    "checks": "posbias.tasks.language.adherence:CHECKS",
    "synthetic-tasks": "posbias.tasks.synthetic:SYNTHETIC_TASKS",
    "targets": "posbias.designing.result:TARGETS",
    "engines": "posbias.runs.engines:ENGINES",
}
"""Registry of each sort that is listed."""
FAMILIES = "families"
"""A sort that is a table."""


def list_variants(sort: str | None = None, name: str | None = None, *, flags: options.Printed) -> None:
    """List the variants that posbias knows, with a description each.

    These are masks, encodings, theories, kinds of influence, outputs, metrics, claims, tasks, families ...

    Args:
        sort: One sort, e.g. masks; without it, the sorts.
        name: One of that sort, with its parameters.

    Examples: `posbias list` · `posbias list masks` · with parameters: `posbias list mitigations temperature`
    """
    sorts = [*SORTS, FAMILIES]
    if sort is None:  # what is behind a sort is imported only where it is asked for
        found: dict[str, Any] = {"sorts": sorts}
        lines = [*sorts, "", "posbias list SORT says what there is of one"]
    elif sort not in sorts:
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join(sorts)}")
    elif name is None:
        variants = registered_variants(sort)
        width, found = max(map(len, variants)), {sort: variants}
        lines = [f"{each:<{width}}  {description}" for each, description in variants.items()]
    else:
        found = described_variant(sort, name)
        lines = _variant_lines(found)
    tell(flags, found, *"\n".join(lines).split("\n"))


def registered_variants(sort: str) -> dict[str, str]:
    """Every variant of a sort, with the first line of its docstring; of the families, with what runs on each."""
    if sort == FAMILIES:
        from posbias.models.families import families

        return families()
    registry = resolve_name(SORTS[sort])
    return {name: (inspect.getdoc(registry[name]) or "").split("\n")[0] for name in registry}


def described_variant(sort: str, name: str) -> dict[str, Any]:
    """One variant: what it is, and every parameter with its meaning and, if it may be left out, its default."""
    known = registered_variants(sort)
    if name not in known:
        raise UsageError(f"{sort}: unknown {name!r}; known: {', '.join(known)}")
    parameters: dict[str, dict[str, Any]] = {}
    found = {"name": name, "description": known[name], "parameters": parameters}
    if sort == FAMILIES:
        return found
    variant = resolve_name(SORTS[sort])[name]
    if dataclasses.is_dataclass(variant):
        meanings = options.meanings_of(variant)  # type: ignore[arg-type]
        spelled = [field for field in dataclasses.fields(variant) if field.repr]
        for field in sorted(spelled, key=lambda entry: bool(entry.kw_only)):
            parameters[field.name] = {"meaning": meanings.get(field.name, "")}
            if field.default is not dataclasses.MISSING:
                parameters[field.name]["default"] = field.default
    elif sort == "checks":
        hints = get_type_hints(variant, include_extras=True)
        parameters |= {each: {"meaning": described(hints[each])} for each in inspect.signature(variant).parameters}
    found["description"] = inspect.getdoc(variant) or ""
    if sort == "tasks":  # a prompt of a few items with its answer; empty if it takes a file or a tokenizer
        found["sample"] = ""
        with suppress(UsageError, TypeError):
            made = variant()
            example = next(made.with_items(min(made.n_items, 3)).examples(None, count=1, positions=[1]))
            found["sample"] = f"{example.text}[{example.target}]"
    return found


def _variant_lines(variant: dict[str, Any]) -> list[str]:
    parameters = variant["parameters"]
    spelled = [f"{name}={entry['default']!r}" if "default" in entry else name for name, entry in parameters.items()]
    lines = [f"{variant['name']}({', '.join(spelled)})", "", variant["description"]]
    for name, entry in parameters.items():
        meaning = f"{name}: {entry['meaning']}"
        lines += ["", textwrap.fill(meaning, 100, subsequent_indent="    ", break_on_hyphens=False)]
    if variant.get("sample"):
        lines += ["", "A sample, its answer in brackets:", "", textwrap.indent(variant["sample"], "    ")]
    return lines


def get(name: str = "demo", *, out: Path | None = None, flags: options.Printed) -> None:
    """Download a named model once and keep it in the user's cache.

    Args:
        name: demo: SmolLM2-135M-Instruct, 98 MB, Apache-2.0.
        out: A new directory for a copy of the model.

    Example: `posbias models get demo`
    """
    from posbias.models.loading import copy_demo, fetch_demo

    if name != "demo":
        raise UsageError(f"unknown model {name!r}; known: demo (other models load by hub id, directory or file)")
    directory = fetch_demo() if out is None else copy_demo(out)
    tell(flags, {"model": name, "directory": str(directory)}, f"{name}: {directory}")


def models() -> None:
    """Obtain models."""
