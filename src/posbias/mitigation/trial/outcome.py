"""The phases *judge* and *record*: scores of all arms and their side effects become a judgement, and a record."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.curve import Scores, position_means
from posbias.evaluation.endings import Undecided, why_undecided
from posbias.evaluation.evaluation import GENERATED, measures_of
from posbias.evaluation.requirements import RequirementCheck, check_requirement
from posbias.mitigation.judging.judge import ArmScores, Judgement, MeasureChoice, SideEffect, choose_measure, judge
from posbias.mitigation.methods.question import question_text
from posbias.mitigation.trial.answers import Answers
from posbias.mitigation.trial.arms import SHORT_VERDICT, LeftOut
from posbias.mitigation.trial.influence import influence_scalars
from posbias.mitigation.trial.ordinary_text import ORDINARY_TEXT
from posbias.mitigation.trial.plan import ARMS, TrialPlan
from posbias.mitigation.trial.result import Reading
from posbias.mitigation.trial.side_effects import SideEffects, effort_of
from posbias.runs.parts import below, fingerprint
from posbias.runs.records import Record, plain
from posbias.statistics import mean_of

CUT_MATTERS = ("accuracy", "values_found")
"""Measures of answers that may be right anywhere, so that one that was cut off might have become right."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The judgement on all arms, and what it rests on."""

    judgement: Judgement
    choice: MeasureChoice
    measures: tuple[dict[str, Scores], ...]
    """Scores by arm and measure."""
    readings: tuple[Reading, ...]
    requirement: RequirementCheck | None
    left_out: tuple[LeftOut, ...]


def judge_trial(plan: TrialPlan, answers: Answers, effects: SideEffects) -> Outcome:
    """Judge every method by the measure that was asked for, or that the unchanged model's scores allow."""
    by = plan.options.by
    measures = tuple(map(_measures, answers.test))
    tables = [below(record.arrays, "scores/") for record in answers.test]
    readings = tuple(map(_reading, answers.test))
    if by is not None and by not in measures[0]:
        first = readings[0]
        unread = (
            f"; unchanged: {first.unread} of {first.answers} generated answers could not be read, so none counts"
            if first.withheld
            else ""
        )
        raise UsageError(f"--by {by}: measured are {', '.join(measures[0])}{unread}")
    allowed = measures[0] if by is None else {by: measures[0][by]}
    choice = choose_measure(allowed, undecided=why_undecided(tables[0], tables[0]))
    measure, blank = choice.measure, np.full_like(measures[0][choice.measure], np.nan)
    scored, left_out = [], []
    for number, arm in enumerate(plan.arms[1:], start=1):
        on_forms, undecided = _short_form_effects(answers, number, measure)
        side = (*_text_effect(plan, effects, number), *on_forms)
        withheld = why_undecided(tables[0], tables[number]) if measure in CUT_MATTERS else None
        scored.append(ArmScores(arm.name, measures[number].get(measure, blank), side, withheld))
        left_out += [LeftOut(SHORT_VERDICT, arm=arm.name, form=form, undecided=cut) for form, cut in undecided.items()]
    positions = tuple(int(position) for position in answers.test[0].arrays["positions"])
    judgement = judge(measures[0][measure], scored, positions=positions, measure=measure)
    requirement, names = None, [arm.name for arm in plan.arms]
    if plan.options.require is not None:  # of the recommended arm
        number = 0 if judgement.recommended is None else names.index(judgement.recommended)
        requirement = check_requirement(plan.options.require, measures[number], tables[number], arm=names[number])
    return Outcome(judgement, choice, measures, readings, requirement, tuple(left_out))


def _measures(record: Record) -> dict[str, Scores]:
    """Scores of one arm by measure; those of generated answers only if enough of them could be read."""
    withheld = GENERATED if record.scalars["reading"]["withheld"] else ()
    measures = measures_of(below(record.arrays, "scores/"))
    return {name: table for name, table in measures.items() if name not in withheld}


def _reading(record: Record) -> Reading:
    """Answers of one arm that could not be read or are empty."""
    scalars = record.scalars
    reading = scalars["reading"]
    requests = scalars["examples"] - sum(scalars["skipped"].values())
    return Reading(reading["unread"], reading["answers"], reading["withheld"], scalars.get("empty", 0), requests)


def _text_effect(plan: TrialPlan, effects: SideEffects, number: int) -> tuple[SideEffect, ...]:
    """Ordinary text, unchanged and in one arm."""
    before, after = effects.texts[0], effects.texts[number]
    if before is None or after is None:
        return ()
    return (SideEffect(ORDINARY_TEXT, before, after, 1, plan.options.tolerance, "nats per token"),)


def _short_form_effects(answers: Answers, number: int, measure: str) -> tuple[list[SideEffect], dict[str, Undecided]]:
    """Short forms of the task, unchanged and in one arm; and, of forms that decide nothing, the open answers."""
    side: list[SideEffect] = []
    undecided: dict[str, Undecided] = {}
    for form, records in answers.short.items():
        old, new = records[0], records[number]
        if old is None or new is None or measure not in _measures(old) or measure not in _measures(new):
            continue
        cut = why_undecided(*(below(record.arrays, "scores/") for record in (old, new)))
        if cut is not None and measure in CUT_MATTERS:
            undecided[form] = cut
        else:
            before, after = (_measures(record)[measure].mean(axis=1) for record in (old, new))
            side.append(SideEffect(form, before, after, unit=measure))
    return side, undecided


def record_trial(plan: TrialPlan, answers: Answers, effects: SideEffects, outcome: Outcome) -> Record:
    """The record of a trial: facts and numbers, no sentences."""
    first, arms = answers.test[0], plan.arms
    positions = outcome.judgement.positions
    record = Record(verb="mitigate", arguments={}, seeds={"samples": plan.options.evaluation.seed})
    record.arguments = {"task": str(plan.test.task), "methods": [arm.name for arm in arms[1:]]}
    record.resolved = {
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
    record.scalars = {
        "arms": [arm.name for arm in arms],
        "judgement": outcome.judgement.as_record(),
        "choice": plain(asdict(outcome.choice)),
        "curves": {
            name: [[mean.as_record() for mean in position_means(scores[name])] for scores in outcome.measures]
            for name in outcome.measures[0]
            if all(name in scores for scores in outcome.measures)
        },
        "effort": [asdict(effort_of(record)) for record in answers.test],
        "endings": [evaluation.scalars["endings"] for evaluation in answers.test],
        "readings": [asdict(reading) for reading in outcome.readings],
        "left_out": [asdict(part) for part in (*plan.left_out, *outcome.left_out)],
        "requirement": None if outcome.requirement is None else plain(asdict(outcome.requirement)),
        "notices": first.scalars.get("notices", {}),
        "fits": {arm.name: arm.fitted for arm in arms if arm.fitted is not None},
        "text_not_judged": dict(effects.text_reasons),
        "conversations": {
            name: mean_of(nats).interval(least=0.0).as_record() for name, nats in effects.conversations.items()
        },
    }
    record.arrays = {
        "positions": np.array(positions),
        **{f"scores/{name}/{arm}": table for arm, by in enumerate(outcome.measures) for name, table in by.items()},
        **{f"text/{arm}": nats for arm, nats in enumerate(effects.texts) if nats is not None},
        **{f"influence/{name}": table for name, table in effects.influence.items()},
    }
    if effects.influence:
        record.scalars["influence"] = _influence(plan, effects, outcome)
    return record


def _influence(plan: TrialPlan, effects: SideEffects, outcome: Outcome) -> dict[str, Any]:
    """Influence beside the scores of the samples on which it was measured."""
    n_samples = len(plan.spans)
    scores = {
        arm.name: {name: table[:n_samples] for name, table in by_measure.items()}
        for arm, by_measure in zip(plan.arms, outcome.measures, strict=True)
    }
    return influence_scalars(
        effects.influence,
        scores,
        positions=outcome.judgement.positions,
        n_items=plan.test.task.n_items,
        seed=plan.options.evaluation.seed,
    )
