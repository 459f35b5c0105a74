"""`posbias train`: the members of a study trained as stacked programs, each saved as a model of its own."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import RunError

EXAMPLE = (
    "Example: `posbias train study.yaml --out runs/study` · then a member like any model: "
    "`posbias measure runs/study/models/0000 --length 10` · after a kill: the same with `--resume`"
)


@options.grouped
def train(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(help="A study: task, model, optimiser, train, grid and seeds, in YAML.")],
    *,
    device: options.Device = options.AUTO,
    engine: options.EngineFlags,
    stack_size: Annotated[int, typer.Option(help="Most members in one program.", min=1)] = 64,
    resume: options.Resume = False,
    flags: options.RunFlags,
) -> None:
    """Train every member of a study.

    A study is a grid of masks, encodings, depths and task settings, times seeds.
    """
    from posbias.training import TrainOptions, load_study
    from posbias.training import train as train_study

    with running(context, flags, resume=resume) as run:
        settings = TrainOptions(
            engine=engine.made(),
            device=device,
            directory=run.directory,
            resume=resume,
            overwrite=flags.overwrite,
            stack_size=stack_size,
        )
        trained = train_study(load_study(study), options=settings)
        run.finish(trained.record)
    if trained.record.error is not None:
        raise RunError(trained.record.error)
