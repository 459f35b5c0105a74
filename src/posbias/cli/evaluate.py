"""`posbias evaluate`: how well a model answers, by where the answer stands in its context."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from posbias.cli import behaviour_options as behaviour
from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments, was_given
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.evaluation import EvaluateOptions
    from posbias.evaluation.responders import Responder
    from posbias.tasks.language import LanguageTask

EXAMPLE = (
    "Examples: `posbias evaluate demo --task 'key_value(pairs=10)' --out runs/pairs` · a server: `posbias evaluate "
    "--server http://localhost:8000/v1 --served-model NAME --task 'documents(documents=10)' --out runs/server` · after "
    "an interruption the same command with `--resume` · tasks: `posbias list tasks`"
)
ANSWERS = "answers"
"""Where a server's answers are kept, below the run directory."""
OWN_OPTIONS = {"cache", "reuse"}
"""Options of a server that other flags set."""
OF_A_MODEL = ("batch", "dtype", "device", "max_memory")
"""Flags that only a model in this process heeds."""
OF_A_RUN = ("generate", "score", "resume", "out", "json")
"""Flags of a run, whoever answers."""
OF_A_SERVER = ("served_model", "server_options")
"""Flags that only a server heeds."""


def evaluate(
    context: typer.Context,
    model: behaviour.EvaluatedModel = None,
    task: behaviour.Task = "key_value(pairs=10)",
    positions: behaviour.Positions = behaviour.SPREAD,
    count: behaviour.Samples = 50,
    max_tokens: behaviour.MaxTokens = None,
    generate: behaviour.Generate = True,
    score: behaviour.Score = True,
    batch: behaviour.Batch = 8,
    server: behaviour.Server = None,
    served_model: behaviour.ServedModel = None,
    server_options: behaviour.ServerSettings = "",
    tokenizer: behaviour.Tokenizer = None,
    lm_eval: behaviour.LmEval = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    max_memory: options.MaxMemory = None,
    seed: options.Seed = 0,
    resume: behaviour.Resume = False,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Request one item of a context, whose position is varied: accuracy and log-probability by position."""
    from posbias.evaluation import EvaluateOptions
    from posbias.tasks.language import LANGUAGE_TASKS

    _check_flags(context)
    options.check_resume(resume, out)
    wanted = LANGUAGE_TASKS.parse(task)
    settings = EvaluateOptions(
        count=count,
        positions=behaviour.positions_of(positions, wanted),
        seed=seed,
        generate=generate,
        score=score,
        max_tokens=max_tokens,
        resume=resume,
        max_memory=options.bytes_of(max_memory),
    )
    if lm_eval is not None:
        _export(wanted, settings, model=model or tokenizer, directory=lm_eval)
    else:
        _evaluate(context, wanted, settings)


def _check_flags(context: typer.Context) -> None:
    """Refuse flags that would do nothing.

    Raises:
        UsageError: one of them was given; the message says with what it goes.
    """
    given = context.params
    model, server, exported = (given[name] is not None for name in ("model", "server", "lm_eval"))
    if not exported and model == server:
        raise UsageError("give either a MODEL or --server URL, not both and not none")
    if model and given["tokenizer"] is not None:
        goes_with = "a --lm-eval without a MODEL" if exported else "--server"
        raise UsageError(f"--tokenizer {given['tokenizer']!r} goes with {goes_with}; a MODEL brings its own")
    if exported:
        _refuse(context, ("server", *OF_A_SERVER, *OF_A_MODEL, *OF_A_RUN), "a run; --lm-eval only writes the examples")
    elif server:
        _refuse(context, OF_A_MODEL, "a MODEL; a server runs its own")
    else:
        _refuse(context, OF_A_SERVER, "--server; a MODEL runs here")


def _refuse(context: typer.Context, names: Sequence[str], goes_with: str) -> None:
    """Refuse the first of some flags that was given."""
    for name in names:
        if was_given(context, name):
            flag, value = name.replace("_", "-"), context.params[name]
            spelled = f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {str(value)!r}"
            raise UsageError(f"{spelled} goes with {goes_with}")


def _evaluate(context: typer.Context, task: "LanguageTask", settings: "EvaluateOptions") -> None:
    """Evaluate, save, draw and print; a finished evaluation that is resumed is drawn and printed."""
    from dataclasses import replace

    from posbias.cli.output import finish
    from posbias.evaluation import evaluate as run_evaluation
    from posbias.evaluation import evaluation_record, finished_evaluation, write_outputs
    from posbias.records import remove_record, run_directory

    arguments, out = passed_arguments(context), context.params["out"]
    with run_directory(out, verb="evaluate", arguments=arguments, resume=settings.resume) as directory:
        settings = replace(settings, directory=directory)
        responder = _responder(context, directory)
        try:
            finished = finished_evaluation(task, responder, settings)
            record = finished
            if record is None:
                found = run_evaluation(task, responder, options=settings)
                record = evaluation_record(found, arguments, command=command_line(context))
                if directory is not None:
                    remove_record(directory)  # of an older run, which had other outputs
                    write_outputs(found, directory)
        finally:
            responder.close()
        finish(record, out=directory, as_json=context.params["json"], found=finished is not None)


def _export(task: "LanguageTask", settings: "EvaluateOptions", *, model: str | None, directory: Path) -> None:
    """Write the examples for lm-eval; some tasks need the model's tokenizer for it."""
    from posbias.directories import held
    from posbias.evaluation.export import export_lm_eval
    from posbias.models import load_tokenizer

    tokenizer = None if model is None else load_tokenizer(model)
    examples = list(task.examples(tokenizer, count=settings.count, positions=settings.positions, seed=settings.seed))
    with held(directory):
        found = export_lm_eval(task, examples, directory, max_tokens=settings.max_tokens)
    typer.echo(f"{found.examples} examples; run: cd {directory} && lm_eval --include_path . --tasks {found.names[0]}")


def _responder(context: typer.Context, directory: Path | None) -> "Responder":
    """Who answers: a model in this process, or one on a server."""
    from posbias.evaluation.responders import LocalOptions, LocalResponder
    from posbias.models import load_model

    given = context.params
    if given["server"] is not None:
        return _server(context, directory)
    allowed = options.bytes_of(given["max_memory"])
    loaded = load_model(given["model"], dtype=given["dtype"], device=given["device"], max_memory=allowed)
    return LocalResponder(loaded, LocalOptions(batch=given["batch"]))


def _server(context: typer.Context, directory: Path | None) -> "Responder":
    """A server's model; its answers are kept in the run directory, so that --resume pays for none twice.

    Raises:
        UsageError: no model named, or options that cannot be read.
    """
    from posbias.evaluation.responders import ServerOptions, ServerResponder
    from posbias.models import load_tokenizer
    from posbias.registry import parse_literal_call

    given = context.params
    if given["served_model"] is None:
        raise UsageError("--server needs --served-model, the name the server knows the model by")
    spelled = given["server_options"]
    _, positional, named = parse_literal_call(f"server({spelled})", "server options")
    known = {field.name for field in fields(ServerOptions)} - OWN_OPTIONS
    if positional or set(named) - known:
        raise UsageError(f"--server-options {spelled!r}: allowed: {', '.join(f'{name}=...' for name in sorted(known))}")
    cache = None if directory is None else directory / ANSWERS
    settings = ServerOptions(**named, cache=cache, reuse=given["resume"])
    tokenizer = None if given["tokenizer"] is None else load_tokenizer(given["tokenizer"])
    return ServerResponder(given["server"], given["served_model"], settings, tokenizer=tokenizer)
