"""Tables, figures and the HTML report, drawn from records alone."""

from posbias.report.page import REPORTS, Report, conclude, report_of, show_report, verdict, write_report
from posbias.runs.results import load_record
