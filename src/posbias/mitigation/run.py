"""`mitigate`: the unchanged model and every method on the same samples, judged, with side effects and one verdict each.

A plan is resolved once; then the phases follow each other: try, fit, answer, ordinary text, judge. Every arm is an
evaluation with a record of its own below the run's directory; fits and what ordinary text is under a method are pieces
beside it. A killed run goes on from the samples, texts and fits that are there.

Text has no passages and no question: what acts from the question on, what moves or reads passages, and what changes
requests cannot change it, and is not judged by it (`_untold`). `ms_poe` knows the passages only to rank heads at their
end; it is given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation import evaluate_responder, finish_evaluation
from posbias.evaluation.curve import HIGHEST, SAMPLES_FOR_CLAIM, Scores, contrast_of, position_means
from posbias.evaluation.evaluation import GENERATED, SCORES, measures_of
from posbias.evaluation.levels import ALPHA, check_requirement
from posbias.evaluation.reading import Reading
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.run import NothingAnsweredError
from posbias.evaluation.samples import as_bytes, read_json
from posbias.interventions.base import check_model
from posbias.mitigation.fitting import Calibration, Fit, run_fit, text_beside
from posbias.mitigation.judging import ArmScores, SideEffect, choose_measure, judge
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.methods.question import question_text
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.plan import (
    ARMS,
    Arm,
    MitigateOptions,
    Questions,
    TrialPlan,
    plan_trial,
    slug_of,
    text_source,
    window_length,
)
from posbias.mitigation.result import ORDINARY_TEXT, ArmResult, Effort, MitigationTrial
from posbias.mitigation.subjects import opened
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import report, track
from posbias.runs.parts import below, fingerprint, finished_run
from posbias.runs.records import Record
from posbias.runs.results import as_stored, from_stored
from posbias.runs.running import run_directory
from posbias.tasks.language import LANGUAGE_TASKS, LanguageTask

RECIPE = "recipe.json"
"""Name of a fitted method's file, in its arm's directory."""
SERVER, UNASKED = "not judged: the model is behind a server", "not judged: no windows were asked for"
"""Why text is put to no arm."""
REQUESTS = "unchanged: only prompts change"
FROM_QUESTION = "unchanged: acts only after a question begins"
NO_PASSAGES = "not judged: needs passages, and text has none"
"""Why ordinary text says nothing about a method."""
TENSORS = "tensors/"
"""Stem of the names, in the piece of a fit, of what the method's spelling leaves out."""

Nats = Float64[np.ndarray, "documents"]


ShortForms = Mapping[str, tuple[Record | None, ...]]
"""Evaluations by short form of the task and arm; None if a method does not apply to the form."""


def try_arms(plan: TrialPlan) -> None:
    """Have every method that needs no fit answer one request. A server is asked for nothing that is not kept."""
    requests = len(plan.test.requests) * len(plan.arms)
    report(f"{requests} requests without and with {len(plan.arms) - 1} methods, before those that methods add")
    request, options = replace(plan.test.requests[0], max_tokens=1), plan.test.options

    def tried(arm: Arm) -> Arm:
        if arm.method is not None and isinstance(arm.plain, LocalResponder):
            arm.answering.respond([request], generate=options.generate, score=options.score)
        return arm

    plan.each(tried)


def fit_arms(plan: TrialPlan) -> None:
    """Fit every method without parameters to the calibration samples; an interrupted fit starts anew."""
    options = plan.options

    @cache
    def text(model: HuggingFaceModel) -> list[np.ndarray]:
        length = window_length(model, options)
        return text_beside(text_source(options), model, length=length, seed=options.evaluation.seed)

    def fit(how: Fit, model: HuggingFaceModel) -> dict[str, np.ndarray]:
        calibration = Calibration(model, plan.calibration.examples, partial(text, model))
        fitted = run_fit(how, calibration, options=options.fitting)
        updates = fitted.method.updates if isinstance(fitted.method, Adapter) else {}
        tensors = {f"{TENSORS}{name}": numbers for name, numbers in updates.items()}
        return {"fit": as_bytes({"method": str(fitted.method), "how": fitted.how}), **tensors}

    def with_method(arm: Arm) -> Arm:
        if arm.fit is None:
            return arm
        piece = plan.store.get(f"fit-{arm.slug}", partial(fit, arm.fit, check_model(arm.model)))
        found = read_json(piece, "fit")
        method = MITIGATIONS.parse(found["method"])
        if isinstance(method, Adapter):
            method = replace(method, updates=below(piece, TENSORS))
        return replace(arm, method=method, fitted=found["how"])

    plan.each(with_method)


def answer(plan: TrialPlan) -> tuple[list[Record], ShortForms]:
    """The evaluations of all arms, and on short forms; methods under which nothing is answered are left out."""
    arms, records = [], []
    for arm in plan.arms:
        try:
            records.append(_evaluated(plan, arm, plan.test))
            arms.append(arm)
        except NothingAnsweredError as error:
            if arm is plan.arms[0]:
                raise
            plan.left_out.append(f"{arm.name}: {error}")
    plan.keep(arms)
    short: dict[str, tuple[Record | None, ...]] = {}
    for form in plan.short_forms:
        by_arm: list[Record | None] = []
        for arm in plan.arms:
            try:
                by_arm.append(_evaluated(plan, arm, form, within=slug_of(str(form.task))))
            except UsageError as error:
                if arm is plan.arms[0]:
                    raise
                by_arm.append(None)
                plan.left_out.append(f"{form.task} was not put to {arm.name}: {error}")
        short[str(form.task)] = tuple(by_arm)
    return records, short


def _evaluated(plan: TrialPlan, arm: Arm, questions: Questions, *, within: str = "") -> Record:
    """The evaluation of one arm, in a directory of its own; a finished one is taken over."""
    place = None if plan.directory is None else plan.directory / ARMS / arm.slug / within
    arguments, resume = {"task": str(questions.task), "method": arm.name}, questions.options.resume
    # What the whole run may replace is checked once, for the directory of the whole.
    with run_directory(place, verb="evaluate", arguments=arguments, resume=resume, overwrite=True) as run:
        options = replace(questions.options, directory=run.directory)
        evaluation = evaluate_responder(arm.answering, questions.task, options)
        finish_evaluation(evaluation, run)
    return evaluation.record


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


def _measured(arm: Arm, windows: Int64[np.ndarray, "documents token"]) -> dict[str, np.ndarray]:
    """Mean negative log-likelihood of every token but the first of each window, as a piece to keep."""
    if arm.method is None:
        return {"nats": _likelihood(arm.model, windows)}
    assert isinstance(arm.method, Mitigation)  # others have a reason
    whole = [(0, windows.shape[1])] if arm.method.needs_passages else []
    with mitigated(arm.model, arm.method, passages=whole) as changed:
        return {"nats": _likelihood(changed, windows)}


@torch.no_grad()
def _likelihood(model: Any, windows: Int64[np.ndarray, "documents token"]) -> Nats:
    rows = list(range(windows.shape[1] - 1))  # each token is read from the one before it
    logits = [model.outputs(model.embed(model.token_tensor([window.tolist()])), rows).logits[0] for window in windows]
    scores = [score_answer(one, window[1:]) for one, window in zip(logits, windows, strict=True)]
    return np.array([-score.logprob / len(rows) for score in scores])


def judge_trial(
    plan: TrialPlan, test: Sequence[Record], short: ShortForms, nats: Sequence[Nats | None], untold: Sequence[str]
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
    measures, readings = list(map(_measures, test)), list(map(_reading, test))
    if by is not None and by not in measures[0]:
        raise UsageError(f"--by {by}: measured are {', '.join(measures[0])}")
    allowed = measures[0] if by is None else {by: measures[0][by]}
    choice = choose_measure(allowed, undecided=readings[0].withheld)
    measure = choice.measure
    scored, left_out = _scored(plan, test, short, nats, measure)
    positions = tuple(int(position) for position in first.arrays["positions"])
    judgement = judge(measures[0][measure], scored, positions=positions, measure=measure)
    names = [arm.name for arm in plan.arms]
    chosen = 0 if judgement.recommended is None else names.index(judgement.recommended)
    requirement = plan.options.require and check_requirement(
        plan.options.require, measures[chosen], readings[chosen].withheld, arm=names[chosen]
    )
    model = first.resolved["responder"].get("model")
    record = Record("mitigate", {"task": str(plan.test.task), "methods": names[1:]})
    record.seeds = {"samples": plan.options.evaluation.seed}
    record.resolved = _resolved(plan, first, positions)
    record.scalars = {
        "task": str(plan.test.task),
        "n_items": plan.test.task.n_items,
        "model": str((model.get("source") if isinstance(model, Mapping) else model) or "model"),
        "judgement": as_stored(judgement),
        "choice": as_stored(choice),
        "arms": [as_stored(_arm_result(*found)) for found in zip(plan.arms, test, readings, untold, strict=True)],
        "curves": {
            name: [as_stored(position_means(of[name], highest=HIGHEST.get(name, np.inf))) for of in measures]
            for name in measures[0]
            if all(name in of for of in measures)
        },
        "left_out": left_out,
        "requirement": as_stored(requirement),
        "tolerance": plan.options.tolerance,
        "question": question_text(plan.test.examples),
        "notices": first.scalars.get("notices", {}),
    }
    record.arrays = {
        "positions": np.array(positions),
        **{f"scores/{name}/{arm}": table for arm, of in enumerate(measures) for name, table in of.items()},
        **{f"text/{arm}": of_text for arm, of_text in enumerate(nats) if of_text is not None},
    }
    return record


def _resolved(plan: TrialPlan, first: Record, positions: Sequence[int]) -> dict[str, Any]:
    """What a trial was made from."""
    return {
        "title": str(first.resolved["title"]),
        "positions": list(positions),
        "calibration": plan.options.calibration,
        "count": plan.options.evaluation.count,
        "text": plan.options.text,
        "responder": first.resolved["responder"],
        "fingerprint": fingerprint(plan.settings),
    }


def _scored(
    plan: TrialPlan, test: Sequence[Record], short: ShortForms, nats: Sequence[Nats | None], measure: str
) -> tuple[list[ArmScores], list[str]]:
    """Scores of every method with its side effects, and what was left out."""
    scored, left_out = [], list(plan.left_out)
    for number, arm in enumerate(plan.arms[1:], start=1):
        side, undecided = _short_form_effects(short, number, measure)
        before, after = nats[0], nats[number]
        if before is not None and after is not None:
            side.insert(0, SideEffect(ORDINARY_TEXT, before, after, 1, plan.options.tolerance, "nats per token"))
        withheld = _withheld(test[0], test[number]) if measure in GENERATED else ""
        blank = np.full_like(_measures(test[0])[measure], np.nan)
        scored.append(ArmScores(arm.name, _measures(test[number]).get(measure, blank), tuple(side), withheld))
        left_out += [f"{form} under {arm.name} was not judged: {why}" for form, why in undecided.items()]
    return scored, left_out


def _arm_result(arm: Arm, of: Record, reading: Reading, untold: str) -> ArmResult:
    """What is told of one arm, beside its verdict."""
    return ArmResult(
        name=arm.name,
        method="" if arm.method is None else str(arm.method)[:200],
        effort=Effort(of.scalars["seconds"], of.scalars["examples"]),
        reading=reading,
        text_reason=untold,
        fitted=arm.fitted,
        recipe=arm.path,
        directory=f"{ARMS}/{arm.slug}",
        needs_passages=arm.method is not None and arm.method.needs_passages,
    )


def _measures(record: Record) -> dict[str, Scores]:
    """Scores of one arm by measure."""
    return measures_of(below(record.arrays, SCORES))


def _reading(record: Record) -> Reading:
    """The answers of one arm that could be judged, and those that could not."""
    return from_stored(Reading, record.scalars["reading"])


def _withheld(unchanged: Record, arm: Record) -> str:
    """Why answers without a method and with it tell nothing of it; empty if they do.

    Too many of either cannot be judged, or more were cut off with the method, or fewer, which shows as a difference.
    """
    for record, of in ((unchanged, "without it"), (arm, "with it")):
        if why := _reading(record).withheld:
            return f"{of}, {why}"
    shares = np.column_stack([below(record.arrays, SCORES)["cut"].mean(axis=1) for record in (unchanged, arm)])
    shares = shares[~np.isnan(shares).any(axis=1)]
    if len(shares) < SAMPLES_FOR_CLAIM or not shares.any():
        return ""
    p = contrast_of(shares, np.array([-1.0, 1.0])).p
    before, after = shares.mean(axis=0)
    return f"{before:.0%} of the answers were cut off without it, {after:.0%} with it (p {p:.2g})" if p < ALPHA else ""


def _short_form_effects(short: ShortForms, number: int, measure: str) -> tuple[list[SideEffect], dict[str, str]]:
    """Short forms of the task, unchanged and in one arm; and, of forms that decide nothing, why."""
    side: list[SideEffect] = []
    undecided: dict[str, str] = {}
    for form, records in short.items():
        old, new = records[0], records[number]
        if old is None or new is None or measure not in _measures(old) or measure not in _measures(new):
            continue
        if measure in GENERATED and (why := _withheld(old, new)):
            undecided[form] = why
        else:
            before, after = (_measures(record)[measure].mean(axis=1) for record in (old, new))
            side.append(SideEffect(form, before, after, unit=measure))
    return side, undecided


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
