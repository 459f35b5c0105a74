"""`posbias report`: redraw the report of one or several runs from their records alone."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.errors import UsageError

EXAMPLE = "Example: `posbias report runs/demo` · several side by side: `posbias report runs/a runs/b --out runs/both`"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    seed: options.UnusedSeed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Draw the HTML report and PNGs of finished runs; no model is loaded."""
    from posbias.cli.output import print_document
    from posbias.directories import held
    from posbias.records import load_record, reading
    from posbias.report import write_report

    records = [load_record(run) for run in runs]
    if len(runs) > 1:
        if out is None:
            raise UsageError(f"{len(runs)} runs side by side need a directory of their own: --out DIRECTORY")
        options.check_apart(out, runs, verb="drawn")
    with held(out or runs[0]) as directory, reading(*records):
        page = write_report(records, directory)
    print_document({"report": str(page), "runs": [str(run) for run in runs]}, as_json=json, line=f"report: {page}")
