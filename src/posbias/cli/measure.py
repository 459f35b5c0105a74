"""`posbias measure`: influence and mixing of one model, without theories."""

from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

EXAMPLE = (
    "Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at birth: `--init-seed 0` · "
    "more probes: `--kinds 'jacobian(probes=16)'`"
)


def measure(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.")],
    prompts: options.PromptSource = "default",
    length: options.Length = 512,
    count: options.Count = 16,
    kinds: options.Kinds = "jacobian,probability",
    averaging: Annotated[
        str, typer.Option(help="profiles: normalise each prompt, then average. norms: average, then normalise.")
    ] = "profiles",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Trade time for memory.")] = False,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Measure how much every input position influences the last one, and how strongly each layer mixes."""
    from posbias.auditing import measurement_record
    from posbias.cli.output import finish
    from posbias.measurement import MeasureOptions, PassOptions, resolve_kinds
    from posbias.measurement import measure as measure_model
    from posbias.models import load_model
    from posbias.prompts import load_prompts
    from posbias.records import run_directory

    settings = MeasureOptions(averaging=averaging, passes=PassOptions(checkpointing=checkpointing))
    wanted = resolve_kinds(options.split_literals(kinds))
    arguments = passed_arguments(context)
    with run_directory(out, verb="measure", arguments=arguments) as directory:
        loaded = load_model(model, init_seed=init_seed, dtype=dtype, device=device)
        drawn = load_prompts(prompts, loaded, n_positions=length, count=count, seed=seed)
        measurement = measure_model(loaded, drawn, kinds=wanted, seed=seed, options=settings)
        record = measurement_record(measurement, loaded, drawn, arguments, command=command_line(context))
        finish(record, out=directory, as_json=json)
