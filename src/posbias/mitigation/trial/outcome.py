"""The phases *judge* and *record*: scores of all arms and their side effects become a judgement, and a record."""

from dataclasses import asdict
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.curve import HIGHEST, SAMPLES_FOR_CLAIM, Scores, contrast_of, position_means
from posbias.evaluation.evaluation import GENERATED, SCORES, measures_of
from posbias.evaluation.reading import Reading
from posbias.evaluation.requirements import ALPHA, check_requirement
from posbias.mitigation.judging.judge import ArmScores, SideEffect, choose_measure, judge
from posbias.mitigation.methods.question import question_text
from posbias.mitigation.trial.phases import Answers, TextEffects
from posbias.mitigation.trial.plan import ARMS, TrialPlan
from posbias.mitigation.trial.result import ORDINARY_TEXT
from posbias.runs.parts import below, fingerprint
from posbias.runs.records import Record, plain
from posbias.runs.results import from_stored


def judge_trial(plan: TrialPlan, answers: Answers, text: TextEffects) -> Record:
    """Judge every method by the measure that was asked for, or that the unchanged model's scores allow."""
    by, test = plan.options.by, answers.test
    measures, readings = list(map(_measures, test)), list(map(_reading, test))
    if by is not None and by not in measures[0]:
        raise UsageError(f"--by {by}: measured are {', '.join(measures[0])}")
    allowed = measures[0] if by is None else {by: measures[0][by]}
    choice = choose_measure(allowed, undecided=readings[0].withheld)
    measure, blank = choice.measure, np.full_like(measures[0][choice.measure], np.nan)
    scored, left_out = [], list(plan.left_out)
    for number, arm in enumerate(plan.arms[1:], start=1):
        on_forms, undecided = _short_form_effects(answers, number, measure)
        side = (*_text_effect(plan, text, number), *on_forms)
        withheld = _withheld(test[0], test[number]) if measure in GENERATED else ""
        scored.append(ArmScores(arm.name, measures[number].get(measure, blank), side, withheld))
        left_out += [f"{form} under {arm.name} was not judged: {why}" for form, why in undecided.items()]
    positions = tuple(int(position) for position in test[0].arrays["positions"])
    judgement = judge(measures[0][measure], scored, positions=positions, measure=measure)
    requirement, names = None, [arm.name for arm in plan.arms]
    if plan.options.require is not None:  # of the recommended arm
        number = 0 if judgement.recommended is None else names.index(judgement.recommended)
        requirement = check_requirement(
            plan.options.require, measures[number], readings[number].withheld, arm=names[number]
        )
    record = Record(verb="mitigate", arguments={}, seeds={"samples": plan.options.evaluation.seed})
    record.arguments = {"task": str(plan.test.task), "methods": names[1:]}
    record.resolved = _resolved(plan, test[0], positions)
    record.scalars = {
        "arms": names,
        "judgement": judgement.as_record(),
        "choice": plain(asdict(choice)),
        "curves": _curves(measures),
        "effort": [{"seconds": of.scalars["seconds"], "requests": of.scalars["examples"]} for of in test],
        "readings": [plain(asdict(reading)) for reading in readings],
        "left_out": left_out,
        "requirement": None if requirement is None else plain(asdict(requirement)),
        "notices": test[0].scalars.get("notices", {}),
        "fits": {arm.name: arm.fitted for arm in plan.arms if arm.fitted is not None},
        "text_not_judged": dict(text.reasons),
    }
    record.arrays = {
        "positions": np.array(positions),
        **{f"scores/{name}/{arm}": table for arm, of in enumerate(measures) for name, table in of.items()},
        **{f"text/{arm}": nats for arm, nats in enumerate(text.nats) if nats is not None},
    }
    return record


def _resolved(plan: TrialPlan, first: Record, positions: tuple[int, ...]) -> dict[str, Any]:
    """What a trial was made from."""
    arms = plan.arms
    return {
        "title": str(first.resolved["title"]),
        "task": str(plan.test.task),
        "n_items": plan.test.task.n_items,
        "positions": list(positions),
        "calibration": plan.options.calibration,
        "count": plan.options.evaluation.count,
        "tolerance": plan.options.tolerance,
        "text": plan.options.text,
        "methods": {arm.name: str(arm.method)[:200] for arm in arms[1:]},
        "needing_passages": [arm.name for arm in arms[1:] if arm.method is not None and arm.method.needs_passages],
        "responder": first.resolved["responder"],
        "recipes": {arm.name: arm.path for arm in arms if arm.path},
        "directories": {arm.name: f"{ARMS}/{arm.slug}" for arm in arms},
        "question": question_text(plan.test.examples),
        "fingerprint": fingerprint(plan.settings),
    }


def _curves(measures: list[dict[str, Scores]]) -> dict[str, Any]:
    """Means by measure, arm and position, of what was measured in all arms."""
    return {
        name: [
            [mean.as_record() for mean in position_means(of[name], highest=HIGHEST.get(name, np.inf))]
            for of in measures
        ]
        for name in measures[0]
        if all(name in of for of in measures)
    }


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


def _text_effect(plan: TrialPlan, text: TextEffects, number: int) -> tuple[SideEffect, ...]:
    """Ordinary text, unchanged and in one arm."""
    before, after = text.nats[0], text.nats[number]
    if before is None or after is None:
        return ()
    return (SideEffect(ORDINARY_TEXT, before, after, 1, plan.options.tolerance, "nats per token"),)


def _short_form_effects(answers: Answers, number: int, measure: str) -> tuple[list[SideEffect], dict[str, str]]:
    """Short forms of the task, unchanged and in one arm; and, of forms that decide nothing, why."""
    side: list[SideEffect] = []
    undecided: dict[str, str] = {}
    for form, records in answers.short.items():
        old, new = records[0], records[number]
        if old is None or new is None or measure not in _measures(old) or measure not in _measures(new):
            continue
        if measure in GENERATED and (why := _withheld(old, new)):
            undecided[form] = why
        else:
            before, after = (_measures(record)[measure].mean(axis=1) for record in (old, new))
            side.append(SideEffect(form, before, after, unit=measure))
    return side, undecided
