"""`posbias evaluate`: how well a model answers, by where the answer stands in its context."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.evaluation.responders import Responder
    from posbias.tasks.language import LanguageTask

EXAMPLE = (
    "Examples: `posbias evaluate demo --task 'key_value(pairs=10)' --out runs/pairs` · a server: `posbias evaluate "
    "--server http://localhost:8000/v1 --served-model NAME --task 'documents(documents=10)' --out runs/server` · after "
    "an interruption the same command with `--resume` · tasks: `posbias list tasks`"
)
SPREAD = "spread"
ANSWERS = "answers"
"""Where a server's answers are kept, below the run directory."""


def evaluate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, directory, file.gguf or 'demo'; not with --server.", show_default=False),
    ] = None,
    task: Annotated[str, typer.Option("--task", help="What is asked, as a literal call.")] = "key_value(pairs=10)",
    positions: Annotated[
        str, typer.Option("--positions", help="all, spread (at most 9), spread(5), or places such as 0,4,9.")
    ] = SPREAD,
    count: Annotated[int, typer.Option("--count", help="Contents, each asked at every position.", min=1)] = 50,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Generated at most.", min=1, show_default="the task's own")
    ] = None,
    generate: Annotated[bool, typer.Option(help="Generate answers and judge them by the published rule.")] = True,
    score: Annotated[bool, typer.Option(help="Score the right answer by teacher forcing.")] = True,
    server: Annotated[
        str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server.", show_default=False)
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="The model's name on the server.", show_default=False)
    ] = None,
    server_options: Annotated[
        str, typer.Option("--server-options", help="Such as: kind='text', concurrency=8, requests_per_minute=60.")
    ] = "",
    lm_eval: Annotated[
        Path | None,
        typer.Option("--lm-eval", help="Write the examples there as an lm-eval task and stop.", show_default=False),
    ] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue without redoing finished contents.")] = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Ask a model for one item of a context whose place is varied: accuracy and log-probability by position."""
    from posbias.cli.output import finish
    from posbias.evaluation.evaluation import EvaluateOptions
    from posbias.evaluation.evaluation import evaluate as run_evaluation
    from posbias.evaluation.record import evaluation_record, write_outputs
    from posbias.parts import clear_parts
    from posbias.records import run_directory
    from posbias.report.behaviour import show_behaviour, write_behaviour_report
    from posbias.tasks.language import LANGUAGE_TASKS

    asked = LANGUAGE_TASKS.parse(task)
    places = places_of(positions, asked)
    if lm_eval is not None:
        _export(context, asked, places, directory=lm_eval)
        return
    if (model is None) == (server is None):
        raise UsageError("give either a MODEL or --server URL, not both and not none")
    arguments = passed_arguments(context)
    with run_directory(out, verb="evaluate", arguments=arguments) as directory:
        if server is None:
            responder = _local(str(model), dtype, device)
        else:
            responder = _server(server, served_model, server_options, directory)
        settings = EvaluateOptions(
            count=count,
            positions=places,
            seed=seed,
            generate=generate,
            score=score,
            max_tokens=max_tokens,
            directory=directory,
            resume=resume,
        )
        try:
            found = run_evaluation(asked, responder, options=settings)
        finally:
            responder.close()
        record = evaluation_record(found, arguments, command=command_line(context))
        if directory is not None:
            write_outputs(found, directory)
        finish(record, out=directory, as_json=json, write=write_behaviour_report, show=show_behaviour)
        if directory is not None:
            clear_parts(directory)


def places_of(spelled: str, task: "LanguageTask") -> tuple[int, ...]:
    """The positions that `--positions` names.

    Raises:
        UsageError: not a list of whole numbers, or places that the task does not have.
    """
    from posbias.evaluation.evaluation import SPREAD_POSITIONS, spread_positions
    from posbias.registry import parse_literal_call

    text = spelled.strip()
    if text == "all":
        return task.positions()
    if text.startswith(SPREAD):
        name, values, keywords = parse_literal_call(text, "positions")
        if name == SPREAD and not keywords and len(values) <= 1:
            return spread_positions(task, *(values or [SPREAD_POSITIONS]))
    try:
        return task.positions([int(part) for part in text.split(",")])
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--positions {spelled!r}: allowed: all, spread, spread(5), or places such as 0,4,9") from None


def _export(context: typer.Context, task: "LanguageTask", places: tuple[int, ...], *, directory: Path) -> None:
    """Write the examples for lm-eval; a model is loaded only for its tokenizer, which some tasks need."""
    from posbias.evaluation.export import export_lm_eval
    from posbias.models import load_model

    given = context.params
    tokenizer = None if given["model"] is None else load_model(given["model"]).tokenizer
    examples = list(task.examples(tokenizer, count=given["count"], positions=places, seed=given["seed"]))
    found = export_lm_eval(task, examples, directory, max_tokens=given["max_tokens"])
    typer.echo(f"{found.examples} examples; run: cd {directory} && lm_eval --include_path . --tasks {found.names[0]}")


def _local(model: str, dtype: str, device: str) -> "Responder":
    from posbias.evaluation.responders import LocalResponder
    from posbias.models import load_model

    return LocalResponder(load_model(model, dtype=dtype, device=device))


def _server(address: str, model: str | None, spelled: str, directory: Path | None) -> "Responder":
    """A server's model; its answers are kept in the run directory, so that none is paid for twice.

    Raises:
        UsageError: no model named, or options that cannot be read.
    """
    from posbias.evaluation.responders import ServerOptions, ServerResponder
    from posbias.registry import parse_literal_call

    if model is None:
        raise UsageError("--server needs --served-model, the name the server knows the model by")
    _, positional, given = parse_literal_call(f"server({spelled})", "server options")
    known = {field.name for field in fields(ServerOptions)} - {"cache"}
    unknown = sorted(set(given) - known)
    if positional or unknown:
        raise UsageError(f"--server-options {spelled!r}: allowed: {', '.join(f'{name}=...' for name in sorted(known))}")
    cache = None if directory is None else directory / ANSWERS
    return ServerResponder(address, model, ServerOptions(**given, cache=cache))
