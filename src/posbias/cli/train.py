"""`posbias train`: the members of a study trained as stacked programs, each saved as a model of its own."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments
from posbias.errors import RunError

EXAMPLE = (
    "Example: `posbias train study.yaml --out runs/study` · then a member like any model: "
    "`posbias measure runs/study/models/0000 --length 10` · after a kill: the same with `--resume`"
)


def train(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(help="A study: task, model, optimiser, train, grid and seeds, in YAML.")],
    device: Annotated[str, typer.Option("--device", help="Where to train: cpu, cuda, cuda:1 ...")] = "cpu",
    engine: Annotated[str, typer.Option("--engine", help="Where stacks are trained: local, or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option("--workers", help="Stacks at a time.", min=1, show_default="1; ray: all")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Per stack; they share out the members.", min=1, show_default="all cores"),
    ] = None,
    ray_address: options.RayAddress = None,
    stack_size: Annotated[int, typer.Option("--stack-size", help="Most members in one program.", min=1)] = 64,
    yes: Annotated[bool, typer.Option("--yes", help="Train a study of more than 1000 members.")] = False,
    seed: options.UnusedSeed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoints.")] = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Train every member of a study: a grid of masks, encodings, depths and task settings, times seeds."""
    from posbias.cli.output import finish
    from posbias.records import run_directory
    from posbias.training import TrainingRun, load_study, run_study, training_record

    options.check_resume(resume, out)
    chosen = options.engine_of(engine, workers=workers, threads=threads, address=ray_address)
    wanted = load_study(study)
    arguments = passed_arguments(context)
    with run_directory(out, verb="train", arguments=arguments, resume=resume) as directory:
        run = TrainingRun(engine=chosen, device=device, directory=directory, resume=resume, stack_size=stack_size)
        done = run_study(wanted, run=run, confirmed=yes)
        record = training_record(done, arguments, command=command_line(context))
        finish(record, out=directory, as_json=json, found=done.found is not None)
        if record.error is not None:
            raise RunError(record.error)
