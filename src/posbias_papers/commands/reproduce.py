"""`posbias reproduce`: published experiments run again."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

if TYPE_CHECKING:
    from posbias_papers import Experiment

EXAMPLE = (
    "Examples: `posbias reproduce rollout-2602.16837 --out runs/rollout` · `posbias reproduce birth-2603.10123` · "
    "at the real sizes: `posbias reproduce birth-2603.10123 --size full --initialisations 2` · trained: "
    "`posbias reproduce position-copy-liu2026 --size small --out runs/copy`"
)


@dataclass(frozen=True)
class BirthFlags:
    """Settings of the experiment on initialisations."""

    length: options.Length = 256
    initialisations: Annotated[
        int, typer.Option(help="birth: random initialisations, each with its own prompt.", min=2)
    ] = 8
    probes: Annotated[int, typer.Option(help="birth: random probes per Jacobian.", min=1)] = 8
    tokenizer: Annotated[str, typer.Option(help="birth: text as 'bytes', or with the 'demo' tokenizer.")] = "bytes"


@dataclass(frozen=True)
class TrainedFlags:
    """Settings of the experiments that train."""

    study: Annotated[
        list[str] | None, typer.Option(help="trained: one of the paper's studies (repeatable); by default all.")
    ] = None
    device: options.Device = options.AUTO


@options.grouped
def reproduce(
    context: typer.Context,
    paper: Annotated[
        str,
        typer.Argument(
            help="rollout-2602.16837, birth-2603.10123, icl-2502.01951 or position-copy-liu2026.", show_default=False
        ),
    ],
    *,
    size: Annotated[
        str,
        typer.Option(
            help="birth: small (d 256), full (Qwen2-0.5B, GPT-2 medium) or tiny; trained: smoke (a minute), "
            "small (half an hour of two cores) or full (the source's steps)."
        ),
    ] = "small",
    birth: BirthFlags,
    trained: TrainedFlags,
    engine: options.EngineFlags,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="trained: judge finished studies again and continue unfinished ones."),
    ] = False,
    flags: options.RunFlags,
) -> None:
    """Run a published experiment again.

    The report compares the paper's numbers with the new ones and gives a verdict on each statement.
    """
    from posbias.training import TrainOptions
    from posbias_papers import PAPERS, reproduction_record

    experiment: Experiment = PAPERS[paper]()
    _refuse_settings(context, paper)
    values = {
        **{"n_positions" if name == "length" else name: value for name, value in vars(birth).items()},
        "size": size,
        "seed": flags.seed,
        "studies": tuple(trained.study or ()),
        "run": TrainOptions(
            engine=engine.made(), device=trained.device, directory=flags.out, resume=resume, overwrite=flags.overwrite
        ),
    }
    settings = None
    if experiment.settings is not None:
        settings = experiment.settings(**{name: values[name] for name in _settings_of(experiment)})
    settings = experiment.check(settings)
    with running(context, flags, resume=resume) as run:
        run.finish(reproduction_record(experiment.run(settings), run.arguments, command=run.command))


def _settings_of(experiment: "Experiment | type[Experiment]") -> list[str]:
    return [] if experiment.settings is None else [field.name for field in fields(experiment.settings)]


def _refuse_settings(context: typer.Context, paper: str) -> None:
    """Refuse options of another experiment, which would change nothing here."""
    from posbias_papers import PAPERS

    of_training = [*options.names_of(TrainedFlags), *options.names_of(options.EngineFlags), "resume"]
    flags = {"n_positions": ["length"], "studies": [], "run": of_training}
    settings = {
        name: [flag for setting in _settings_of(PAPERS[name]) for flag in flags.get(setting, [setting])]
        for name in PAPERS
    }
    taken = settings.get(paper, [])
    for name in dict.fromkeys(name for names in settings.values() for name in names if name not in taken):
        owners = ", ".join(owner for owner, names in settings.items() if name in names)
        allowed = " ".join(f"--{other.replace('_', '-')}" for other in (*taken, "out", "json"))
        options.refuse(context, [name], f"belongs to {owners}; {paper} takes {allowed} only")
