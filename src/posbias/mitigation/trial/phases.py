"""The phases of a trial before it is judged: try, fit, answer, ordinary text.

Every arm is an evaluation with a record of its own below the run's directory; fits and what ordinary text is under a
method are pieces beside it. Text has no passages and no question: what acts from the question on, what moves or reads
passages, and what changes requests cannot change it, and is not judged by it (`_untold`). `ms_poe` knows the
passages only to rank heads at their end; it is given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.errors import UsageError
from posbias.evaluation import evaluate_responder, finish_evaluation
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.local import score_answer
from posbias.evaluation.run import NothingAnsweredError
from posbias.evaluation.samples import as_bytes, read_json
from posbias.interventions.base import check_model
from posbias.mitigation.fitting.base import Calibration, Fit
from posbias.mitigation.fitting.calibration import text_beside
from posbias.mitigation.fitting.fit import run_fit
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.trial.arms import Arm, slug_of
from posbias.mitigation.trial.plan import ARMS, Questions, TrialPlan, text_source, window_length
from posbias.mitigation.trial.result import ORDINARY_TEXT
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import report, track
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.running import run_directory

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
