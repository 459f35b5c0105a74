"""`posbias list`: the variants that posbias knows, read off their registries."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posbias.cli import options
from posbias.errors import UsageError
from posbias.registry import Registry

EXAMPLE = "Example: `posbias list masks`"


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

    registries = _registries()
    if sort is not None and sort not in registries:
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join(registries)}")
    wanted = registries if sort is None else {sort: registries[sort]}
    catalogue = {name: _described(registry) for name, registry in wanted.items()}
    arguments = passed_arguments(context)
    with run_directory(out, verb="list", arguments=arguments) as directory:
        if directory is not None:
            Record(verb="list", arguments=arguments, scalars=dict(catalogue)).save(directory)
    print_catalogue(catalogue, as_json=json)


def _registries() -> dict[str, Registry[Any]]:
    from posbias.architecture import ENCODINGS, MASKS, SCHEDULES
    from posbias.comparison import METRICS
    from posbias.interventions import INTERVENTIONS
    from posbias.measurement import KINDS, OUTPUTS
    from posbias.models import FAMILIES
    from posbias.papers import CLAIMS
    from posbias.tasks.language import LANGUAGE_TASKS
    from posbias.tasks.synthetic import SYNTHETIC_TASKS
    from posbias.theory import THEORIES
    from posbias.training import OPTIMISERS, STOPPING

    return {
        "masks": MASKS,
        "encodings": ENCODINGS,
        "schedules": SCHEDULES,
        "theories": THEORIES,
        "kinds": KINDS,
        "outputs": OUTPUTS,
        "families": FAMILIES,
        "metrics": METRICS,
        "claims": CLAIMS,
        "interventions": INTERVENTIONS,
        "optimisers": OPTIMISERS,
        "stopping-rules": STOPPING,
        "tasks": LANGUAGE_TASKS,
        "synthetic-tasks": SYNTHETIC_TASKS,
    }


def _described(registry: Registry[Any]) -> dict[str, str]:
    """Each variant's name with the first line of its docstring."""
    return {name: (registry[name].__doc__ or "").strip().split("\n")[0] for name in registry}
