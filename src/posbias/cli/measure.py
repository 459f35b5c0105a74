"""`posbias measure`: influence and mixing of one or several models, without theories."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, running, say

if TYPE_CHECKING:
    from posbias.measurement.measurement import MeasurePlan

EXAMPLE = (
    "Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: "
    "`--init-seed 0` · more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "
    "\"target(text=' Paris')\"` · layer by layer: `--depth-profiles all` · "
    "several models: `posbias measure A B C --out DIR`"
)


@dataclass(frozen=True)
class MeasurementFlags:
    """Quantities measured on every prompt."""

    kinds: options.Kinds = "jacobian,probability"
    output: Annotated[
        str,
        typer.Option(
            help="Output whose change is measured: last, at(position=-5), mean(last=16), target(text=' Paris')."
        ),
    ] = "last"
    depth_profiles: Annotated[
        str | None, typer.Option(help="Profile after each layer: all, or e.g. 0,5,11.", show_default=False)
    ] = None
    precision_prompts: Annotated[
        int, typer.Option(help="If the model is less precise than float32, prompts to repeat in float32.", min=0)
    ] = 1
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
    resume: options.Resume = False,
    flags: options.RunFlags,
) -> None:
    """Measure the influence of every position on the last one.

    Also measures how strongly each layer mixes. Several models are measured one after another, each into a directory
    of its own under --out.
    """
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import MeasurePlan, measure_source
    from posbias.measurement.units import MeasureOptions

    options.check_resume(resume, flags.out)
    settings = MeasureOptions(
        checkpointing=measured.checkpointing,
        precision_prompts=measured.precision_prompts,
        output=measured.output,
        layers=measured.depth_profiles,  # type: ignore[arg-type]  # spelled as there
        engine=engine.made(),
        resume=resume,
        overwrite=flags.overwrite,
    )
    plan = MeasurePlan(
        source=prompts.source,
        n_positions=prompts.length,
        count=prompts.count,
        kinds=resolve_kinds(measured.kinds),
        seed=flags.seed,
        options=settings,
        **loading.settings(prompts.prompts),
    )
    arguments = {name: value for name, value in options.passed_arguments(context).items() if name != "models"}
    if len(models) > 1:
        _measure_several(models, plan, flags, arguments=arguments, command=options.command_line(context))
        return
    with running(context, flags, resume=resume, arguments={"model": models[0], **arguments}) as run:
        run.finish(measure_source(models[0], plan, directory=run.directory).record)


def _measure_several(
    models: list[str], plan: "MeasurePlan", flags: options.RunFlags, *, arguments: dict[str, Any], command: str
) -> None:
    """Measure several models, each into its own directory; one that fails does not stop the others."""
    from posbias.errors import RunError
    from posbias.measurement.measurement import measure_models
    from posbias.report import write_report
    from posbias.runs.records import REPORT_FILE

    documents, failed = {}, {}
    runs = measure_models(models, plan, out=flags.out, arguments=arguments, command=command, page=write_report)
    for name, record in runs:
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
