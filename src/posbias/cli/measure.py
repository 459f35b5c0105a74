"""`posbias measure`, `attention` and `decompose`: what is measured on models."""

from dataclasses import replace
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import UsageError
from posbias.measurement.options import AttentionOptions, Loading, MeasureOptions


def measure(
    context: typer.Context,
    model: list[str],
    *,
    prompts: options.PromptFlags,
    kinds: str = "jacobian,probability",
    settings: MeasureOptions,
    loading: Annotated[Loading, options.Take("template_options")],
    engine: options.EngineFlags,
    flags: options.RunFlags,
) -> None:
    """Measure the influence of every position on the last one.

    Also measures how strongly each layer mixes.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'; one.
        kinds: Kinds of influence (`posbias list kinds`), comma-separated.

    Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: `--init-seed 0` ·
    more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "target(text=' Paris')"`
    · layer by layer: `--depth-profiles all`
    """
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import measure as measured

    source, *others = model
    if others:
        raise UsageError(
            f"measure takes one model, got {', '.join(model)}; measure each into a directory of its own, and draw them "
            "on one page: posbias report DIRECTORY... --out BOTH"
        )
    asked, resolved = replace(settings, engine=engine.of(settings.engine)), resolve_kinds(kinds)
    arguments = {**options.passed_arguments(context), "model": source}
    with running(context, flags, resume=settings.resume, arguments=arguments) as run:
        loaded, drawn = prompts.opened(source, loading)
        run_options = replace(asked, directory=run.directory)
        run.finish(measured(loaded, drawn, kinds=resolved, seed=prompts.seed, options=run_options).record)


def attention(
    context: typer.Context,
    model: str,
    *,
    prompts: options.PromptFlags,
    settings: AttentionOptions,
    loading: Annotated[Loading, options.Take("template_options")],
    flags: options.RunFlags,
) -> None:
    """Measure a model's attention and its rollouts.

    Distance, entropy, sinks, content, kernels and mixing are averaged over prompts; no whole matrix is ever held.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.

    Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192
    --count 1`
    """
    from posbias.measurement.attention import attention as measured

    with running(context, flags) as run:
        loaded, drawn = prompts.opened(model, loading)
        run.finish(measured(loaded, drawn, options=replace(settings, directory=run.directory)).record)


def decompose(
    context: typer.Context,
    model: str,
    *,
    prompts: Annotated[options.PromptFlags, options.Take(length=256, count=8)],
    settings: DecomposeOptions,
    loading: Annotated[Loading, options.Take("template_options")],
    flags: options.RunFlags,
) -> None:
    """Show what each ingredient contributes to a model's profile.

    Mask, residual stream, encoding, content and sinks are replaced one at a time, and the profile is measured again.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.

    Examples: `posbias decompose demo --length 256 --count 8 --out runs/decomposed` · chosen changes: `--interventions
    'no_rope,window(width=64),sink_masked(positions=4)'` · all of them: `posbias list interventions`
    """
    from posbias.decomposition.decomposition import decompose as decompose_model
    from posbias.interventions import resolve_interventions
    from posbias.measurement.kinds import resolve_kinds

    replaced, kinds = resolve_interventions(settings.interventions), resolve_kinds(settings.kinds)
    with running(context, flags, resume=settings.resume) as run:
        loaded, drawn = prompts.opened(model, loading)
        asked = replace(settings, interventions=replaced, kinds=kinds, directory=run.directory)
        run.finish(decompose_model(loaded, drawn, options=asked).record)
