"""`posbias decompose`: which ingredient makes a model's profile, replaced one at a time in model and theory."""

from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

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
    resume: options.Resume = False,
    flags: options.RunFlags,
) -> None:
    """Show what each ingredient contributes to a model's profile.

    Mask, residual stream, encoding, content and sinks are replaced one at a time, in the model and in theory.
    """
    from posbias.decomposition import DecomposeOptions
    from posbias.decomposition import decompose as decompose_model
    from posbias.interventions import resolve_interventions
    from posbias.measurement.kinds import resolve_kinds

    replaced = resolve_interventions(interventions)
    measured = resolve_kinds(kinds)
    with running(context, flags, resume=resume) as run:
        loaded = loading.load(model, prompts=prompts.prompts)
        read = prompts.drawn(loaded, seed=flags.seed)
        settings = DecomposeOptions(
            interventions=replaced,
            kinds=measured,
            seed=flags.seed,
            directory=run.directory,
            resume=resume,
        )
        run.finish(decompose_model(loaded, read, options=settings).record)
