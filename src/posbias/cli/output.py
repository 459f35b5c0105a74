"""What every verb prints and saves: tables for people on stdout, or one JSON document and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from posbias.records import Record, plain


def finish(record: Record, *, out: Path | None, as_json: bool, found: bool = False) -> None:
    """Conclude a run in its directory, if it has one, then print its record as tables or as JSON with its arrays.

    Args:
        record: What came out.
        out: The run's directory.
        as_json: One JSON document instead of tables.
        found: The record was finished before and lies in the directory.
    """
    from posbias.report import conclude

    page = None
    if out is not None:
        page = conclude(record, out, found=found)
    if as_json:
        print_json(record_document(record))
        return
    print_record(record)
    if page is not None:
        typer.echo(f"report: {page}")


def record_document(record: Record) -> dict[str, Any]:
    """A record with its arrays, as one JSON document."""
    return {**record.as_json(), "arrays": {name: plain(array) for name, array in record.arrays.items()}}


def print_record(record: Record) -> None:
    """Tables and sentences of a run, and of an audit its findings."""
    from rich.console import Console

    from posbias.report import show_record

    show_record(record, Console())


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
