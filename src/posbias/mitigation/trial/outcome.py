"""The phases *judge* and *record*: scores of all arms and their side effects become a judgement, and a record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.curve import HIGHEST, SAMPLES_FOR_CLAIM, Scores, contrast_of, position_means
from posbias.evaluation.evaluation import GENERATED, SCORES, measures_of
from posbias.evaluation.reading import Reading
from posbias.evaluation.requirements import ALPHA, check_requirement
from posbias.mitigation.judging.judge import ArmScores, SideEffect, choose_measure, judge
from posbias.mitigation.methods.question import question_text
from posbias.mitigation.trial.arms import Arm
from posbias.mitigation.trial.phases import Nats, ShortForms
from posbias.mitigation.trial.plan import ARMS, TrialPlan
from posbias.mitigation.trial.result import ORDINARY_TEXT, ArmResult, Effort
from posbias.runs.parts import below, fingerprint
from posbias.runs.records import Record
from posbias.runs.results import as_stored, from_stored


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
