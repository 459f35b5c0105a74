"""`posbias attention`: what a model's attention looks like, and what rolling it out says of position bias."""

from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments
from posbias.errors import UsageError

EXAMPLE = (
    "Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192 "
    "--count 1` · the mean kernel of every head, saved whole: `--heads --kernels`"
)
Thresholds = Annotated[str, typer.Option(help="Comma-separated thresholds of the sink score, in (0, 1).")]
Cells = Annotated[
    int | None,
    typer.Option(
        "--kernel-cells",
        help="Side of the mean kernels in cells; default: every position up to 1024, else 256.",
        min=1,
        show_default=False,
    ),
]
Heads = Annotated[bool, typer.Option("--heads", help="Keep the mean kernel of every head too.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Save the mean kernels as kept, not drawn in at most 128 cells.")
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        help="Most that the process may hold, e.g. 6GB; also the bound on the kept matrices.",
        show_default="what is free, 4 GB of it for kept matrices",
    ),
]


def attention(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.")],
    prompts: options.PromptSource = "default",
    windows: options.Windows = "random",
    shuffle: options.Shuffle = False,
    length: options.Length = 512,
    count: options.Count = 16,
    thresholds: Thresholds = "0.2,0.3",
    kernel_cells: Cells = None,
    heads: Heads = False,
    kernels: Kernels = False,
    max_memory: MaxMemory = None,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Measure attention (distance, entropy, sinks, content, kernels, mixing ...) and roll it out, matrix-free."""
    from posbias.auditing import attention_record, preflight_attention
    from posbias.cli.output import finish
    from posbias.measurement import AttentionOptions, attention_statistics
    from posbias.measurement.attention.statistics import MEMORY_LIMIT
    from posbias.models import load_model
    from posbias.prompts import PromptSource, load_prompts
    from posbias.records import run_directory
    from posbias.theory.power_rollout import attention_rollouts

    allowed = options.bytes_of(max_memory)
    wanted = AttentionOptions(
        _numbers(thresholds),
        kernel_cells=kernel_cells,
        by_head=heads,
        memory_limit=allowed or MEMORY_LIMIT,
    )
    source = PromptSource(prompts, windows, shuffle)
    arguments = passed_arguments(context)
    with run_directory(out, verb="attention", arguments=arguments) as directory:
        loaded = load_model(model, init_seed=init_seed, dtype=dtype, device=device, max_memory=allowed)
        drawn = load_prompts(source, loaded, n_positions=length, count=count, seed=seed)
        cost = preflight_attention(loaded, drawn, options=wanted, max_memory=allowed)
        record = attention_record(
            attention_statistics(loaded, drawn, options=wanted),
            attention_rollouts(loaded, drawn),
            described=(loaded, drawn),
            arguments=arguments,
            resolved={"command": command_line(context), "options": wanted.describe()},
        )
        record.scalars["cost"] = cost
        finish(record, out=directory, as_json=json)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--thresholds must be numbers with commas between them, got {text!r}") from None
