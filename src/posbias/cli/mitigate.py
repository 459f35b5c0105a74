"""`posbias mitigate`: methods against position bias, tried and judged on one model and task."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.evaluate import GateFlags, LocalFlags, ServerFlags, TaskFlags, check_answerer
from posbias.cli.output import running

EXAMPLE = (
    "Examples: `posbias mitigate demo --task 'key_value(pairs=8)' --methods key_bias,temperature --out runs/better` "
    "· in a pipeline, exit code 1 if it is not met: `--require 'worst>=0.6'` · a server takes methods around the "
    "model: `--server URL --served-model NAME` · after an interruption the same command with `--resume`"
)


@dataclass(frozen=True)
class MethodFlags:
    """Methods that are tried, and the samples and measure that judge them."""

    methods: Annotated[
        str,
        typer.Option(
            help="Separated by commas: key_bias,temperature(scale=0.16),recipe.json (see `list`); all takes hours.",
            show_default="the three that helped most often",
        ),
    ] = "default"
    calibration: Annotated[
        int | None,
        typer.Option(
            help="Samples for fitting, the first ones; they do not count in the verdict.",
            min=0,
            show_default="12, of a short file a third",
        ),
    ] = None
    fit: Annotated[
        str,
        typer.Option(
            help="How methods are fitted, such as 'steps=600, rate=0.02'.",
            show_default="docs/mitigate.md",
        ),
    ] = ""
    by: Annotated[
        str | None,
        typer.Option(
            help="accuracy, starts (answers that begin with the right one) or logprob.",
            show_default="accuracy, unless it is near 0 or 1",
        ),
    ] = None
    documents: Annotated[
        int, typer.Option(help="Windows of ordinary text on which loss (nats per token) is compared.", min=0)
    ] = 16
    text: Annotated[
        str, typer.Option(help="Ordinary text: a file or data set, as for `measure --prompts`; fits never read it.")
    ] = "default"
    tolerance: Annotated[
        float, typer.Option(help="Largest acceptable loss increase on ordinary text (nats per token).", min=0.0)
    ] = 0.02
    short: Annotated[bool, typer.Option(help="Also test short forms: the gold document alone, none; two pairs.")] = True


@options.grouped
def mitigate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, directory, file.gguf or 'demo'; not with --server.", show_default=False),
    ] = None,
    *,
    chosen: MethodFlags,
    evaluated: TaskFlags,
    local: LocalFlags,
    served: ServerFlags,
    resume: options.Resume = False,
    gate: GateFlags,
    flags: options.RunFlags,
) -> None:
    """Try methods against position bias, and say which to apply. Each gets a verdict; no weight is changed."""
    from posbias.mitigation.fitting import FitOptions
    from posbias.mitigation.methods.recipe import check_files
    from posbias.mitigation.plan import MitigateOptions
    from posbias.mitigation.run import mitigate as try_methods
    from posbias.mitigation.subjects import Unopened
    from posbias.tasks.language import LANGUAGE_TASKS

    check_answerer(context, model, served)
    task = LANGUAGE_TASKS.parse(evaluated.task)
    settings = MitigateOptions(
        methods=chosen.methods,
        calibration=chosen.calibration,
        fitting=FitOptions.parse(chosen.fit),
        evaluation=evaluated.settings(seed=flags.seed, resume=resume),
        by=chosen.by,
        documents=chosen.documents,
        text=chosen.text,
        tolerance=chosen.tolerance,
        short=chosen.short,
        require=gate.requirement,
    )
    template_options = evaluated.for_template(task, served=bool(served.server))
    check_files(settings.entries)  # before a model is loaded
    with running(context, flags, resume=resume) as run:
        if served.server:
            subject: Any = served.responder(run.directory, reuse=resume, template_options=template_options)
        else:
            subject = Unopened(str(model), partial(local.responder, str(model), template_options=template_options))
        trial = try_methods(subject, task, options=settings, directory=run.directory)
        run.finish(trial.record)
    if trial.requirement is not None:
        gate.judge(trial.requirement, quiet=flags.json)
