"""Tables, figures and the HTML report, drawn from records alone."""

from typing import TYPE_CHECKING

from posbias.records import REPORT_FILE, Record

# Each registers the report of its verb.
from posbias.report import (  # noqa: F401
    attention,
    behaviour,
    claims,
    decompositions,
    placement,
    reproductions,
    ties,
    training,
)
from posbias.report.findings import Finding, findings_of, paragraph
from posbias.report.ingredients import show_ingredients
from posbias.report.layout import RunView, store_subjects, view_of
from posbias.report.page import REPORTS, Report, report_of, show_report
from posbias.report.profiles import write_report
from posbias.report.tables import comparison_rows, mixing_rows, share_rows, show_summary

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "REPORTS",
    "REPORT_FILE",
    "Finding",
    "Report",
    "RunView",
    "comparison_rows",
    "findings_of",
    "mixing_rows",
    "paragraph",
    "report_of",
    "share_rows",
    "show_record",
    "show_summary",
    "store_subjects",
    "view_of",
    "write_report",
]


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
