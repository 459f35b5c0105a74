"""`posbias evaluate` and `mitigate`: how well a model answers, by the answer's position, and what helps against it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from posbias.checks import checked
from posbias.cli import options
from posbias.cli.output import NOT_MET, fail, print_json, running, say
from posbias.errors import UsageError
from posbias.evaluation.options import OF_EVALUATE_ALONE, SPREAD_POSITIONS, EvaluateOptions, LocalOptions
from posbias.files import write_file
from posbias.measurement.options import Loading
from posbias.mitigation.options import MitigateOptions
from posbias.registry import split_settings

if TYPE_CHECKING:
    from posbias.evaluation.levels import Requirement, RequirementCheck
    from posbias.evaluation.responders import Responder
    from posbias.results.records import Record
    from posbias.tasks.language import LanguageTask

OWN_OPTIONS = {"cache", "template_options"}
"""Options of a server that other flags set."""
PLANTED = (0.95, 0.5, 0.4, 0.5, 0.95)
"""Chances of a right answer by place, that `demo` is to find."""
PLANNED_FOR = {
    "worst": "This is if all positions have that accuracy; fewer do if one alone is so low, or samples differ.",
    "mean": "This is if samples are right at all positions or at none; fewer do otherwise.",
    "spread": "This is if accuracies are near 0.5; fewer do if they are higher or lower, or samples differ.",
}
"""What a plan assumes of accuracies; samples differ if some are harder at all positions."""


@checked
@dataclass(frozen=True)
class AnswererFlags(Loading, LocalOptions):
    """The model that answers: loaded here, or on a server."""

    server: list[str] | None = None
    """Base URL of an OpenAI-compatible server, whose key the variable OPENAI_API_KEY holds (another: key_variable='...'
    in --server-options); evaluate takes several."""
    served_model: list[str] | None = None
    """The model's name on the server; one for all, or one for each."""
    server_options: str = ""
    """Such as: kind='text', concurrency=8, timeout=300."""
    tokenizer: str | None = None
    """Tokenizer of the model on the server, to count tokens: a directory, hub id or 'demo'."""

    @property
    def endpoints(self) -> list[tuple[str, str]]:
        """Every address with the name of its model."""
        servers, models = self.server or [], self.served_model or []
        if not servers:
            return []
        if not models:
            raise UsageError("--server needs --served-model, the name the server knows the model by")
        both = max(len(servers), len(models))
        if not {len(servers), len(models)} <= {1, both}:
            raise UsageError(
                f"--server and --served-model are given {len(servers)} and {len(models)} times; allowed: one of both, "
                "one of either for all of the other, or as many of each"
            )
        return list(zip(*(given * (both // len(given)) for given in (servers, models)), strict=True))

    def task(self, spelled: str, models: Sequence[str], flags: options.RunFlags) -> "LanguageTask":
        """The task that is put to models or servers; flags that would do nothing are refused."""
        from posbias.tasks.language import LANGUAGE_TASKS

        if bool(models) == bool(self.server):
            raise UsageError("give one of MODEL and --server URL, not both")
        if self.endpoints:  # one of each, or as many
            flags.refuse(["batch", "dtype", "device"], "goes with a MODEL; a server runs its own")
        else:
            flags.refuse(["served_model", "server_options", "tokenizer"], "goes with --server; a MODEL runs here")
        task = LANGUAGE_TASKS.parse(spelled)
        # A chat server renders every request as a conversation.
        options.check_rendered(self.template_options, rendered=task.by_template or bool(self.server))
        return task

    def answering(self, model: str) -> "Responder":
        """A loaded model that answers."""
        from posbias.evaluation.responders import LocalResponder

        return LocalResponder(self.load(model), LocalOptions(self.batch))

    def subjects(self, models: Sequence[str], directory: Path | None) -> list[Any]:
        """What is asked: models that are loaded when their turn comes, or those of all servers.

        Answers of servers are kept in the run directory, so that a resumed run pays none twice.
        """
        from posbias.evaluation.responders import ServerOptions, ServerResponder
        from posbias.evaluation.run import Unopened
        from posbias.models.loading import load_tokenizer

        if models:
            return [Unopened(name, partial(self.answering, name)) for name in models]
        named = split_settings(self.server_options, "concurrency=1")
        names = {field.name for field in fields(ServerOptions)} - OWN_OPTIONS
        if unknown := sorted(set(named) - names):
            allowed = ", ".join(f"{name}=..." for name in sorted(names))
            raise UsageError(f"--server-options: unknown {unknown[0]!r}; allowed: {allowed}")
        cache = None if directory is None else directory / "answers"
        try:
            settings = ServerOptions(**named, cache=cache, template_options=self.template_options)
        except UsageError as error:
            raise UsageError(f"--server-options: {str(error).removeprefix('server: ')}") from None
        counting = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        return [ServerResponder(address, model, settings, tokenizer=counting) for address, model in self.endpoints]


def evaluate(
    models: list[str] | None = None,
    *,
    task: str = "key_value(pairs=10)",
    summary: Path | None = None,
    settings: EvaluateOptions,
    answerer: Annotated[AnswererFlags, options.Take("init_seed")],
    flags: options.RunFlags,
) -> None:
    """Measure how well a model answers, by the answer's position. The item that holds the answer is moved.

    Args:
        models: Hub id, directory, file.gguf or 'demo'; of several, the others are compared with the first; none with
            --server.
        task: Task, with its options in parentheses (`posbias list tasks`).
        summary: File for a pipeline: FILE.md, or FILE.xml (JUnit) with a test case for --require.

    Examples: `posbias evaluate demo --task 'key_value(pairs=10)' --out runs/pairs` · a server: `posbias evaluate
    --server http://localhost:8000/v1 --served-model NAME --task 'documents(documents=10)' --out runs/server` · after an
    interruption the same command with `--resume` · tasks: `posbias list tasks`
    """
    from posbias import evaluate as evaluate_subjects
    from posbias.evaluation.comparison import EvaluationComparison

    check_summary(summary, settings.require)
    asked = answerer.task(task, models or [], flags)
    with running(flags) as run:
        first, *others = answerer.subjects(models or [], flags.out)
        settings = replace(settings, directory=flags.out)
        result = evaluate_subjects([first, *others] if others else first, asked, options=settings)
        compared = isinstance(result, EvaluationComparison)
        of_parts = getattr(result, "evaluations", {})  # one of each subject, turn, order or length
        parts = {name if compared else f"length-{name}": part for name, part in of_parts.items()}
        for name, evaluation in parts.items():
            run.draw(evaluation.record, below=name)
        run.finish(result.record)
    checks = {name: each.requirement for name, each in (parts if compared else {"": result}).items()}
    conclude(result.record, checks, summary, quiet=flags.json)


def mitigate(
    model: str | None = None,
    *,
    settings: MitigateOptions,
    task: str = "key_value(pairs=10)",
    summary: Path | None = None,
    evaluation: Annotated[EvaluateOptions, options.Take(*OF_EVALUATE_ALONE)],
    answerer: Annotated[AnswererFlags, options.Take("init_seed")],
    flags: options.RunFlags,
) -> None:
    """Try methods against position bias, and say which to apply. Each gets a verdict; no weight is changed.

    Args:
        model: Hub id, directory, file.gguf or 'demo'; not with --server.
        task: Task, with its options in parentheses (`posbias list tasks`).
        summary: File for a pipeline: FILE.md, or FILE.xml (JUnit) with a test case for --require.

    Examples: `posbias mitigate demo --task 'key_value(pairs=8)' --methods key_bias,temperature --out runs/better` · in
    a pipeline, exit code 3 if it is not met: `--require 'worst>=0.6'` · a server takes methods around the model:
    `--server URL --served-model NAME` · after an interruption the same command with `--resume`
    """
    from posbias.mitigation.run import mitigate as try_methods

    check_summary(summary, settings.require)
    models = [] if model is None else [model]
    asked = answerer.task(task, models, flags)
    if len(answerer.endpoints) > 1:
        raise UsageError(f"one server is asked here, got {len(answerer.endpoints)}; evaluate takes several")
    with running(flags) as run:
        (subject,) = answerer.subjects(models, flags.out)
        trial = try_methods(subject, asked, options=settings, directory=flags.out)
        run.finish(trial.record)
    conclude(trial.record, {"": trial.requirement}, summary, quiet=flags.json)


def demo(*, flags: Annotated[options.RunFlags, options.Take("json")]) -> None:
    """Evaluate a stand-in with a planted bias, as a first look that takes seconds. No model is loaded.

    Example: `posbias demo` · with a page: `posbias demo --out runs/planted`
    """
    from posbias import evaluate as evaluate_subject
    from posbias.evaluation.responders import PlantedResponder

    right = f"{PLANTED[0]:.0%} of the time at the ends, {min(PLANTED):.0%} in the middle"
    say(f"No model is asked but a stand-in with a planted bias, which is right {right}.")
    with running(flags) as run:
        settings = EvaluateOptions(count=40, directory=flags.out, overwrite=flags.overwrite)
        found = evaluate_subject(PlantedResponder(PLANTED), "key_value(pairs=9)", options=settings)
        run.finish(found.record)
    shape = found.curves["accuracy"].shape
    was = "was found" if shape is not None and shape.label == "u" else "was not found"
    command = "posbias evaluate demo --task 'documents(documents=4)' --positions 0,1,3 --count 40 --out runs/demo"
    say(f"The planted bias {was}. Next, of a real model (98 MB, minutes): `{command}`")


def plan(require: str, *, positions: Annotated[int, Ge(2)] = SPREAD_POSITIONS, flags: options.Printed) -> None:
    """Plan how many samples (--count) a bound of --require takes.

    Args:
        require: worst>=0.8, mean>=0.7 or spread<=0.2.
        positions: Positions at which every sample is asked; at several lengths, all of them together.

    Example: `posbias plan 'worst>=0.8'`
    """
    from rich.console import Console

    from posbias.evaluation.levels import POWER, Requirement, planned
    from posbias.results.tables import Table, print_tables

    bound = Requirement.parse(require)
    found = planned(bound, positions)
    if flags.json:
        samples = {f"{true:.4g}": count for true, count in found.items()}
        print_json({"require": str(bound), "positions": positions, "power": POWER, "samples": samples})
        return
    header = [f"true {bound.what}", "difference", "samples", "prompts"]
    cells = [
        [f"{true:.4g}", f"{true - bound.number:+.4g}", f"{count:,}", f"{count * positions:,}"]
        for true, count in found.items()
    ]
    title = f"Samples from which on {POWER:.0%} of runs meet {bound}, at {positions} positions"
    print_tables([Table(title, header, cells)], Console())
    say(PLANNED_FOR[bound.what])


def check_summary(summary: Path | None, require: "Requirement | None") -> None:
    """Refuse a summary in another form, and one of test cases where no bound is asked for."""
    if summary is not None and summary.suffix not in (".md", *([".xml"] if require else [])):
        raise UsageError(f"--summary {str(summary)!r}: allowed: FILE.md and, of a bound (--require), FILE.xml (JUnit)")


def conclude(
    record: "Record", checks: "Mapping[str, RequirementCheck | None]", summary: Path | None, *, quiet: bool
) -> None:
    """Write the summary of a run, and say that the bounds on its parts are met, or end with that exit code."""
    from posbias.evaluation.page import requirement_text
    from posbias.results.page import junit_of, markdown_of
    from posbias.results.result import report_of

    told = {
        f"{check.text} {name}".strip(): (requirement_text(check), check.met) for name, check in checks.items() if check
    }
    if summary is not None:
        form = junit_of if summary.suffix == ".xml" else markdown_of
        write_file(summary, form(report_of(record), told).encode())
    for sentence, met in told.values():
        if not met:
            fail(sentence, NOT_MET)
        if not quiet:
            say(sentence)
