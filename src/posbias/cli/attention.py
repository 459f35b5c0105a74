"""`posbias attention`: what attention looks like in a model, and what its rollouts predict."""

from dataclasses import replace
from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

EXAMPLE = (
    "Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192 "
    "--count 1`"
)


@options.grouped
def attention(
    context: typer.Context,
    model: options.Model,
    *,
    prompts: options.PromptFlags,
    sink_thresholds: Annotated[str, typer.Option(help="Comma-separated thresholds of the sink score, in (0, 1).")] = (
        "0.2,0.3"
    ),
    loading: options.ModelFlags,
    flags: options.RunFlags,
) -> None:
    """Measure a model's attention and its rollouts.

    Distance, entropy, sinks, content, kernels and mixing are averaged over prompts; no whole matrix is ever held.
    """
    from posbias.measurement.attention import AttentionOptions
    from posbias.measurement.attention import attention as measured

    settings = AttentionOptions(sink_thresholds)  # type: ignore[arg-type]  # spelled as here
    with running(context, flags) as run:
        loaded = loading.load(model, prompts=prompts.prompts)
        read = prompts.drawn(loaded, seed=flags.seed)
        run.finish(measured(loaded, read, options=replace(settings, directory=run.directory)).record)
