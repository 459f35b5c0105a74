"""Tables, figures and the HTML report, drawn from records alone."""

from posbias.records import REPORT_FILE

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
from posbias.report.layout import RunView, store_subjects, view_of
from posbias.report.page import REPORTS, Report, report_of
from posbias.report.run_report import conclude, show_record, write_report
from posbias.report.tables import comparison_rows, mixing_rows, share_rows, show_summary

__all__ = [
    "REPORTS",
    "REPORT_FILE",
    "Finding",
    "Report",
    "RunView",
    "comparison_rows",
    "conclude",
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
