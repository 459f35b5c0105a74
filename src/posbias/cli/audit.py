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
    seed: options.Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue without redoing finished prompts.")] = False,
    out: options.Out = Path("runs/audit"),
    json: options.Json = False,
) -> None:
    """Examine a model as trained and at birth, set every theory beside it, and write record, report and PNGs."""
    from posbias.auditing import AuditOptions
    from posbias.auditing import audit as run_audit
    from posbias.cli.output import print_json, print_summary

    settings = AuditOptions(
        source=prompts,
        kinds=tuple(options.split_literals(kinds)),
        seed=seed,
        births=births,
        resume=resume,
        dtype=dtype,
        device=device,
        init_seed=init_seed,
        command=command_line(context),
    )
    finished = run_audit(model, n_positions=length, prompts=count, out=out, options=settings)
    if json:
        print_json(finished.record.as_json())
        return
    print_summary(finished.record)
    typer.echo(f"report: {finished.report}")
