"""`posbias decompose`: which ingredient makes a model's profile, replaced one at a time in model and theory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.decomposition import DecompositionOptions
    from posbias.interventions import Intervention
    from posbias.models import Model
    from posbias.prompts import Prompts
    from posbias.records import Record

EXAMPLE = (
    "Examples: `posbias decompose demo --length 256 --count 8 --out runs/decomposed` · chosen changes: "
    "`--interventions 'no_rope,window(width=64),sink_masked(positions=4)'` · all of them: `posbias list interventions`"
)
KINDS = "jacobian(probes=2),probability"
INTERVENTIONS = "bidirectional,attention_scaled(factor=0.5),no_residual,no_rope,no_content,sink_masked"


def decompose(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.")],
    prompts: options.PromptSource = "default",
    windows: options.Windows = "random",
    shuffle: options.Shuffle = False,
    length: options.Length = 256,
    count: options.Count = 8,
    interventions: Annotated[
        str, typer.Option("--interventions", help="Comma-separated, each replaced on its own.")
    ] = INTERVENTIONS,
    kinds: options.Kinds = KINDS,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run without redoing what it finished.")
    ] = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Replace one ingredient at a time (mask, residual, encoding, content, sinks), measured and in every theory."""
    from posbias.cli.output import finish
    from posbias.decomposition import DecompositionOptions, finished_decomposition
    from posbias.decomposition.decomposition import preflight_decomposition
    from posbias.interventions import resolve_interventions
    from posbias.measurement import resolve_kinds
    from posbias.models import load_model
    from posbias.prompts import PromptSource, load_prompts
    from posbias.records import run_directory

    options.check_resume(resume, out)
    wanted = resolve_interventions(options.split_literals(interventions))
    known = resolve_kinds(options.split_literals(kinds))
    source = PromptSource(prompts, windows, shuffle)
    allowed = options.bytes_of(max_memory)
    arguments = passed_arguments(context)
    with run_directory(out, verb="decompose", arguments=arguments, resume=resume) as directory:
        loaded = load_model(model, init_seed=init_seed, dtype=dtype, device=device, max_memory=allowed)
        drawn = load_prompts(source, loaded, n_positions=length, count=count, seed=seed)
        settings = DecompositionOptions(kinds=known, seed=seed, directory=directory, resume=resume)
        finished = finished_decomposition(loaded, drawn, interventions=wanted, options=settings)
        record = finished
        if record is None:
            cost = preflight_decomposition(loaded, drawn, interventions=wanted, options=settings, max_memory=allowed)
            record = _decomposed(context, loaded, drawn, interventions=wanted, settings=settings)
            record.scalars["cost"] = cost
        finish(record, out=directory, as_json=json, found=finished is not None)


def _decomposed(
    context: typer.Context,
    model: "Model",
    prompts: "Prompts",
    *,
    interventions: "Sequence[Intervention]",
    settings: "DecompositionOptions",
) -> "Record":
    """The decomposition as a record.

    Raises:
        UsageError: none of the interventions is possible; or as raised by `counterfactuals`.
    """
    from posbias.decomposition import counterfactuals
    from posbias.parts import clear_parts

    found = counterfactuals(model, prompts, interventions=interventions, options=settings)
    if not any(item.profiles for item in found.counterfactuals):
        if settings.directory is not None and not settings.resume:  # resumed, pieces of an earlier request may be there
            clear_parts(settings.directory)
        reasons = [f"{item.name}: {next(iter(item.reasons.values()))}" for item in found.counterfactuals]
        raise UsageError(f"none of the interventions is possible here ({'; '.join(reasons)})")
    return found.record(passed_arguments(context), command=command_line(context))
