"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

A plan is resolved once; then the phases follow each other: try, fit, answer, ordinary text, judge. Every arm (the model
as it is, then one per method) is an evaluation with a record of its own below the run's directory; text and short forms
of the task are put to the same method. A killed run goes on from the samples, texts and fits that are there.
"""

from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.subjects import opened
from posbias.mitigation.trial.options import MitigateOptions
from posbias.mitigation.trial.outcome import judge_trial
from posbias.mitigation.trial.phases import answer, fit_arms, measure_text, try_arms
from posbias.mitigation.trial.plan import ARMS, plan_trial
from posbias.mitigation.trial.result import MitigationTrial
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
    with run_directory(
        directory, verb="mitigate", arguments=arguments, resume=evaluation.resume, overwrite=evaluation.overwrite
    ) as run:
        trial = _trial(model, task, options=options, directory=run.directory)
        run.finish(trial.record)
    return trial


def _trial(
    model: Any, task: str | LanguageTask, *, options: MitigateOptions, directory: Path | None
) -> MitigationTrial:
    """The trial, as it is made now or lies finished in the directory."""
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    options = options.following(task)  # wrong files are refused before a model is loaded
    plan = plan_trial(opened(model), task, options)
    finished = finished_run(directory, lambda: plan.settings, resume=options.evaluation.resume)
    if finished is not None:
        return MitigationTrial.from_record(finished)
    plan.open(directory)
    try_arms(plan)
    fit_arms(plan)
    record = judge_trial(plan, *answer(plan), *measure_text(plan))
    for arm in plan.arms:
        if directory is not None and arm.fitted is not None and arm.method is not None and arm.model is not None:
            write_recipe(directory / ARMS / arm.slug / RECIPE, arm.method, arm.model, arm.fitted)
    return MitigationTrial.from_record(record)
