"""`posbias correlate`: does what weighs also get used, over positions of several audited models and lengths?"""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

EXAMPLE = (
    "Example, after two runs of `posbias audit ... --behaviour ...`: `posbias correlate runs/a runs/b --out runs/ab`"
)


def correlate(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of audits with --behaviour.", show_default=False)
    ],
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Correlate influence with behaviour over finished audits: rank and partial correlations, ranks within each run."""
    from posbias.cli.output import finish
    from posbias.evaluation import correlate_runs
    from posbias.evaluation.record import load_behaviour
    from posbias.records import reading, run_directory

    arguments = passed_arguments(context)
    with run_directory(out, verb="correlate", arguments=arguments) as directory:
        records = [load_behaviour(run) for run in runs]
        with reading(*records):
            record = correlate_runs(records, seed=seed, arguments=arguments, command=command_line(context))
        finish(record, out=directory, as_json=json)
