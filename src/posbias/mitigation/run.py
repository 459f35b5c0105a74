"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

A plan is resolved once; then the phases follow each other: try, fit, answer, ordinary text, judge. Every arm is an
evaluation with a record of its own below the run's directory; fits and what ordinary text is under a method are pieces
beside it. A killed run goes on from the samples, texts and fits that are there.

Text has no passages and no question: what acts from the question on, what moves or reads passages, and what changes
requests cannot change it, and is not judged by it (`_untold`). `ms_poe` knows the passages only to rank heads at their
end; it is given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation import Evaluation, evaluate_responder, finish_evaluation
from posbias.evaluation.curve import HIGHEST, SAMPLES_FOR_CLAIM, contrast_of, position_means
from posbias.evaluation.evaluation import GENERATED, measures_of
from posbias.evaluation.levels import ALPHA, check_requirement
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.run import NothingAnsweredError
from posbias.evaluation.samples import as_bytes, read_json, requests_of
from posbias.interventions.base import check_model
from posbias.mitigation.fitting import Calibration, run_fit
from posbias.mitigation.judging import ArmScores, SideEffect, choose_measure, judge
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.plan import ARMS, Arm, MitigateOptions, Questions, TrialPlan, plan_trial, slug_of
from posbias.mitigation.result import ORDINARY_TEXT, ArmResult, Effort, MitigationTrial
from posbias.mitigation.subjects import opened
from posbias.progress import report, track
from posbias.runs.parts import PartStore, below, fingerprint, finished_run
from posbias.runs.records import Record
from posbias.runs.results import as_stored
from posbias.runs.running import run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

RECIPE = "recipe.json"
"""Name of a fitted method's file, in its arm's directory."""
OF_THE_WHOLE = ("methods", "recipes", "require", "by", "tolerance")
"""Settings that the fit and the side effects of one method do not depend on: a run, interrupted or finished, goes on
with more methods, or fewer, without fitting again."""
SERVER, UNASKED = "not judged: the model is behind a server", "not judged: no windows were asked for"
"""Why text is put to no arm."""
REQUESTS = "unchanged: only prompts change"
FROM_QUESTION = "unchanged: acts only after a question begins"
NO_PASSAGES = "not judged: needs passages, and text has none"
"""Why ordinary text says nothing about a method."""
TENSORS = "tensors/"
"""Stem of the names, in the piece of a fit, of what the method's spelling leaves out."""

Nats = Float64[np.ndarray, "documents"]
ShortForms = Mapping[str, tuple[Evaluation | None, ...]]
"""Evaluations by short form of the task and arm; None if a method does not apply to the form."""


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
        task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
        options = options.following(task)  # wrong files are refused before a model is loaded
        plan = plan_trial(opened(model), task, options)
        record = finished_run(run.directory, lambda: plan.settings, resume=evaluation.resume)
        if record is None:
            record = _tried(plan, run.directory)
        run.finish(record)
    return MitigationTrial.from_record(record)


def _tried(plan: TrialPlan, directory: Path | None) -> Record:
    """The phases of a trial, one after another."""
    of_one_method = {name: value for name, value in plan.settings.items() if name not in OF_THE_WHOLE}
    plan.directory = directory
    plan.store = PartStore(None if directory is None else directory / ARMS, of_one_method)
    try_arms(plan)
    fit_arms(plan)
    record = judge_trial(plan, *answer(plan), *measure_text(plan))
    for arm in plan.arms:
        if directory is not None and arm.fitted is not None and arm.method is not None and arm.model is not None:
            write_recipe(directory / ARMS / arm.slug / RECIPE, arm.method, arm.model, arm.fitted)
    return record


def try_arms(plan: TrialPlan) -> None:
    """Have every method that needs no fit answer one request. A server is asked for nothing that is not kept."""
    options = plan.test.options
    requests = requests_of(plan.test.samples, plan.test.task, options)
    request = replace(requests[0], max_tokens=1)
    n_requests, n_methods = len(requests) * len(plan.arms), len(plan.arms) - 1
    report(f"{n_requests} requests without and with {n_methods} methods, before those that methods add")

    def tried(arm: Arm) -> Arm:
        if arm.method is not None and isinstance(arm.plain, LocalResponder):
            arm.answering.respond([request], generate=options.generate, score=options.score)
        return arm

    plan.each(tried)


def fit_arms(plan: TrialPlan) -> None:
    """Fit every method without parameters to the calibration samples; an interrupted fit starts anew."""
    if plan.model is None:
        return
    calibration = Calibration(plan.model, plan.calibration.examples, plan.fitting_text)

    def piece_of(arm: Arm) -> dict[str, np.ndarray]:
        assert arm.fit is not None
        fitted = run_fit(arm.fit, calibration, options=plan.options.fitting)
        updates = fitted.method.updates if isinstance(fitted.method, Adapter) else {}
        tensors = {f"{TENSORS}{name}": numbers for name, numbers in updates.items()}
        return {"fit": as_bytes({"method": str(fitted.method), "how": fitted.how}), **tensors}

    def fitted(arm: Arm) -> Arm:
        if arm.fit is None:
            return arm
        piece = plan.store.get(f"fit-{arm.slug}", partial(piece_of, arm))
        found = read_json(piece, "fit")
        method = MITIGATIONS.parse(found["method"])
        if isinstance(method, Adapter):
            method = replace(method, updates=below(piece, TENSORS))
        return replace(arm, method=method, fitted=found["how"])

    plan.each(fitted)


def answer(plan: TrialPlan) -> tuple[list[Evaluation], ShortForms]:
    """The evaluations of all arms, and on short forms; methods under which nothing is answered are left out."""
    arms, evaluations = [], []
    for arm in plan.arms:
        try:
            evaluations.append(_evaluated(plan, arm, plan.test))
            arms.append(arm)
        except NothingAnsweredError as error:
            if arm is plan.arms[0]:
                raise
            plan.left_out.append(f"{arm.name}: {error}")
    plan.keep(arms)
    short: dict[str, tuple[Evaluation | None, ...]] = {}
    for form in plan.short_forms:
        by_arm: list[Evaluation | None] = []
        for arm in plan.arms:
            try:
                by_arm.append(_evaluated(plan, arm, form, within=slug_of(str(form.task))))
            except UsageError as error:
                if arm is plan.arms[0]:
                    raise
                by_arm.append(None)
                plan.left_out.append(f"{form.task} was not put to {arm.name}: {error}")
        short[str(form.task)] = tuple(by_arm)
    return evaluations, short


def _evaluated(plan: TrialPlan, arm: Arm, questions: Questions, *, within: str = "") -> Evaluation:
    """The evaluation of one arm, in a directory of its own; a finished one is taken over."""
    place = None if plan.directory is None else plan.directory / ARMS / arm.slug / within
    arguments, resume = {"task": str(questions.task), "method": arm.name}, questions.options.resume
    # What the whole run may replace is checked once, for the directory of the whole.
    with run_directory(place, verb="evaluate", arguments=arguments, resume=resume, overwrite=True) as run:
        options = replace(questions.options, directory=run.directory)
        evaluation = evaluate_responder(arm.answering, questions.task, options)
        finish_evaluation(evaluation, run)
    return evaluation


def measure_text(plan: TrialPlan) -> tuple[list[Nats | None], list[str]]:
    """Nats per token of every window, and why text is not judged, by arm: one of them."""
    nats: list[Nats | None] = []
    reasons = []
    for arm in track(plan.arms, ORDINARY_TEXT):
        reason = SERVER if plan.model is None else _untold(arm.method) or (UNASKED if plan.text is None else "")
        reasons.append(reason)
        if reason or plan.text is None:
            nats.append(None)
        else:
            nats.append(plan.store.get(f"text-{arm.slug}", partial(_measured, arm, plan.text))["nats"])
    return nats, reasons


def _untold(method: Method | None) -> str:
    """Why ordinary text says nothing about a method; empty if it can show harm."""
    if method is not None and not isinstance(method, Mitigation):
        return REQUESTS
    if method is None or not method.needs_passages or method.text_is_passage:
        return ""
    return FROM_QUESTION if method.needs_question else NO_PASSAGES


@torch.no_grad()
def _measured(arm: Arm, windows: Int64[np.ndarray, "documents token"]) -> dict[str, np.ndarray]:
    """Mean negative log-likelihood of every token but the first of each window, as a piece to keep."""
    method, rows = arm.method, list(range(windows.shape[1] - 1))  # each token is read from the one before it
    whole = [(0, windows.shape[1])] if method is not None and method.needs_passages else []
    with nullcontext(arm.model) if method is None else mitigated(arm.model, method, passages=whole) as model:
        read = check_model(model)
        logits = [read.outputs(read.embed(read.token_tensor([window.tolist()])), rows).logits[0] for window in windows]
    scores = [score_answer(one, window[1:]) for one, window in zip(logits, windows, strict=True)]
    return {"nats": np.array([-score.logprob / len(rows) for score in scores])}


def judge_trial(
    plan: TrialPlan,
    test: Sequence[Evaluation],
    short: ShortForms,
    nats: Sequence[Nats | None],
    untold: Sequence[str],
) -> Record:
    """Judge every method by the measure that was asked for, or that the unchanged model's scores allow.

    Args:
        plan: With the arms that are judged.
        test: The evaluation of every arm, the unchanged model first.
        short: Evaluations of the short forms.
        nats: Of ordinary text, by arm.
        untold: Why text was not judged, by arm.
    """
    by, first = plan.options.by, test[0]
    measures = [measures_of(evaluation.tables) for evaluation in test]
    if by is not None and by not in measures[0]:
        raise UsageError(f"--by {by}: measured are {', '.join(measures[0])}")
    allowed = measures[0] if by is None else {by: measures[0][by]}
    choice = choose_measure(allowed, undecided=first.withheld)
    scored, left_out = _scored(plan, test, short, nats, choice.measure)
    judgement = judge(measures[0][choice.measure], scored, positions=first.positions, measure=choice.measure)
    names = [arm.name for arm in plan.arms]
    chosen = 0 if judgement.recommended is None else names.index(judgement.recommended)
    requirement = plan.options.require and check_requirement(
        plan.options.require, measures[chosen], test[chosen].withheld, arm=names[chosen]
    )
    record = Record("mitigate", {"task": str(plan.test.task), "methods": names[1:]})
    record.seeds = {"samples": plan.options.evaluation.seed}
    record.resolved = {
        "title": first.title,
        "positions": list(first.positions),
        "calibration": plan.options.calibration,
        "count": plan.options.evaluation.count,
        "text": plan.options.text,
        "responder": first.record.resolved["responder"],
        "fingerprint": fingerprint(plan.settings),
    }
    record.scalars = {
        "task": str(plan.test.task),
        "n_items": plan.test.task.n_items,
        "model": str(first.source or "model"),
        "judgement": as_stored(judgement),
        "choice": as_stored(choice),
        "arms": [as_stored(_arm_result(*found)) for found in zip(plan.arms, test, untold, strict=True)],
        "curves": {
            name: [as_stored(position_means(of[name], highest=HIGHEST.get(name, np.inf))) for of in measures]
            for name in measures[0]
            if all(name in of for of in measures)
        },
        "left_out": left_out,
        "requirement": as_stored(requirement),
        "tolerance": plan.options.tolerance,
        "notices": first.notices,
    }
    record.arrays = {
        "positions": np.array(first.positions),
        **{f"scores/{name}/{arm}": table for arm, of in enumerate(measures) for name, table in of.items()},
        **{f"text/{arm}": of_text for arm, of_text in enumerate(nats) if of_text is not None},
    }
    return record


def _scored(
    plan: TrialPlan, test: Sequence[Evaluation], short: ShortForms, nats: Sequence[Nats | None], measure: str
) -> tuple[list[ArmScores], list[str]]:
    """Scores of every method with its side effects, and what was left out."""
    scored, left_out = [], list(plan.left_out)
    blank = np.full_like(measures_of(test[0].tables)[measure], np.nan)
    for number, arm in enumerate(plan.arms[1:], start=1):
        effects: list[SideEffect] = []
        before, after = nats[0], nats[number]
        if before is not None and after is not None:
            effects.append(SideEffect(ORDINARY_TEXT, before, after, 1, plan.options.tolerance, "nats per token"))
        for form, evaluations in short.items():
            found = [measures_of(one.tables) if one else {} for one in (evaluations[0], evaluations[number])]
            if any(measure not in of for of in found):
                continue
            if why := _withheld(evaluations[0], evaluations[number], measure):
                left_out.append(f"{form} under {arm.name} was not judged: {why}")
            else:
                old, new = (of[measure].mean(axis=1) for of in found)
                effects.append(SideEffect(form, old, new, unit=measure))
        scores = measures_of(test[number].tables).get(measure, blank)
        scored.append(ArmScores(arm.name, scores, tuple(effects), _withheld(test[0], test[number], measure)))
    return scored, left_out


def _arm_result(arm: Arm, of: Evaluation, untold: str) -> ArmResult:
    """What is told of one arm, beside its verdict."""
    assert of.reading is not None  # made now
    return ArmResult(
        name=arm.name,
        method="" if arm.method is None else str(arm.method)[:200],
        effort=Effort(of.seconds, of.examples),
        reading=of.reading,
        text_reason=untold,
        fitted=arm.fitted,
        recipe=arm.path,
        directory=f"{ARMS}/{arm.slug}",
        needs_passages=arm.method is not None and arm.method.needs_passages,
    )


def _withheld(unchanged: Evaluation | None, arm: Evaluation | None, measure: str) -> str:
    """Why generated answers without a method and with it tell nothing of it; empty if they do, or none decides.

    Too many of either cannot be judged, or more were cut off with the method, or fewer, which shows as a difference.
    """
    if measure not in GENERATED or unchanged is None or arm is None:
        return ""
    for evaluation, of in ((unchanged, "without it"), (arm, "with it")):
        if evaluation.withheld:
            return f"{of}, {evaluation.withheld}"
    shares = np.column_stack([evaluation.tables["cut"].mean(axis=1) for evaluation in (unchanged, arm)])
    shares = shares[~np.isnan(shares).any(axis=1)]
    if len(shares) < SAMPLES_FOR_CLAIM or not shares.any():
        return ""
    p = contrast_of(shares, np.array([-1.0, 1.0])).p
    before, after = shares.mean(axis=0)
    return f"{before:.0%} of the answers were cut off without it, {after:.0%} with it (p {p:.2g})" if p < ALPHA else ""
