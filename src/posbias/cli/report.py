"""`posbias report`: redraw the report of one or several runs from their records alone."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.errors import UsageError

EXAMPLE = "Example: `posbias report runs/demo` · several side by side: `posbias report runs/a runs/b --out runs/both`"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Draw the HTML report and PNGs of finished runs; no model is loaded."""
    from posbias.cli.output import print_document
    from posbias.records import check_writable, load_record
    from posbias.report import write_report
    from posbias.report.claims import write_claims_report

    records = [load_record(run) for run in runs]
    directory = check_writable(out or runs[0])
    verified = [record for record in records if record.verb == "verify"]
    if verified and len(records) > 1:
        raise UsageError("runs of verify are drawn one at a time, without others beside them")
    page = write_claims_report(verified[0], directory) if verified else write_report(records, directory)
    print_document({"report": str(page), "runs": [str(run) for run in runs]}, as_json=json, line=f"report: {page}")
