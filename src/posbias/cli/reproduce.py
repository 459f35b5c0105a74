"""`posbias reproduce`: a published experiment run again, its numbers beside the published ones."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.errors import UsageError

if TYPE_CHECKING:
    pass

EXAMPLE = (
    "Examples: `posbias reproduce rollout-2602.16837 --out runs/rollout` · `posbias reproduce birth-2603.10123` · "
    "at the real sizes: `posbias reproduce birth-2603.10123 --size full --initialisations 2` · trained: "
    "`posbias reproduce position-copy-liu2026 --size small --out runs/copy`"
)
BIRTH = "birth-2603.10123"
TRAINED = ("icl-2502.01951", "position-copy-liu2026")
SETTINGS = {
    BIRTH: ("size", "length", "initialisations", "probes", "tokenizer", "seed"),
    **dict.fromkeys(
        TRAINED, ("size", "study", "device", "engine", "workers", "threads", "ray_address", "resume", "seed")
    ),
}
"""Flags that each experiment takes, beside --out and --json."""
Paper = Annotated[
    str,
    typer.Argument(
        help="rollout-2602.16837, birth-2603.10123, icl-2502.01951 or position-copy-liu2026.", show_default=False
    ),
]
Size = Annotated[
    str,
    typer.Option(
        help="birth: small (d 256), full (Qwen2-0.5B, GPT-2 medium) or tiny; trained: smoke (a minute), "
        "small (half an hour of two cores) or full (the source's steps)."
    ),
]
Initialisations = Annotated[int, typer.Option(help="birth: random initialisations, each with its own prompt.", min=2)]
Probes = Annotated[int, typer.Option(help="birth: random probes per Jacobian.", min=1)]
Tokenizer = Annotated[str, typer.Option(help="birth: text as 'bytes', or with the 'demo' tokenizer.")]
Study = Annotated[
    list[str] | None, typer.Option(help="trained: one of the paper's studies, repeatable; all unless given.")
]
Device = Annotated[str, typer.Option(help="trained: where, cpu, cuda, cuda:1 ...")]
Engine = Annotated[str, typer.Option(help="trained: local, or ray.")]
Workers = Annotated[int | None, typer.Option(help="trained: stacks at a time.", min=1, show_default="1; ray: all")]
Threads = Annotated[int | None, typer.Option(help="trained: per stack.", min=1, show_default="all cores")]
Resume = Annotated[
    bool, typer.Option("--resume", help="trained: read finished studies back, judge anew; go on with unfinished ones.")
]


def reproduce(
    context: typer.Context,
    paper: Paper,
    size: Size = "small",
    length: options.Length = 256,
    initialisations: Initialisations = 8,
    probes: Probes = 8,
    tokenizer: Tokenizer = "bytes",
    study: Study = None,
    device: Device = "cpu",
    engine: Engine = "local",
    workers: Workers = None,
    threads: Threads = None,
    ray_address: options.RayAddress = None,
    resume: Resume = False,
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Run a published experiment again: what the paper reports, what comes out, and what survives."""
    from posbias.cli.invocation import command_line, passed_arguments
    from posbias.cli.output import finish
    from posbias.papers import PAPERS
    from posbias.papers import reproduce as run_again
    from posbias.papers.reproduction import reproduction_record
    from posbias.papers.study_runs import finished_reproduction, reproduction_settings
    from posbias.parts import fingerprint
    from posbias.records import run_directory

    arguments = passed_arguments(context)
    _ = PAPERS[paper]
    _refuse_settings(context, paper)
    options.check_resume(resume, out)
    settings: Any = None
    if paper == BIRTH:
        from posbias.papers.birth2603.models import BirthSettings

        settings = BirthSettings(
            size=size,
            n_positions=length,
            initialisations=initialisations,
            probes=probes,
            seed=seed,
            tokenizer=tokenizer,
        )
    elif paper in TRAINED:
        from posbias.papers.study_runs import StudySettings, shipped_studies
        from posbias.training import TrainingRun

        chosen = options.engine_of(engine, workers=workers, threads=threads, address=ray_address)
        run = TrainingRun(engine=chosen, device=device, directory=out, resume=resume)
        settings = StudySettings(size=size, studies=tuple(study or ()), seed=seed, run=run)
        shipped_studies(paper, settings)
    with run_directory(out, verb="reproduce", arguments=arguments, resume=resume) as directory:
        found = finished_reproduction(paper, settings) if resume else None
        record = found
        if record is None:
            record = reproduction_record(run_again(paper, settings=settings), arguments, command=command_line(context))
            if paper in TRAINED and directory is not None:
                record.resolved["fingerprint"] = fingerprint(reproduction_settings(paper, settings))
        finish(record, out=directory, as_json=json, found=found is not None)


def _refuse_settings(context: typer.Context, paper: str) -> None:
    """Flags of another experiment change nothing here; that is said rather than passed over."""
    taken = SETTINGS.get(paper, ())
    for name in dict.fromkeys(name for names in SETTINGS.values() for name in names):
        source = context.get_parameter_source(name)
        if name not in taken and source is not None and source.name == "COMMANDLINE":
            owners = ", ".join(owner for owner, names in SETTINGS.items() if name in names)
            flags = " ".join(f"--{flag.replace('_', '-')}" for flag in (*taken, "out", "json"))
            raise UsageError(f"--{name.replace('_', '-')} belongs to {owners}; {paper} takes {flags} only")
