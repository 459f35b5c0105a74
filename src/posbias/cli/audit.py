"""`posbias audit`: the whole examination of one model."""

from pathlib import Path
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line

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
        typer.Option("--behaviour", help="Tie influence to the answers of a task, e.g. 'key_value(pairs=10)'.", show_default=False),
    ] = None,
    behaviour_count: Annotated[int, typer.Option("--behaviour-count", help="Contents asked.", min=1)] = 12,
    behaviour_positions: Annotated[
        str, typer.Option("--behaviour-positions", help="all, spread(5), or places such as 0,4,9.")
    ] = "spread(5)",
    behaviour_tokens: Annotated[
        int | None, typer.Option("--behaviour-tokens", help="Generated at most.", min=1, show_default="the task's own")
    ] = None,
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
    from posbias.auditing import AuditOptions, BehaviourPlan, audit_behaviour
    from posbias.auditing import audit as run_audit
    from posbias.cli.evaluate import places_of
    from posbias.cli.output import print_json, print_summary
    from posbias.evaluation import EvaluateOptions
    from posbias.measurement import PassOptions
    from posbias.models import load_model
    from posbias.prompts import PromptSource
    from posbias.report.behaviour import show_behaviour
    from posbias.tasks.language import LANGUAGE_TASKS

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
    finished = run_audit(model, n_positions=length, prompts=count, out=out, options=settings)
    if json:
        print_json(finished.record.as_json())
        return
    print_summary(finished.record)
    typer.echo(f"report: {finished.report}")
