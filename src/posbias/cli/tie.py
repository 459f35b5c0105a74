"""`posbias tie`: does what weighs also get used, over the positions of several audited models and lengths together?"""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

EXAMPLE = "Example, after two runs of `posbias audit ... --behaviour ...`: `posbias tie runs/a runs/b --out runs/tied`"


def tie(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of audits with --behaviour.", show_default=False)
    ],
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Pool the ties of finished audits: rank and partial correlations over positions, ranks formed within each run."""
    from posbias.cli.output import finish
    from posbias.evaluation import tie_runs
    from posbias.evaluation.record import load_behaviour
    from posbias.records import reading, run_directory

    arguments = passed_arguments(context)
    with run_directory(out, verb="tie", arguments=arguments) as directory:
        records = [load_behaviour(run) for run in runs]
        with reading(*records):
            record = tie_runs(records, seed=seed, arguments=arguments, command=command_line(context))
        finish(record, out=directory, as_json=json)
