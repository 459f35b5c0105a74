"""`posbias list`: the variants that posbias knows, read off the source where decorators register them.

Importing every registry takes seconds (torch, numba and scipy with it); decorators and docstrings say the same.
"""

import ast
import re
from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.errors import UsageError

EXAMPLE = "Example: `posbias list masks`"
SORTS = {
    "masks": "MASKS",
    "encodings": "ENCODINGS",
    "schedules": "SCHEDULES",
    "theories": "THEORIES",
    "kinds": "KINDS",
    "outputs": "OUTPUTS",
    "families": "FAMILIES",
    "metrics": "METRICS",
    "claims": "CLAIMS",
    "interventions": "INTERVENTIONS",
    "optimisers": "OPTIMISERS",
    "stopping-rules": "STOPPING",
    "tasks": "LANGUAGE_TASKS",
    "synthetic-tasks": "SYNTHETIC_TASKS",
}
"""Each sort that is listed, and its registry."""
_REGISTERED = re.compile(r"^@([A-Z_]+)\.register\(", re.MULTILINE)


def list_variants(
    context: typer.Context,
    sort: Annotated[str | None, typer.Argument(help="One sort, e.g. masks; all by default.")] = None,
    seed: options.UnusedSeed = 0,
    out: Annotated[Path | None, options.out_option("Directory for a record.")] = None,
    json: options.Json = False,
) -> None:
    """List masks, encodings, schedules, theories, kinds, outputs, families, metrics, claims, interventions, tasks."""
    from posbias.cli.invocation import passed_arguments
    from posbias.cli.output import print_catalogue
    from posbias.records import Record, run_directory

    if sort is not None and sort not in SORTS:
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join(SORTS)}")
    catalogue = registered_variants(SORTS if sort is None else {sort: SORTS[sort]})
    arguments = passed_arguments(context)
    with run_directory(out, verb="list", arguments=arguments) as directory:
        if directory is not None:
            Record(verb="list", arguments=arguments, scalars=dict(catalogue)).save(directory)
    print_catalogue(catalogue, as_json=json)


def registered_variants(sorts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Name and first line of the docstring of every variant, by sort; nothing is imported.

    Args:
        sorts: Each sort's name, and the registry that decorators in the source name.
    """
    found: dict[str, dict[str, str]] = {registry: {} for registry in sorts.values()}
    for path in Path(__file__).parents[1].rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if found.keys().isdisjoint(_REGISTERED.findall(source)):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                _add_registered(node, found)
    return {sort: dict(sorted(found[registry].items())) for sort, registry in sorts.items()}


def _add_registered(node: ast.ClassDef | ast.FunctionDef, found: dict[str, dict[str, str]]) -> None:
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(ast.Attribute(ast.Name(registry), "register"), [ast.Constant(str(name))]) if (
                registry in found
            ):
                found[registry][name] = (ast.get_docstring(node) or "").split("\n")[0]
