"""Tables, figures and the HTML report, drawn from records alone."""

# Each registers the report of its verb.
from posbias.report import (  # noqa: F401
    attention,
    compare_evaluations,
    correlate,
    decompose,
    design,
    evaluate,
    mitigate,
    place,
    profiles,
    train,
)
from posbias.report.findings import Finding, grouped_findings
from posbias.report.page import REPORTS, Report, conclude, report_of, show_report, verdict, write_report
from posbias.report.paper import cite, write_paper
from posbias.runs.results import load_record

__all__ = [
    "REPORTS",
    "Finding",
    "Report",
    "cite",
    "conclude",
    "grouped_findings",
    "load_record",
    "report_of",
    "show_report",
    "verdict",
    "write_paper",
    "write_report",
]
