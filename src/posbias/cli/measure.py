"""`posbias measure`, `attention` and `decompose`: what is measured on models."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_json, print_record, record_document, running, say
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import RunError, UsageError
from posbias.measurement.options import AttentionOptions, Loading, MeasureOptions

if TYPE_CHECKING:
    from posbias.results.records import Record


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
        kinds: Kinds of influence (`posbias list kinds`), comma-separated.

    Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: `--init-seed 0` ·
    more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "target(text=' Paris')"`
    · layer by layer: `--depth-profiles all` · several models: `posbias measure A B C --out DIR`
    """
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import measure as measured

    options.check_resume(settings.resume, flags.out)
    asked, resolved = replace(settings, engine=engine.of(settings.engine)), resolve_kinds(kinds)
    passed = {name: value for name, value in options.passed_arguments(context).items() if name != "models"}

    def record_of(source: str, directory: Path | None) -> "Record":
        model, drawn = prompts.opened(source, loading)
        run_options = replace(asked, directory=directory)
        return measured(model, drawn, kinds=resolved, seed=prompts.seed, options=run_options).record

    if len(models) > 1:
        _each(context, models, record_of, flags, passed, resume=settings.resume)
        return
    with running(context, flags, resume=settings.resume, arguments={"model": models[0], **passed}) as run:
        run.finish(record_of(models[0], run.directory))


def _each(
    context: typer.Context,
    sources: list[str],
    record_of: Callable[[str, Path | None], "Record"],
    flags: options.RunFlags,
    passed: dict[str, Any],
    *,
    resume: bool,
) -> None:
    """Measure several models, each into a directory of its own; one that fails does not stop the others."""
    from posbias.results.records import REPORT_FILE
    from posbias.results.result import write_report
    from posbias.runs.running import check_unfinished, directory_names, failed_record, held

    documents: dict[str, Any] = {}
    done: list[Record] = []
    failed: dict[str, str] = {}
    names, out = directory_names(sources), flags.out
    with nullcontext() if out is None else held(out):
        if out is not None and not (resume or flags.overwrite):
            for name in names:
                check_unfinished(out / name, shell=True)  # of all, before hours go into the first
        for name, source in names.items():
            own, arguments = replace(flags, out=out and out / name), {"model": source, **passed}
            try:
                with running(context, own, resume=resume, arguments=arguments) as run:
                    try:
                        record = record_of(source, run.directory)
                    except UsageError as error:
                        if not documents:
                            raise  # the first one's request may be wrong for all
                        raise RunError(str(error)) from None
                    run.open.finish(record)
                    run.draw(record)
            except (RunError, UsageError) as error:
                if isinstance(error, UsageError) and not documents:
                    raise
                record = failed_record("measure", arguments, error)
                failed[name] = str(record.error)
            else:
                done.append(record)
                if not flags.json:
                    print_record(record)
            documents[name] = record_document(record) if flags.json else {}
        if out is not None and done:
            write_report(done, out)
    if flags.json:
        print_json({"models": documents})
    elif out is not None and done:
        say(f"report: {out / REPORT_FILE}")
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
        loaded, drawn = prompts.opened(model, loading)
        asked = replace(settings, interventions=replaced, kinds=kinds, directory=run.directory)
        run.finish(decompose_model(loaded, drawn, options=asked).record)
