"""`posbias compare` and `posbias report`: what finished runs say beside each other, and their pages drawn anew."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import print_document, running
from posbias.errors import UsageError

COMPARE_EXAMPLE = (
    "Example: `posbias compare runs/predicted runs/measured --kind jacobian`; what two audits measured: "
    "`posbias compare runs/one runs/other --theory jacobian --kind jacobian`"
)
REPORT_EXAMPLE = (
    "Example: `posbias report runs/demo` · several side by side: `posbias report runs/a runs/b --out runs/both`"
)


@options.grouped
def compare(
    context: typer.Context,
    predicted: Annotated[Path, typer.Argument(help="Run whose predictions are judged.", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="Run with the measurement.", show_default=False)],
    *,
    kind: Annotated[
        str | None, typer.Option(help="Compare to this measured kind only; all by default.", show_default=False)
    ] = None,
    theory: Annotated[
        str | None,
        typer.Option(
            help="Compare this theory of the first run only, or a kind measured there; all its theories by default.",
            show_default=False,
        ),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(
            help="Of an audit, the model trained or initialised; by default as the other run has it, else trained.",
            show_default=False,
        ),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Compare the profiles of two runs. Every distance, beside a flat line's; prompts of both are resampled."""
    from posbias.auditing import Chosen, comparison_record
    from posbias.records import load_record, reading

    options.check_apart(flags.out, (predicted, measured), verb="compared")
    with running(context, flags) as run:
        records = load_record(predicted), load_record(measured)
        with reading(*records):
            chosen = Chosen(theory=theory, kind=kind, subject=subject)
            record = comparison_record(*records, chosen, command=run.command, seed=flags.seed)
        record.arguments = run.arguments
        run.finish(record)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    seed: options.UnusedSeed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Draw the report of finished runs anew. HTML and PNGs; no model is loaded."""
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
