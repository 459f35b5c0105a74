"""`posbias train`: the members of a study trained as stacked programs, each saved as a model of its own."""

from dataclasses import replace
from pathlib import Path

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import RunError
from posbias.training.options import TrainOptions


def train(
    context: typer.Context,
    study: Path,
    *,
    settings: TrainOptions,
    engine: options.EngineFlags,
    flags: options.RunFlags,
) -> None:
    """Train every member of a study.

    A study is a grid of masks, encodings, depths and task settings, times seeds.

    Args:
        study: A study: task, model, optimiser, train, grid and seeds, in YAML.

    Example: `posbias train study.yaml --out runs/study` · then a member like any model: `posbias measure
    runs/study/models/0000 --length 10` · after a kill: the same with `--resume`
    """
    from posbias.training.running import train as train_study
    from posbias.training.study import load_study

    settings = replace(settings, engine=engine.of(settings.engine))
    with running(context, flags, resume=settings.resume) as run:
        trained = train_study(load_study(study), options=replace(settings, directory=run.directory))
        run.finish(trained.record)
    if trained.record.error is not None:
        raise RunError(trained.record.error)
