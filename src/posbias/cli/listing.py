"""`posbias list`: the variants that posbias knows, and `posbias models get`: models that need more than a hub.

Variants are read off the source where decorators register them: importing every registry takes seconds (torch, numba
and scipy with it), and decorators and docstrings say the same. Only one that is asked for by name is imported, for the
parameters that it inherits.
"""

import ast
import dataclasses
import re
import textwrap
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_document, print_json
from posbias.errors import UsageError
from posbias.published import PACKAGE

SORTS = {
    "masks": "MASKS",
    "encodings": "ENCODINGS",
    "theories": "THEORIES",
    "kinds": "KINDS",
    "outputs": "OUTPUTS",
    "metrics": "METRICS",
    "claims": "CLAIMS",
    "interventions": "INTERVENTIONS",
    "mitigations": "MITIGATIONS",
    "optimisers": "OPTIMISERS",
    "stopping-rules": "STOPPING",
    "tasks": "LANGUAGE_TASKS",
    "synthetic-tasks": "SYNTHETIC_TASKS",
    "targets": "TARGETS",
}
"""Registry of each sort that is listed."""
FAMILIES = "families"
"""A sort that is listed by its name alone: its table takes seconds to import."""
_REGISTERED = re.compile(r"^@([A-Z_]+)\.register\(", re.MULTILINE)
_SOURCES = Path(__file__).parents[2]
_PACKAGES = ("posbias", PACKAGE)
_WIDTH = 100
SAMPLE_ITEMS = 3
"""Items of the prompt that shows a task."""


def list_variants(
    context: typer.Context,
    sort: str | None = None,
    name: str | None = None,
    *,
    flags: Annotated[options.RunFlags, options.Take("out", "overwrite")],
) -> None:
    """List the variants that posbias knows, with a description each.

    These are masks, encodings, theories, kinds of influence, outputs, metrics, claims, tasks ...; by name: families.

    Args:
        sort: One sort, e.g. masks; all by default.
        name: One of that sort, with its parameters.

    Examples: `posbias list masks` · with parameters: `posbias list mitigations temperature`
    """
    if sort not in (None, FAMILIES, *SORTS):
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join((*SORTS, FAMILIES))}")
    catalogue: dict[str, Any]
    if sort == FAMILIES:
        catalogue = _families(name)
    elif sort is None or name is None:
        catalogue = dict(registered_variants(SORTS if sort is None else {sort: SORTS[sort]}))
    else:
        catalogue = described_variant(sort, name)
    if flags.json:
        print_json(catalogue)
    elif name is not None:
        _print_variant(catalogue)
    else:
        _print_catalogue(catalogue)


def _families(name: str | None) -> dict[str, Any]:
    """What runs on every model family of the table of layouts, or on one."""
    from posbias.models.families import families

    known = families()
    if name is None:
        return {FAMILIES: known}
    if name not in known:
        raise UsageError(f"families: unknown {name!r}; known: {', '.join(sorted(known))}")
    return {"name": name, "description": known[name], "parameters": {}}


def registered_variants(sorts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Name and first line of the docstring of every variant; `sorts`: each sort's registry as decorators name it."""
    return {
        sort: {
            name: (ast.get_docstring(node) or "").split("\n")[0]
            for name, (node, _) in sorted(_definitions()[registry].items())
        }
        for sort, registry in sorts.items()
    }


def described_variant(sort: str, name: str) -> dict[str, Any]:
    """One variant: what it is, and every parameter with its meaning and, if it may be left out, its default."""
    definitions = _definitions()[SORTS[sort]]
    if name not in definitions:
        raise UsageError(f"{sort}: unknown {name!r}; known: {', '.join(sorted(definitions))}")
    node, path = definitions[name]
    module = import_module(".".join(path.relative_to(_SOURCES).with_suffix("").parts))
    variant = getattr(module, node.name)
    parameters: dict[str, dict[str, Any]] = {}
    if dataclasses.is_dataclass(variant):
        meanings = options.meanings_of(variant)  # type: ignore[arg-type]
        spelled = [field for field in dataclasses.fields(variant) if field.repr]
        for field in sorted(spelled, key=lambda entry: bool(entry.kw_only)):
            parameters[field.name] = {"meaning": meanings.get(field.name, "")}
            if field.default is not dataclasses.MISSING:
                parameters[field.name]["default"] = field.default
    described = {"name": name, "description": ast.get_docstring(node) or "", "parameters": parameters}
    return {**described, "sample": _sample(variant)} if sort == "tasks" else described


def _sample(task: Any) -> str:
    """A prompt of a few items with its answer; empty if it takes a file or a tokenizer."""
    try:
        made = task()
        example = next(made.with_items(min(made.n_items, SAMPLE_ITEMS)).examples(None, count=1, positions=[1]))
    except (UsageError, TypeError):
        return ""
    return f"{example.text}[{example.target}]"


@cache
def _definitions() -> dict[str, dict[str, tuple[ast.ClassDef | ast.FunctionDef, Path]]]:
    """Definition and file of everything that a decorator registers, by registry and name."""
    definitions: dict[str, dict[str, tuple[ast.ClassDef | ast.FunctionDef, Path]]] = {}
    for file in chain.from_iterable((_SOURCES / package).rglob("*.py") for package in _PACKAGES):
        source = file.read_text(encoding="utf-8")
        if not _REGISTERED.search(source):
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(ast.Attribute(ast.Name(registry), "register"), [ast.Constant(str(name))]):
                        definitions.setdefault(registry, {})[name] = node, file
    return definitions


def _print_catalogue(catalogue: dict[str, dict[str, Any]]) -> None:
    for name, variants in catalogue.items():
        typer.echo(f"{name}:")
        width = max(map(len, variants), default=0)
        for variant, description in variants.items():
            typer.echo(f"  {variant:<{width}}  {description}")


def _print_variant(variant: dict[str, Any]) -> None:
    parameters = variant["parameters"]
    spelled = [f"{name}={entry['default']!r}" if "default" in entry else name for name, entry in parameters.items()]
    typer.echo(f"{variant['name']}({', '.join(spelled)})\n\n{variant['description']}")
    for name, entry in parameters.items():
        meaning = f"{name}: {entry['meaning']}"
        typer.echo("\n" + textwrap.fill(meaning, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    if variant.get("sample"):
        typer.echo("\nA sample, its answer in brackets:\n\n" + textwrap.indent(variant["sample"], "    "))


def get(
    context: typer.Context,
    name: str = "demo",
    *,
    out: Path | None = None,
    flags: Annotated[options.RunFlags, options.Take("out", "overwrite")],
) -> None:
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
    print_document({"model": name, "directory": str(directory)}, as_json=flags.json, line=f"{name}: {directory}")


def models() -> None:
    """Obtain models."""
