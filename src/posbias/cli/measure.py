"""`posbias measure`: influence and mixing, without theories. `posbias attention`: how it looks, and its rollouts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, running, say
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.auditing import MeasurePlan
    from posbias.measurement.attention.statistics import AttentionOptions

MEASURE_EXAMPLE = (
    "Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: "
    "`--init-seed 0` · more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "
    "\"target(text=' Paris')\"` · layer by layer: `--depth-profiles all` · "
    "several models: `posbias measure A B C --out DIR`"
)


@dataclass(frozen=True)
class MeasurementFlags:
    """What is measured on every prompt, and how it is averaged."""

    kinds: options.Kinds = "jacobian,probability"
    output: Annotated[
        str, typer.Option(help="Which output: last, at(position=-5), mean(last=16), target(text=' Paris').")
    ] = "last"
    depth_profiles: Annotated[
        str | None, typer.Option(help="Profile after each layer: all, or e.g. 0,5,11.", show_default=False)
    ] = None
    averaging: Annotated[
        str, typer.Option(help="profiles: normalise each prompt, then average. norms: average, then normalise.")
    ] = "profiles"
    keep: Annotated[str, typer.Option(help="Profiles that a record holds: prompts (each prompt's), or mean.")] = (
        "prompts"
    )
    precision_prompts: options.PrecisionPrompts = 1
    checkpointing: options.Checkpointing = False


@options.grouped
def measure(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Hub ids, directories, file.gguf, 'demo' or 'config:PATH_OR_ID'."),
    ],
    *,
    prompts: options.PromptFlags,
    measured: MeasurementFlags,
    loading: options.ModelFlags,
    engine: options.EngineFlags,
    max_memory: options.MaxMemory = None,
    resume: options.Resume = False,
    flags: options.RunFlags,
) -> None:
    """Measure the influence of every position on the last one. And how strongly each layer mixes.

    Several models are measured one after another, each into a directory of its own under --out.
    """
    from posbias.auditing import MeasurePlan, measure_source
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import MeasureOptions, RunOptions
    from posbias.measurement.outputs import PassOptions

    options.check_resume(resume, flags.out)
    passes = PassOptions(
        checkpointing=measured.checkpointing or loading.device == "auto",
        output=measured.output,
        layers=options.layers_of(measured.depth_profiles),
        precision_prompts=measured.precision_prompts,
    )
    settings = MeasureOptions(
        averaging=measured.averaging,
        keep=measured.keep,
        passes=passes,
        run=RunOptions(engine.made(), resume=resume, overwrite=flags.overwrite),
    )
    plan = MeasurePlan(
        source=prompts.source,
        n_positions=prompts.length,
        count=prompts.count,
        kinds=resolve_kinds(options.split_literals(measured.kinds)),
        seed=flags.seed,
        options=settings,
        **vars(loading),
        max_memory=options.bytes_of(max_memory),
    )
    arguments = {name: value for name, value in options.passed_arguments(context).items() if name != "models"}
    if len(models) > 1:
        _measure_several(models, plan, flags, arguments=arguments, command=options.command_line(context))
        return
    with running(context, flags, resume=resume, arguments={"model": models[0], **arguments}) as run:
        record, found = measure_source(
            models[0], plan, directory=run.directory, arguments=run.arguments, command=run.command
        )
        run.finish(record, found=found)


def _measure_several(
    models: list[str], plan: "MeasurePlan", flags: options.RunFlags, *, arguments: dict[str, Any], command: str
) -> None:
    """Several models, each in a directory of its own; one that fails does not keep the next from being measured."""
    from posbias.auditing import measure_models
    from posbias.errors import RunError
    from posbias.records import REPORT_FILE

    documents, failed = {}, {}
    for name, record in measure_models(models, plan, out=flags.out, arguments=arguments, command=command):
        if record.status == "failed":
            failed[name] = record.error
        elif not flags.json:
            print_record(record)
        documents[name] = record_document(record) if flags.json else {}
    if flags.json:
        print_json({"models": documents})
    elif flags.out is not None and len(failed) < len(documents):
        say(f"report: {flags.out / REPORT_FILE}")
    if failed:
        name, reason = next(iter(failed.items()))
        raise RunError(f"{len(failed)} of {len(documents)} models failed, first {name}: {reason}")


ATTENTION_EXAMPLE = (
    "Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192 "
    "--count 1` · the mean kernel of every head, saved whole: `--heads --kernels`"
)


@dataclass(frozen=True)
class StatisticsFlags:
    """What is measured of attention, and kept."""

    thresholds: Annotated[str, typer.Option(help="Comma-separated thresholds of the sink score, in (0, 1).")] = (
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
    heads: Annotated[bool, typer.Option("--heads", help="Keep the mean kernel of every head too.")] = False
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Save the mean kernels as kept, not drawn in at most 128 cells.")
    ] = False
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Most that the process may hold, e.g. 6GB; also the bound on the kept matrices.",
            show_default="what is free, 4 GB of it for kept matrices",
        ),
    ] = None

    def options(self) -> "AttentionOptions":
        """As the library takes it."""
        from posbias.measurement.attention.statistics import MEMORY_LIMIT, AttentionOptions

        try:
            thresholds = tuple(float(part) for part in self.thresholds.split(","))
        except ValueError:
            raise UsageError(
                f"--thresholds must be numbers with commas between them, got {self.thresholds!r}"
            ) from None
        return AttentionOptions(
            thresholds,
            kernel_cells=self.kernel_cells,
            by_head=self.heads,
            memory_limit=options.bytes_of(self.max_memory) or MEMORY_LIMIT,
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
    """Measure attention, and roll it out. Distance, entropy, sinks, content, kernels, mixing ...; matrix-free."""
    from posbias.auditing import attention_record, preflight_attention
    from posbias.measurement.attention.streaming import attention_statistics
    from posbias.theory.power_rollout import attention_rollouts

    allowed = options.bytes_of(statistics.max_memory)
    wanted = statistics.options()
    with running(context, flags) as run:
        loaded = loading.load(model, max_memory=allowed)
        drawn = prompts.drawn(loaded, seed=flags.seed)
        cost = preflight_attention(loaded, drawn, options=wanted, max_memory=allowed)
        record = attention_record(
            attention_statistics(loaded, drawn, options=wanted),
            attention_rollouts(loaded, drawn),
            described=(loaded, drawn),
            arguments=run.arguments,
            resolved={"command": run.command, "options": wanted.describe()},
        )
        record.scalars["cost"] = cost
        run.finish(record)
