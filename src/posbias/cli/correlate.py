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
    """Correlate influence with behaviour over finished audits. Ranks are formed within each measurement."""
    from posbias.evaluation.correlate import CorrelateOptions
    from posbias.evaluation.correlate import correlate as correlate_runs
    from posbias.evaluation.evaluation import load_evaluation

    with running(context, flags) as run:
        evaluations = [load_evaluation(directory, "a correlation") for directory in runs]
        result = correlate_runs(evaluations, options=CorrelateOptions(seed=flags.seed))
        run.finish(result.record)
