"""`posbias audit`: the whole examination of one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import behaviour_options as asked
from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments, was_given
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.auditing import Audit, AuditOptions, BehaviourPlan
    from posbias.records import Record

Initialisations = Annotated[
    int | None, typer.Option(help="Re-initialisations to measure; default: up to 8.", min=0, show_default=False)
]
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
    initialisations: Initialisations = None,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    checkpointing: options.Checkpointing = False,
    precision_prompts: options.PrecisionPrompts = 1,
    behaviour: asked.Behaviour = None,
    behaviour_count: asked.BehaviourCount = 12,
    behaviour_positions: asked.BehaviourPositions = "spread(5)",
    behaviour_tokens: asked.BehaviourTokens = None,
    behaviour_kinds: asked.BehaviourKinds = "jacobian(probes=2),logprob",
    behaviour_theories: asked.BehaviourTheories = True,
    engine: options.Engine = "local",
    workers: options.Workers = None,
    threads: options.Threads = None,
    ray_address: options.RayAddress = None,
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: options.Resume = False,
    out: Annotated[Path | None, options.out_option(options.RECORD_AND_REPORT, default="runs/MODEL")] = None,
    json: options.Json = False,
) -> None:
    """Examine a model trained and at initialisation, set every theory beside it, and write record, report and PNGs."""
    from posbias.auditing import AuditOptions, directory_names
    from posbias.measurement import PassOptions
    from posbias.prompts import PromptSource

    # Every later look at the parameters finds it there, as if it had been given.
    context.params["out"] = out or Path("runs") / next(iter(directory_names([model])))
    settings = AuditOptions(
        source=PromptSource(prompts, windows, shuffle),
        kinds=tuple(options.split_literals(kinds)),
        seed=seed,
        initialisations=initialisations,
        resume=resume,
        dtype=dtype,
        device=device,
        init_seed=init_seed,
        passes=PassOptions(checkpointing=checkpointing, precision_prompts=precision_prompts),
        max_memory=options.bytes_of(max_memory),
        engine=options.engine_of(engine, workers=workers, threads=threads, address=ray_address),
        command=command_line(context),
    )
    if behaviour is None:
        _refuse_behaviour_flags(context)
        _audit(context, settings)
    else:
        _audit_with_behaviour(context, settings)


def _refuse_behaviour_flags(context: typer.Context) -> None:
    """Flags of a task where none is named would change nothing.

    Raises:
        UsageError: one was given.
    """
    for parameter in context.command.params:
        if str(parameter.name).startswith("behaviour_") and was_given(context, str(parameter.name)):
            raise UsageError(f"{parameter.opts[0]} needs a task: --behaviour 'key_value(pairs=10)'")


def _audit(context: typer.Context, settings: "AuditOptions") -> None:
    """The audit alone."""
    from posbias.auditing import audit as run_audit
    from posbias.cli.output import print_json, record_document

    given = context.params
    finished = run_audit(
        given["model"], n_positions=given["length"], prompts=given["count"], out=given["out"], options=settings
    )
    if given["json"]:
        print_json(record_document(finished.record))
    else:
        _show_audit(finished)


def _audit_with_behaviour(context: typer.Context, settings: "AuditOptions") -> None:
    """The audit, and the answers to a task beside it in a run directory of its own; one model is loaded for both."""
    from posbias.auditing import audit as run_audit
    from posbias.auditing import audit_behaviour, link_behaviour, preflight_behaviour
    from posbias.cli.output import print_json, record_document
    from posbias.evaluation.record import BEHAVIOUR

    given, out = context.params, context.params["out"]
    plan = _plan(context, settings)
    model = settings.load(given["model"])
    plan = preflight_behaviour(model, plan)
    finished = run_audit(model, n_positions=given["length"], prompts=given["count"], out=out, options=settings)
    below = None if out is None else out / BEHAVIOUR
    arguments, command = passed_arguments(context), command_line(context)
    behaviour = audit_behaviour(model, plan, out=below, arguments=arguments, command=command)
    if out is not None:
        link_behaviour(finished.record, out)
    if given["json"]:
        print_json({**record_document(finished.record), "behaviour": record_document(behaviour)})
    else:
        _show_audit(finished)
        _show_behaviour(behaviour, out)


def _show_audit(finished: "Audit") -> None:
    from posbias.cli.output import print_record

    print_record(finished.record)
    typer.echo(f"report: {finished.report}")


def _plan(context: typer.Context, settings: "AuditOptions") -> "BehaviourPlan":
    """What `--behaviour` and its flags ask for.

    Raises:
        UsageError: an unknown task, or positions that it does not have.
    """
    from posbias.auditing import BehaviourPlan
    from posbias.evaluation import EvaluateOptions
    from posbias.measurement import resolve_kinds
    from posbias.tasks.language import LANGUAGE_TASKS

    given = context.params
    task = LANGUAGE_TASKS.parse(given["behaviour"])
    evaluation = EvaluateOptions(
        count=given["behaviour_count"],
        positions=asked.positions_of(given["behaviour_positions"], task),
        max_tokens=given["behaviour_tokens"],
        seed=settings.seed,
        resume=settings.resume,
        max_memory=settings.max_memory,
    )
    kinds = resolve_kinds(options.split_literals(given["behaviour_kinds"]))
    return BehaviourPlan(task, evaluation, kinds, given["behaviour_theories"])


def _show_behaviour(record: "Record", out: Path | None) -> None:
    from posbias.cli.output import print_record
    from posbias.evaluation.record import BEHAVIOUR
    from posbias.records import REPORT_FILE

    print_record(record)
    if out is not None:
        typer.echo(f"report: {out / BEHAVIOUR / REPORT_FILE}")
