"""`posbias measure`: influence and mixing of one model or of several, without theories."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments
from posbias.records import REPORT_FILE

if TYPE_CHECKING:
    from posbias.auditing import MeasurePlan

EXAMPLE = (
    "Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: "
    "`--init-seed 0` · more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "
    "\"target(text=' Paris')\"` · layer by layer: `--depth-profiles all` · "
    "several models: `posbias measure A B C --out DIR`"
)
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Hub ids, directories, file.gguf, 'demo' or 'config:PATH_OR_ID'."),
]
Averaging = Annotated[
    str, typer.Option(help="profiles: normalise each prompt, then average. norms: average, then normalise.")
]


def measure(
    context: typer.Context,
    models: Models,
    prompts: options.PromptSource = "default",
    windows: options.Windows = "random",
    shuffle: options.Shuffle = False,
    length: options.Length = 512,
    count: options.Count = 16,
    kinds: options.Kinds = "jacobian,probability",
    output: options.Output = "last",
    depth_profiles: options.DepthProfiles = None,
    averaging: Averaging = "profiles",
    keep: options.Keep = "prompts",
    precision_prompts: options.PrecisionPrompts = 1,
    checkpointing: options.Checkpointing = False,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    engine: options.Engine = "local",
    workers: options.Workers = None,
    threads: options.Threads = None,
    ray_address: options.RayAddress = None,
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: options.Resume = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Measure how much every input position influences the last one, and how strongly each layer mixes.

    Several models are measured one after another, each into a directory of its own under --out.
    """
    from posbias.auditing import MeasurePlan
    from posbias.measurement import MeasureOptions, PassOptions, RunOptions, resolve_kinds
    from posbias.prompts import PromptSource

    options.check_resume(resume, out)
    passes = PassOptions(
        checkpointing=checkpointing or device == "auto",
        output=output,
        layers=options.layers_of(depth_profiles),
        precision_prompts=precision_prompts,
    )
    run = RunOptions(options.engine_of(engine, workers=workers, threads=threads, address=ray_address), resume=resume)
    plan = MeasurePlan(
        source=PromptSource(prompts, windows, shuffle),
        n_positions=length,
        count=count,
        kinds=resolve_kinds(options.split_literals(kinds)),
        seed=seed,
        options=MeasureOptions(averaging=averaging, keep=keep, passes=passes, run=run),
        init_seed=init_seed,
        dtype=dtype,
        device=device,
        max_memory=options.bytes_of(max_memory),
    )
    if len(models) == 1:
        _measure_one(context, models[0], plan, out=out, as_json=json)
    else:
        _measure_several(context, models, plan, out=out, as_json=json)


def _measure_one(context: typer.Context, model: str, plan: "MeasurePlan", *, out: Path | None, as_json: bool) -> None:
    """One model, in the directory itself."""
    from posbias.auditing import measure_source
    from posbias.cli.output import finish
    from posbias.records import run_directory

    arguments = {"model": model, **_shared(context)}
    with run_directory(out, verb="measure", arguments=arguments, resume=plan.options.run.resume) as directory:
        record, found = measure_source(
            model, plan, directory=directory, arguments=arguments, command=command_line(context)
        )
        finish(record, out=directory, as_json=as_json, found=found)


def _measure_several(
    context: typer.Context, models: list[str], plan: "MeasurePlan", *, out: Path | None, as_json: bool
) -> None:
    """Several models, each in a directory of its own; one that fails does not keep the next from being measured."""
    from posbias.auditing import measure_models
    from posbias.cli.output import print_json, print_record, record_document
    from posbias.errors import RunError

    documents, failed = {}, {}
    for name, record in measure_models(
        models, plan, out=out, arguments=_shared(context), command=command_line(context)
    ):
        if record.status == "failed":
            failed[name] = record.error
        elif not as_json:
            print_record(record)
        documents[name] = record_document(record) if as_json else {}
    if as_json:
        print_json({"models": documents})
    elif out is not None and len(failed) < len(documents):
        typer.echo(f"report: {out / REPORT_FILE}")
    if failed:
        name, reason = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(documents)} models failed, first {name}: {reason}")


def _shared(context: typer.Context) -> dict[str, Any]:
    """The arguments but for the models."""
    return {name: value for name, value in passed_arguments(context).items() if name != "models"}
