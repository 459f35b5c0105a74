"""`posbias report`: the page of finished runs, drawn anew."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_document
from posbias.errors import UsageError

EXAMPLE = (
    "Example: `posbias report runs/demo` · for a paper or slides: `posbias report runs/demo --paper paper` · several "
    "side by side: `posbias report runs/a runs/b --out runs/both`"
)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    paper: Annotated[
        Path | None,
        typer.Option(
            help="A new directory for a paper: figures (PDF, SVG), tables (LaTeX, CSV), BibTeX; no page is drawn.",
            show_default=False,
        ),
    ] = None,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Write the report of finished runs again. No model is loaded."""
    from posbias import write_report  # from the front door, behind which runs of every verb have their words
    from posbias.report.paper import write_paper
    from posbias.runs.records import RECORD_FILE, read_record
    from posbias.runs.running import held

    records = [read_record(run) for run in runs]
    if paper is not None:
        if out is not None:
            raise UsageError("--paper writes no page; leave out --out")
        document = write_paper(records, paper)
        print_document(
            {"paper": str(document), "runs": [str(run) for run in runs]}, as_json=json, line=f"paper: {document}"
        )
        return
    if len(runs) > 1:
        if out is None:
            raise UsageError(f"{len(runs)} runs side by side need a directory of their own: --out DIRECTORY")
        options.check_apart(out, runs, verb="drawn")
    if out is not None and out.resolve() not in [run.resolve() for run in runs] and (out / RECORD_FILE).exists():
        raise UsageError(f"--out {str(out)!r} holds a run, whose page would be replaced; choose another --out")
    with held(out or runs[0]) as directory:
        page = write_report(records, directory)
    print_document({"report": str(page), "runs": [str(run) for run in runs]}, as_json=json, line=f"report: {page}")
