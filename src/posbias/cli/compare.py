"""`posbias compare`: the profiles of two finished runs, every distance beside a flat line's."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

EXAMPLE = (
    "Example: `posbias compare runs/predicted runs/measured --kind jacobian`; what two audits measured: "
    "`posbias compare runs/one runs/other --theory jacobian --kind jacobian`"
)


@options.grouped
def compare(
    context: typer.Context,
    predicted: Annotated[Path, typer.Argument(help="Run whose predictions are judged.", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="Run with the measurement.", show_default=False)],
    *,
    kind: Annotated[
        str | None, typer.Option(help="Compare with this measured kind only; by default with all.", show_default=False)
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
            help="Model of an audit: trained or initialised; by default the one that the other run has, else trained.",
            show_default=False,
        ),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Compare the profiles of two runs.

    Every distance is given with that of a flat line; intervals resample the prompts of both runs.
    """
    from posbias import CompareOptions
    from posbias import compare as compare_runs  # from the front door, behind which runs of every verb can be read
    from posbias.runs.records import read_record

    options.check_apart(flags.out, (predicted, measured), verb="compared")
    with running(context, flags) as run:
        settings = CompareOptions(theory=theory, kind=kind, subject=subject, seed=flags.seed)
        record = compare_runs(read_record(predicted), read_record(measured), options=settings).record
        run.finish(record)
