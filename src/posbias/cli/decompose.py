"""`posbias decompose`: which ingredient makes a model's profile, replaced one at a time in model and theory."""

from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import UsageError

EXAMPLE = (
    "Examples: `posbias decompose demo --length 256 --count 8 --out runs/decomposed` · chosen changes: "
    "`--interventions 'no_rope,window(width=64),sink_masked(positions=4)'` · all of them: `posbias list interventions`"
)
KINDS = "jacobian(probes=2),probability"
INTERVENTIONS = "bidirectional,attention_scaled(factor=0.5),no_residual,no_rope,no_content,sink_masked"
FEW = options.PromptFlags(length=256, count=8)


@options.grouped
def decompose(
    context: typer.Context,
    model: options.Model,
    *,
    prompts: options.PromptFlags = FEW,
    interventions: Annotated[str, typer.Option(help="Comma-separated, each replaced on its own.")] = INTERVENTIONS,
    kinds: options.Kinds = KINDS,
    loading: options.ModelFlags,
    max_memory: options.MaxMemory = None,
    resume: options.Resume = False,
    flags: options.RunFlags,
) -> None:
    """Show what each ingredient contributes to a model's profile.

    Mask, residual stream, encoding, content and sinks are replaced one at a time, in the model and in theory.
    """
    from posbias.decomposition import DecompositionOptions, counterfactuals, finished_decomposition
    from posbias.decomposition.decomposition import preflight_decomposition
    from posbias.interventions import resolve_interventions
    from posbias.measurement.kinds import resolve_kinds
    from posbias.runs.parts import clear_parts

    options.check_resume(resume, flags.out)
    replaced = resolve_interventions(options.split_literals(interventions))
    measured = resolve_kinds(options.split_literals(kinds))
    allowed = options.bytes_of(max_memory)
    with running(context, flags, resume=resume) as run:
        loaded = loading.load(model, prompts=prompts.prompts, max_memory=allowed)
        read = prompts.drawn(loaded, seed=flags.seed)
        settings = DecompositionOptions(kinds=measured, seed=flags.seed, directory=run.directory, resume=resume)
        finished = finished_decomposition(loaded, read, interventions=replaced, options=settings)
        record = finished
        if record is None:
            cost = preflight_decomposition(loaded, read, interventions=replaced, options=settings, max_memory=allowed)
            result = counterfactuals(loaded, read, interventions=replaced, options=settings)
            if not any(item.profiles for item in result.counterfactuals):
                if run.directory is not None and not resume:  # resumed, pieces of an earlier request may be there
                    clear_parts(run.directory)
                reasons = [f"{item.name}: {next(iter(item.reasons.values()))}" for item in result.counterfactuals]
                raise UsageError(f"none of the interventions is possible here ({'; '.join(reasons)})")
            record = result.record(run.arguments, command=run.command)
            record.scalars["cost"] = cost
        run.finish(record, found=finished is not None)
