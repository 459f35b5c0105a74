"""`posbias list`: the variants that posbias knows, read off their registries."""

from typing import Annotated, Any

import typer

from posbias.cli import options
from posbias.errors import UsageError
from posbias.registry import Registry

EXAMPLE = "Example: `posbias list masks`"


def list_variants(
    sort: Annotated[str | None, typer.Argument(help="One sort, e.g. masks; all by default.")] = None,
    json: options.Json = False,
) -> None:
    """List masks, encodings, mixing schedules, theories, influence kinds, model families and metrics."""
    from posbias.cli.output import print_catalogue

    registries = _registries()
    if sort is not None and sort not in registries:
        raise UsageError(f"unknown sort {sort!r}; known: {', '.join(registries)}")
    wanted = registries if sort is None else {sort: registries[sort]}
    print_catalogue({name: _described(registry) for name, registry in wanted.items()}, as_json=json)


def _registries() -> dict[str, Registry[Any]]:
    from posbias.architecture import ENCODINGS, MASKS, SCHEDULES
    from posbias.comparison import METRICS
    from posbias.measurement import KINDS
    from posbias.models import FAMILIES
    from posbias.theory import THEORIES
    from posbias.theory.claims import CLAIMS

    return {
        "masks": MASKS,
        "encodings": ENCODINGS,
        "schedules": SCHEDULES,
        "theories": THEORIES,
        "kinds": KINDS,
        "families": FAMILIES,
        "metrics": METRICS,
        "claims": CLAIMS,
    }


def _described(registry: Registry[Any]) -> dict[str, str]:
    """Each variant's name with the first line of its docstring."""
    return {name: (registry[name].__doc__ or "").strip().split("\n")[0] for name in registry}
