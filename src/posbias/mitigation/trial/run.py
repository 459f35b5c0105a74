"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

A plan is resolved once; then the phases follow each other: try, fit, answer, ordinary text, judge, record. Every
arm (the model as it is, then one per method) is an evaluation with a record of its own below the run's directory; text
and short forms of the task are put to the same method. A killed run goes on from the samples, texts and fits that are
there.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.responders import LocalResponder, as_responder
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.trial.answers import answer
from posbias.mitigation.trial.fits import fit_arms
from posbias.mitigation.trial.options import MitigateOptions
from posbias.mitigation.trial.ordinary_text import judged_windows, measure_text
from posbias.mitigation.trial.outcome import judge_trial, record_trial
from posbias.mitigation.trial.plan import ARMS, TrialPlan, plan_trial
from posbias.mitigation.trial.result import MitigationTrial
from posbias.progress import report
from posbias.runs.engines import pinned
from posbias.runs.parts import finished_run
from posbias.runs.running import run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

RECIPE = "recipe.json"
"""Name of a fitted method's file, in its arm's directory."""


@checked
def mitigate(
    model: Any,
    task: str | LanguageTask,
    *,
    options: MitigateOptions | None = None,
    directory: Path | None = None,
) -> MitigationTrial:
    """Try methods against position bias on one model and task, and judge each.

    Args:
        model: A hub id, a directory, "demo", a loaded model, or a responder such as `ServerResponder`, which takes
            methods around the model only.
        task: An object or its literal spelling.
        options: Methods, samples, and what they are judged by.
        directory: Directory of the run and its record; with `options.evaluation.resume` finished work in it is reused.

    Returns:
        The trial, as made now or found finished in the directory.

    Raises:
        UsageError: an unknown method or one that does not fit the model, too few samples, calibration samples that
            occur in the test again, or prompts that do not fit into memory.
        RunError: the model fails, or its server cannot be reached; finished work is kept.
    """
    options = options or MitigateOptions()
    evaluation, arguments = options.evaluation, {"model": str(model), "task": str(task)}
    with (
        run_directory(
            directory, verb="mitigate", arguments=arguments, resume=evaluation.resume, overwrite=evaluation.overwrite
        ) as run,
        pinned(options.engine.pinned_threads),
    ):
        trial = _trial(model, task, options=options, directory=run.directory)
        run.finish(trial.record)
    return trial


def _trial(
    model: Any, task: str | LanguageTask, *, options: MitigateOptions, directory: Path | None
) -> MitigationTrial:
    """The trial, as it is made now or lies finished in the directory."""
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    responder = as_responder(model)
    plan = plan_trial(responder, task, options)
    finished = finished_run(directory, lambda: plan.settings, resume=options.evaluation.resume)
    if finished is not None:
        return MitigationTrial.from_record(finished)
    plan = _tried(plan.opened(directory))
    plan = fit_arms(replace(plan, text=judged_windows(plan)))
    plan, answers = answer(plan)
    text = measure_text(plan)
    outcome = judge_trial(plan, answers, text)
    trial = MitigationTrial.from_record(record_trial(plan, answers, text, outcome))
    _write_recipes(plan)
    return trial


def _tried(plan: TrialPlan) -> TrialPlan:
    """The plan without methods that do not answer one request, as far as they need no fit.

    Such a method is refused if it was named, and left out otherwise. A server is asked for nothing that is not kept.
    """
    requests = len(plan.test.requests) * len(plan.arms)
    report(f"{requests} requests without and with {len(plan.arms) - 1} methods, before those that methods add")
    request, options = replace(plan.test.requests[0], max_tokens=1), plan.test.options
    arms, left_out = [], []
    for arm in plan.arms:
        try:
            if arm.method is not None and isinstance(arm.plain, LocalResponder):
                arm.answering.respond([request], generate=options.generate, score=options.score)
            arms.append(arm)
        except UsageError as error:
            if not plan.options.unnamed:
                raise
            left_out.append(f"{arm.name} was not tried: {error}")
    return plan.with_arms(arms, left_out)


def _write_recipes(plan: TrialPlan) -> None:
    """Write every method that was fitted inside the model down, in its arm's directory."""
    for arm in plan.arms:
        if plan.directory is not None and arm.fitted is not None and arm.method is not None and arm.model is not None:
            write_recipe(plan.directory / ARMS / arm.slug / RECIPE, arm.method, arm.model, arm.fitted)
