"""`posbias attention`: what attention looks like in a model, and what its rollouts predict."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running

if TYPE_CHECKING:
    from posbias.measurement.attention.options import AttentionOptions

EXAMPLE = (
    "Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192 "
    "--count 1`"
)


@dataclass(frozen=True)
class StatisticsFlags:
    """Statistics that are measured and kept."""

    sink_thresholds: Annotated[str, typer.Option(help="Comma-separated thresholds of the sink score, in (0, 1).")] = (
        "0.2,0.3"
    )
    kernel_cells: Annotated[
        int | None,
        typer.Option(
            help="Side of the mean kernels in cells; default: every position up to 1024, else 256.",
            min=1,
            show_default=False,
        ),
    ] = None

    def options(self) -> "AttentionOptions":
        """Parse them into the options of the library."""
        from posbias.measurement.attention.options import AttentionOptions

        return AttentionOptions(
            self.sink_thresholds,  # type: ignore[arg-type]  # spelled as here
            kernel_cells=self.kernel_cells,
        )


@options.grouped
def attention(
    context: typer.Context,
    model: options.Model,
    *,
    prompts: options.PromptFlags,
    statistics: StatisticsFlags,
    loading: options.ModelFlags,
    flags: options.RunFlags,
) -> None:
    """Measure a model's attention and its rollouts.

    Distance, entropy, sinks, content, kernels and mixing are averaged over prompts; no whole matrix is ever held.
    """
    from posbias.measurement.attention.run import attention as measured

    settings = statistics.options()
    with running(context, flags) as run:
        loaded = loading.load(model, prompts=prompts.prompts)
        read = prompts.drawn(loaded, seed=flags.seed)
        run.finish(measured(loaded, read, options=replace(settings, directory=run.directory)).record)
