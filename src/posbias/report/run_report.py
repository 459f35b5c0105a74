"""The report of a finished run, whatever its verb: written to a directory, or printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.parts import clear_parts
from posbias.records import Record, remove_report
from posbias.report.ingredients import show_ingredients
from posbias.report.layout import view_of
from posbias.report.page import REPORTS, report_of, show_report, write_run_report
from posbias.report.profiles import write_profiles
from posbias.report.tables import show_summary

if TYPE_CHECKING:
    from rich.console import Console


@checked
def write_report(records: Sequence[Record], out: Path) -> Path:
    """Write `report.html` and a PNG per figure into the directory `out`, each atomically.

    Args:
        records: Finished runs; several that hold profiles are shown side by side and then one by one.
        out: Directory, made where missing.

    Returns:
        The path of the HTML file.

    Raises:
        UsageError: no records, one that failed or holds nothing to draw, or one of a verb that is drawn by itself among
            others.
        RunError: the files cannot be written.
    """
    if not records:
        raise UsageError("a report needs at least one run")
    alone = [record.verb for record in records if record.verb in REPORTS]
    if alone and len(records) > 1:
        raise UsageError(f"runs of {alone[0]} are drawn one at a time, without others beside them")
    return write_run_report(records[0], out) if alone else write_profiles(records, out)


def conclude(record: Record, directory: Path, *, found: bool = False) -> Path:
    """The end of every run: its record is saved, its report drawn, and the pieces they are made of are removed.

    Args:
        record: What came out.
        directory: Of the run.
        found: The record was finished before and lies there: it stays as it is, whatever of the rest was done.

    Returns:
        The path of the page.

    Raises:
        RunError: something cannot be written.
    """
    if found:
        remove_report(directory)
    else:
        record.save(directory)
    page = write_report([record], directory)
    clear_parts(directory)
    return page


def show_record(record: Record, console: "Console") -> None:
    """Print what a run found: tables and sentences, of an audit its findings."""
    if record.verb in REPORTS:
        show_report(report_of(record), console)
        return
    if record.scalars.get("ingredients"):
        show_ingredients(record, console)
        return
    show_summary([view_of(record)], console)
    if record.scalars.get("findings"):
        console.print(record.scalars["findings"], highlight=False)
