"""`posbias audit`: the whole examination of one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

if TYPE_CHECKING:
    from posbias.auditing import AuditOptions, BehaviourPlan
    from posbias.records import Record

BEHAVIOUR = "behaviour"
"""Where the tie to behaviour is kept, below the audit's directory."""

EXAMPLE = (
    "Examples: `posbias audit demo --out runs/demo` · `posbias audit Qwen/Qwen3-0.6B --length 1024 --count 32 "
    "--prompts corpus.jsonl` · continue after an interruption: the same command with `--resume`"
)


def audit(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.")],
    prompts: options.PromptSource = "default",
    windows: options.Windows = "random",
    shuffle: options.Shuffle = False,
    length: options.Length = 512,
    count: options.Count = 16,
    kinds: options.Kinds = "jacobian,probability",
    births: Annotated[
        int | None,
        typer.Option(help="Re-initialisations to measure; default: up to 8.", min=0, show_default=False),
    ] = None,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    checkpointing: options.Checkpointing = False,
    behaviour: Annotated[
        str | None,
        typer.Option(
            "--behaviour",
            help="Tie influence to the answers of a task, e.g. 'key_value(pairs=10)'.",
            show_default=False,
        ),
    ] = None,
    behaviour_count: Annotated[int, typer.Option("--behaviour-count", help="Contents asked.", min=1)] = 12,
    behaviour_positions: Annotated[
        str, typer.Option("--behaviour-positions", help="all, spread(5), or places such as 0,4,9.")
    ] = "spread(5)",
    behaviour_tokens: Annotated[
        int | None, typer.Option("--behaviour-tokens", help="Generated at most.", min=1, show_default="the task's own")
    ] = None,
    behaviour_kinds: Annotated[
        str, typer.Option("--behaviour-kinds", help="Kinds of influence on the task's prompts; as --kinds.")
    ] = "jacobian(probes=2),logprob",
    behaviour_theories: Annotated[
        bool, typer.Option(help="Theories that read each of the task's prompts: the slower ones.")
    ] = True,
    engine: options.Engine = "local",
    workers: options.Workers = None,
    threads: options.Threads = None,
    ray_address: options.RayAddress = None,
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: options.Resume = False,
    out: options.Out = Path("runs/audit"),
    json: options.Json = False,
) -> None:
    """Examine a model as trained and at birth, set every theory beside it, and write record, report and PNGs."""
    from posbias.auditing import AuditOptions
    from posbias.auditing import audit as run_audit
    from posbias.cli.output import print_json, print_summary
    from posbias.measurement import PassOptions
    from posbias.prompts import PromptSource

    settings = AuditOptions(
        source=PromptSource(prompts, windows, shuffle),
        kinds=tuple(options.split_literals(kinds)),
        seed=seed,
        births=births,
        resume=resume,
        dtype=dtype,
        device=device,
        init_seed=init_seed,
        passes=PassOptions(checkpointing=checkpointing),
        max_memory=options.bytes_of(max_memory),
        engine=options.engine_of(engine, workers=workers, threads=threads, address=ray_address),
        command=command_line(context),
    )
    plan = None
    if behaviour is not None:
        plan = _plan(context, settings)
    finished = run_audit(model, n_positions=length, prompts=count, out=out, options=settings)
    tied = None if plan is None else _tie(model, plan, out, context)
    if json:
        own = finished.record.as_json()
        print_json(own if tied is None else {**own, "behaviour": tied.as_json()})
        return
    print_summary(finished.record)
    typer.echo(f"report: {finished.report}")
    if tied is not None:
        _show_tie(tied, out)


def _plan(context: typer.Context, settings: "AuditOptions") -> "BehaviourPlan":
    """What `--behaviour` and its flags ask for.

    Raises:
        UsageError: an unknown task, or positions that it does not have.
    """
    from posbias.auditing import BehaviourPlan
    from posbias.cli.evaluate import places_of
    from posbias.evaluation import EvaluateOptions
    from posbias.measurement import resolve_kinds
    from posbias.tasks.language import LANGUAGE_TASKS

    given = context.params
    asked = LANGUAGE_TASKS.parse(given["behaviour"])
    evaluation = EvaluateOptions(
        count=given["behaviour_count"],
        positions=places_of(given["behaviour_positions"], asked),
        max_tokens=given["behaviour_tokens"],
        seed=settings.seed,
        resume=settings.resume,
    )
    kinds = resolve_kinds(options.split_literals(given["behaviour_kinds"]))
    return BehaviourPlan(asked, evaluation, kinds, given["behaviour_theories"])


def _tie(model: str, plan: "BehaviourPlan", out: Path | None, context: typer.Context) -> "Record":
    """Behaviour and influence on the same prompts, in a run directory of its own below the audit's."""
    from posbias.auditing import audit_behaviour
    from posbias.models import load_model

    given = passed_arguments(context)
    loaded = load_model(
        model,
        init_seed=given["init_seed"],
        dtype=given["dtype"],
        device=given["device"],
        max_memory=options.bytes_of(given["max_memory"]),
    )
    directory = None if out is None else out / BEHAVIOUR
    return audit_behaviour(loaded, plan, out=directory, arguments=given, command=command_line(context))


def _show_tie(record: "Record", out: Path | None) -> None:
    from rich.console import Console

    from posbias.records import REPORT_FILE
    from posbias.report.behaviour import show_behaviour

    show_behaviour(record, Console())
    if out is not None:
        typer.echo(f"report: {out / BEHAVIOUR / REPORT_FILE}")
