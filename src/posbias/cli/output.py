"""What every verb prints and saves: tables for people on stdout, or one JSON document and nothing else."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posbias.records import Record, plain

if TYPE_CHECKING:
    from rich.console import Console


def finish(
    record: Record,
    *,
    out: Path | None,
    as_json: bool,
    write: Callable[[Record, Path], Path] | None = None,
    show: Callable[[Record, "Console"], object] | None = None,
    found: bool = False,
) -> None:
    """Conclude a run in its directory, if it has one, then print its record as a table or as JSON with its arrays.

    Args:
        record: What came out.
        out: The run's directory.
        as_json: One JSON document instead of tables.
        write: Draws the verb's own report; the report of profiles by default.
        show: Prints the verb's own tables; the summary of profiles by default.
        found: The record was finished before and lies in the directory.
    """
    page = None
    if out is not None:
        from posbias.report.files import conclude

        page = conclude(record, out, write or _write_profiles, found=found)
    if as_json:
        print_json(record_document(record))
        return
    if show is None:
        print_summary(record)
    else:
        from rich.console import Console

        show(record, Console())
    if page is not None:
        typer.echo(f"report: {page}")


def record_document(record: Record) -> dict[str, Any]:
    """A record with its arrays, as one JSON document."""
    return {**record.as_json(), "arrays": {name: plain(array) for name, array in record.arrays.items()}}


def _write_profiles(record: Record, out: Path) -> Path:
    from posbias.report import write_report

    return write_report([record], out)


def print_summary(record: Record) -> None:
    """The summary tables of a run and, for an audit, its findings."""
    from rich.console import Console

    from posbias.report import show_summary, view_of

    console = Console()
    show_summary([view_of(record)], console)
    if record.scalars.get("findings"):
        console.print(record.scalars["findings"], highlight=False)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(plain(document), indent=1, allow_nan=False))


def print_document(document: Mapping[str, Any], *, as_json: bool, line: str) -> None:
    """A short result: as JSON, or as one line."""
    if as_json:
        print_json(document)
    else:
        typer.echo(line)


def print_catalogue(catalogue: Mapping[str, Mapping[str, str]], *, as_json: bool) -> None:
    """Names and first lines of all variants, by sort."""
    if as_json:
        print_json(catalogue)
        return
    for sort, variants in catalogue.items():
        typer.echo(f"{sort}:")
        width = max(map(len, variants), default=0)
        for name, description in variants.items():
            typer.echo(f"  {name:<{width}}  {description}")
