"""`posbias correlate`: influence and behaviour over finished audits."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

EXAMPLE = (
    "Example, after two runs of `posbias audit ... --behaviour ...`: `posbias correlate runs/a runs/b --out runs/ab`"
)


@options.grouped
def correlate(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of audits with --behaviour.", show_default=False)
    ],
    *,
    flags: options.RunFlags,
) -> None:
    """Correlate influence with behaviour over finished audits. Rank and partial correlations, ranks within each run."""
    from posbias.evaluation import correlate_runs
    from posbias.evaluation.evaluation import load_behaviour
    from posbias.runs.records import reading

    with running(context, flags) as run:
        records = [load_behaviour(each) for each in runs]
        with reading(*records):
            record = correlate_runs(records, seed=flags.seed, arguments=run.arguments, command=run.command)
        run.finish(record)
