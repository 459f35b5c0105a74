"""`posbias list`: the variants that posbias knows, and `posbias models get`: models that need more than a hub.

Variants are read off the source where decorators register them: importing every registry takes seconds (torch, numba
and scipy with it), and decorators and docstrings say the same.
"""

import ast
import re
from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_document, print_json
from posbias.errors import UsageError

EXAMPLE = "Example: `posbias list masks`"
MODELS = typer.Typer(no_args_is_help=True, help="Obtain models.", rich_markup_mode=None)
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
    "mitigations": "MITIGATIONS",
    "optimisers": "OPTIMISERS",
    "stopping-rules": "STOPPING",
    "tasks": "LANGUAGE_TASKS",
    "synthetic-tasks": "SYNTHETIC_TASKS",
    "targets": "TARGETS",
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
    """List what posbias knows. Masks, encodings, theories, kinds, outputs, families, metrics, claims, tasks ..."""
    from posbias.records import Record, run_directory

    if sort is not None and sort not in SORTS:
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join(SORTS)}")
    catalogue = registered_variants(SORTS if sort is None else {sort: SORTS[sort]})
    arguments = options.passed_arguments(context)
    with run_directory(out, verb="list", arguments=arguments) as directory:
        if directory is not None:
            Record(verb="list", arguments=arguments, scalars=dict(catalogue)).save(directory)
    if json:
        print_json(catalogue)
        return
    for name, variants in catalogue.items():
        typer.echo(f"{name}:")
        width = max(map(len, variants), default=0)
        for variant, description in variants.items():
            typer.echo(f"  {variant:<{width}}  {description}")


def registered_variants(sorts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Name and first line of the docstring of every variant; `sorts`: each sort's registry as decorators name it."""
    found: dict[str, dict[str, str]] = {registry: {} for registry in sorts.values()}
    for path in Path(__file__).parents[1].rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if found.keys().isdisjoint(_REGISTERED.findall(source)):
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(ast.Attribute(ast.Name(registry), "register"), [ast.Constant(str(name))]) if (
                        registry in found
                    ):
                        found[registry][name] = (ast.get_docstring(node) or "").split("\n")[0]
    return {sort: dict(sorted(found[registry].items())) for sort, registry in sorts.items()}


@MODELS.command("get", epilog="Example: `posbias models get demo`")
def get(
    name: Annotated[str, typer.Argument(help="demo: SmolLM2-135M-Instruct, 98 MB, Apache-2.0.")] = "demo",
    seed: options.UnusedSeed = 0,
    out: Annotated[Path | None, options.out_option("A new directory for a copy of the model.")] = None,
    json: options.Json = False,
) -> None:
    """Download a named model once and keep it in the user's cache."""
    from posbias.models.demo import copy_demo, fetch_demo

    if name != "demo":
        raise UsageError(f"unknown model {name!r}; known: demo (other models load by hub id, directory or file)")
    directory = fetch_demo() if out is None else copy_demo(out)
    print_document({"model": name, "directory": str(directory)}, as_json=json, line=f"{name}: {directory}")


@MODELS.callback()
def _verbs() -> None:
    """Obtain models."""
