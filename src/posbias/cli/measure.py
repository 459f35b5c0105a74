"""`posbias measure`, `attention` and `decompose`: what is measured on models."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, running, say
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import RunError
from posbias.measurement.options import AttentionOptions, Loading, MeasureOptions

if TYPE_CHECKING:
    from posbias.measurement.measurement import MeasurePlan


def measure(
    context: typer.Context,
    models: list[str],
    *,
    prompts: options.PromptFlags,
    kinds: str = "jacobian,probability",
    settings: MeasureOptions,
    loading: Annotated[Loading, options.Take("template_options")],
    engine: options.EngineFlags,
    flags: options.RunFlags,
) -> None:
    """Measure the influence of every position on the last one.

    Also measures how strongly each layer mixes. Several models are measured one after another, each into a directory
    of its own under --out.

    Args:
        models: Hub ids, directories, file.gguf, 'demo' or 'config:PATH_OR_ID'.
        kinds: Comma-separated: jacobian, probability, logprob, logit, integrated_gradients, perturbation.

    Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: `--init-seed 0` ·
    more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "target(text=' Paris')"`
    · layer by layer: `--depth-profiles all` · several models: `posbias measure A B C --out DIR`
    """
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import measure_source

    options.check_resume(settings.resume, flags.out)
    asked = replace(settings, engine=engine.of(settings.engine))
    plan = replace(prompts.plan(loading), kinds=resolve_kinds(kinds), options=asked)
    arguments = {name: value for name, value in options.passed_arguments(context).items() if name != "models"}
    if len(models) > 1:
        _measure_several(models, plan, flags, arguments=arguments, command=options.command_line(context))
        return
    with running(context, flags, resume=settings.resume, arguments={"model": models[0], **arguments}) as run:
        run.finish(measure_source(models[0], plan, directory=run.directory).record)


def _measure_several(
    models: list[str], plan: "MeasurePlan", flags: options.RunFlags, *, arguments: dict[str, Any], command: str
) -> None:
    """Measure several models, each into its own directory; one that fails does not stop the others."""
    from posbias.measurement.measurement import measure_models
    from posbias.results.records import REPORT_FILE
    from posbias.results.result import write_report

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
        plan = prompts.plan(loading)
        loaded = plan.load(model)
        run.finish(measured(loaded, plan.prompts(loaded), options=replace(settings, directory=run.directory)).record)


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

    Mask, residual stream, encoding, content and sinks are replaced one at a time, in the model and in theory.

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
        plan = prompts.plan(loading)
        loaded = plan.load(model)
        asked = replace(settings, interventions=replaced, kinds=kinds, directory=run.directory)
        run.finish(decompose_model(loaded, plan.prompts(loaded), options=asked).record)
