"""`evaluate`: one model by position, or several on the same samples, compared with the first.

Several are other models and servers, and the first one under methods against position bias. They are opened one after
another, so that of local models one is in memory at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.comparison import EvaluationComparison, compare_evaluations
from posbias.evaluation.evaluation import Evaluation, LengthEvaluation
from posbias.evaluation.levels import Requirement
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders import LocalResponder, Responder, ServerResponder
from posbias.evaluation.responders.local import as_responder
from posbias.evaluation.run import evaluate_lengths, evaluate_responder, finish_evaluation
from posbias.results.records import REPORT_FILE, plain
from posbias.runs.running import OpenRun, run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

Evaluated = TypeVar("Evaluated", Evaluation, LengthEvaluation)


@dataclass(frozen=True)
class Unopened:
    """A model that is loaded when its turn comes."""

    name: str
    open: Callable[[], Responder]


@checked
def evaluate(subject: Any, task: str | LanguageTask, *, options: EvaluateOptions | None = None) -> Any:
    """Put every sample of a task, at every position, to one model, and judge its answers.

    Args:
        subject: The model: a hub id, a directory, "demo", a loaded model, or a responder such as
            `ServerResponder`. With its own tokenizer, lengths and places in tokens are exact. A list of subjects is
            evaluated on the same samples, the first also under each of `options.methods`, and compared.
        task: An object or its literal spelling, such as `"key_value(pairs=20)"`.
        options: Count, positions, seed, and the directory in which an interrupted run continues.

    Returns:
        The `Evaluation`; at several lengths a `LengthEvaluation`, which has one of each; of a list the
        `EvaluationComparison` with the first one, which has them in `evaluations`.

    Raises:
        UsageError: an unknown model or task, a wrong line of a file (its number is named), an impossible position, a
            conversation for a model without a chat template, or prompts that do not fit into memory.
        RunError: the model fails, its server cannot be reached or refuses more than a tenth of all examples, at least 3
            (finished samples are kept in the directory), or nothing is generated and the server gives no scores. Fewer
            refused examples are left out of the curves and counted.
    """
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    options = (options or EvaluateOptions()).following(task)  # wrong files are refused before a model is loaded
    several = isinstance(subject, list | tuple)
    if not several and options.methods:
        raise UsageError("evaluate: methods make several subjects of one; give a list, even of one: [model]")
    arguments: dict[str, Any] = {
        "model": [_name(*entry) for entry in enumerate(subject)] if several else _name(0, subject)
    }
    arguments |= {"task": str(task), "count": options.count, "seed": options.seed}
    with run_directory(
        options.directory, verb="evaluate", arguments=arguments, resume=options.resume, overwrite=options.overwrite
    ) as run:
        if several:
            return _compared(subject, task, options, run)
        responder = opened(subject)
        if not options.lengths:
            return _concluded(evaluate_responder(responder, task, options), options.require, run)
        evaluation = evaluate_lengths(responder, task, options)
        for length, at_length in evaluation.at.items():
            _concluded(at_length, None, run, below=f"length-{length}")
        return _concluded(evaluation, options.require, run)


def _concluded(evaluation: Evaluated, require: Requirement | None, run: OpenRun, *, below: str = "") -> Evaluated:
    """Write an evaluation with its verdict and the check of what is required, which of a found one may be new."""
    check = None if require is None else evaluation.check(require)
    concluded = {"verdict": list(evaluation.verdict), "requirement": None if check is None else plain(asdict(check))}
    scalars = evaluation.record.scalars
    known = concluded.items() <= scalars.items()
    scalars |= concluded
    finish_evaluation(evaluation, run, below=below)
    if evaluation.found and run.directory is not None and not known:
        evaluation.record.write_run(run.directory / below)
    return replace(evaluation, requirement=check)


def _compared(
    subjects: Sequence[Any], task: LanguageTask, options: EvaluateOptions, run: OpenRun
) -> EvaluationComparison:
    """Evaluations of all subjects, each written as soon as it is done, compared with the first."""
    arms = _arms(subjects, options.methods)
    if options.lengths:
        raise UsageError(f"evaluate: lengths take one subject, got {', '.join(arms)}")
    evaluations: dict[str, Evaluation] = {}
    current: tuple[Any, Responder] | None = None
    for name, (subject, method) in arms.items():
        if current is None or current[0] is not subject:
            current = None  # before the next is loaded
            current = subject, opened(subject)
        responder = current[1]
        if method is not None:
            from posbias.mitigation.methods.applying import answering_under, resolve_method

            model: Any = responder.model if isinstance(responder, LocalResponder) else None
            responder = answering_under(resolve_method(method, model), responder)
        directory = None if options.directory is None else options.directory / name
        evaluation = evaluate_responder(responder, task, replace(options, directory=directory, methods=()))
        evaluations[name] = _concluded(evaluation, options.require, run, below=name)
    comparison = replace(compare_evaluations(list(evaluations.values())), evaluations=evaluations)
    checks = [check for evaluation in evaluations.values() if (check := evaluation.requirement) is not None]
    failing = sorted(checks, key=lambda check: check.met)[:1]  # the first that fails stands for all
    comparison.record.scalars["requirement"] = plain(asdict(failing[0])) if failing else None
    comparison.record.scalars["verdict"] = list(comparison.verdict)
    if run.directory is not None:
        comparison.record.resolved["related"] = {name: f"{name}/{REPORT_FILE}" for name in evaluations}
    run.finish(comparison.record)
    return comparison


def opened(subject: Any) -> Responder:
    """The responder of a subject, which is loaded now if its turn was waited for."""
    return subject.open() if isinstance(subject, Unopened) else as_responder(subject)


def _arms(subjects: Sequence[Any], methods: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """Subjects and methods by the names of their directories: the first, it under methods, then the others."""
    arms: list[tuple[str, Any, Any]] = [(_name(*entry), entry[1], None) for entry in enumerate(subjects)]
    if methods and arms:
        from posbias.mitigation.methods.base import MITIGATIONS
        from posbias.mitigation.methods.recipe import check_files, is_recipe

        check_files(methods)
        for method in methods:
            if isinstance(method, str) and not is_recipe(method):
                MITIGATIONS.parse(method)  # a wrong one is refused before any work
        words = [  # a recipe is named by its file and the directory around it
            "-".join(Path(method).with_suffix("").parts[-2:]) if is_recipe(method) else str(method)
            for method in methods
        ]
        arms[1:1] = [(f"{arms[0][0]}-{word}", subjects[0], one) for word, one in zip(words, methods, strict=True)]
    if len(arms) < 2:
        raise UsageError("evaluate: a list is compared with its first; give at least 2 subjects, or methods")
    from posbias.measurement.measurement import directory_names

    names = directory_names([name for name, _, _ in arms])
    return {name: (subject, method) for name, (_, subject, method) in zip(names, arms, strict=True)}


def _name(number: int, subject: Any) -> str:
    """What a subject is called: as it is given, or by its server, or by its number."""
    if isinstance(subject, str | Path | Unopened):
        return subject.name if isinstance(subject, Unopened) else str(subject)
    if isinstance(subject, ServerResponder):
        described = subject.describe()
        return f"{described['address'].partition('//')[2]}/{described['model']}"
    return f"subject-{number + 1}"
