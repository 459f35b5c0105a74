"""`posbias compare`: the predictions of one run beside the measurements of another."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

EXAMPLE = (
    "Example: `posbias compare runs/predicted runs/measured --kind jacobian`; what two audits measured: "
    "`posbias compare runs/one runs/other --theory jacobian --kind jacobian`"
)


def compare(
    context: typer.Context,
    predicted: Annotated[Path, typer.Argument(help="Run whose predictions are judged.", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="Run with the measurement.", show_default=False)],
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
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Compare two runs: every distance between their profiles, beside a flat line's; prompts of both are resampled."""
    from posbias.auditing import Chosen, comparison_record
    from posbias.cli.output import finish
    from posbias.records import load_record, reading, run_directory

    options.check_apart(out, (predicted, measured), verb="compared")
    arguments = passed_arguments(context)
    with run_directory(out, verb="compare", arguments=arguments) as directory:
        runs = load_record(predicted), load_record(measured)
        with reading(*runs):
            chosen = Chosen(theory=theory, kind=kind, subject=subject)
            record = comparison_record(*runs, chosen, command=command_line(context), seed=seed)
        record.arguments = arguments
        finish(record, out=directory, as_json=json)
