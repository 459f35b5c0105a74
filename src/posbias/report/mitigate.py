"""Methods against position bias, judged: the recommendation first, one table, curves before and after, the rest folded.

Everything comes from the typed result (`posbias.mitigation.MitigationTrial`); `mitigate_wording.py` has the sentences.
"""

import shlex
from collections.abc import Sequence
from inspect import getdoc

import numpy as np

from posbias.display.figures import MEASURED, Curve, Figure, interval_curves, run_strokes
from posbias.display.wording import label
from posbias.errors import UsageError
from posbias.evaluation.changes import MEAN, SPREAD, WORST, Change, change_text
from posbias.evaluation.evaluation import MEASURES
from posbias.evaluation.reading import UNJUDGED
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation
from posbias.mitigation.methods.recipe import PASSAGES_SNIPPET, QUESTION_ADDITION, SNIPPET
from posbias.mitigation.trial.result import MitigationTrial
from posbias.report.evaluate import measure_words, requirement_text
from posbias.report.export import adapter_commands, gguf_commands, merged_commands
from posbias.report.layout import caveats_of, sample_notices
from posbias.report.mitigate_wording import (
    reasons,
    recommendation,
    seconds_each,
    text_change,
    warnings,
    words,
)
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, number_text
from posbias.statistics import MISSING, Interval

MOST_DRAWN = 6
"""Methods drawn beside the unchanged model: the recommended one and those after it by their worst position."""
NOTE = (
    "Every method answers the same test samples at the same positions as the unchanged model; no fit saw them. Changes "
    "are paired over samples, with 95 % intervals. The interval of the worst position holds whichever positions are "
    "truly worst, before and after. Verdicts are corrected (Holm) for the number of methods and endpoints. Do not "
    "apply: mean, worst position, the position that was best, ordinary text or a short form of the task is harmed. "
    "Otherwise, if mean or worst position rises: apply, if position matters less than before; evens out, if the "
    "position that was best pays for that; raises, if it is not established that position matters less. Established "
    "changes below what matters are reported but decide nothing. Otherwise nothing is established, which does not mean "
    "that there is no effect."
)
FORM = (
    "The log-probability of right answers also rises if answers merely take the form that is scored; "
    "generated answers (--by accuracy) tell the two apart."
)
ENDPOINTS = {
    "mean": "mean",
    "worst position": "worst position",
    "spread": "spread, best minus worst",
    "formerly best position": "position that was best",
}


@REPORTS.register("mitigate")
def mitigation_report(trial: MitigationTrial) -> Report:
    """The method to apply, if any, and why."""
    record, judgement = trial.record, trial.judgement
    n_samples = max(verdict.n_samples for verdict in judgement.verdicts)
    required = [] if trial.requirement is None else [requirement_text(trial.requirement)]
    return Report(
        record.title,
        kicker="posbias · methods against position bias, judged",
        notices=sample_notices(record),
        verdict=[*recommendation(judgement), *required],
        basis=f"{n_samples} samples that no fit used",
        caveats=[
            *caveats_of(record),
            *warnings(trial.choice, trial.arms),
            *([FORM] if judgement.measure == "logprob" else []),
        ],
        summary=[_position_table(trial), _verdict_table(trial)],
        picture=_figures(trial),
        note=NOTE,
        folded={
            "Why each verdict": [_reason_table(trial)],
            "Every number": [_change_table(trial), _effect_table(trial)],
            **_ending_table(trial),
            **_use(trial),
        },
        left_out=list(trial.left_out),
        record=record,
    )


def _position_table(trial: MitigationTrial) -> Table:
    """The measure that decided at every position, before and after: what the picture draws."""
    judgement = trial.judgement
    curves = {"unchanged": judgement.before, **{verdict.name: verdict.means for verdict in judgement.verdicts}}
    cells = [[name, *(mean.text(".2f") for mean in means)] for name, means in curves.items() if len(means)]
    places = [f"position {position}" for position in judgement.positions]
    return Table(f"{label(MEASURES, judgement.measure)} by position of the answer", ["method", *places], cells)


def _verdict_table(trial: MitigationTrial) -> Table:
    """Model x method: the changes, and the verdict that follows."""
    judgement = trial.judgement
    header = [
        "model",
        "method",
        "verdict",
        f"mean, change [95 %] of {label(MEASURES, judgement.measure)}",
        "worst position, change",
        "best minus worst, change",
        "ordinary text",
        "seconds per request",
    ]
    # Levels of the unchanged model, on the samples of the first method that has enough.
    before = next((verdict.before for verdict in judgement.verdicts if verdict.before is not None), None)
    levels = [MISSING] * 3 if before is None else [str(before.mean), str(before.worst), str(before.spread)]
    rows = [[trial.model, "unchanged", MISSING, *levels, MISSING, seconds_each(trial.arms[0])]]
    for number, verdict in enumerate(judgement.verdicts, start=1):
        changes = [_changed(verdict.changes.get(name)) for name in (MEAN, WORST, SPREAD)]
        text = text_change(verdict, trial.arms[number])
        rows.append([trial.model, verdict.name, words(verdict), *changes, text, seconds_each(trial.arms[number])])
    return Table(f"{trial.task}: what each method does", header, rows)


def _changed(change: Change | None) -> str:
    """A change in as many decimals as tell it from none."""
    return MISSING if change is None else change_text(change.value, "+")


def _use(trial: MitigationTrial) -> dict[str, list[Table]]:
    """How the recommended method is put on a model of transformers, or how it changes prompts."""
    arm = trial.recommended
    kind = "" if arm is None else arm.method.partition("(")[0]
    if arm is None or kind not in MITIGATIONS:
        return {}
    method = MITIGATIONS[kind]
    if not issubclass(method, Mitigation):
        summary = " ".join((getdoc(method) or "").partition("\n\n")[0].split())
        return {"Use it in your prompts": [Table(arm.method, ["What is asked"], [[summary]], prose=True)]}
    by_passages = arm.needs_passages or method.needs_passages is True
    by_question = by_passages and trial.question is not None and method.needs_question
    snippet = PASSAGES_SNIPPET if by_passages and not by_question else SNIPPET
    addition = QUESTION_ADDITION.format(question=trial.question) if by_question else ""
    fitted = arm.fitted is not None
    recipe = f"{arm.directory}/recipe.json" if fitted else arm.recipe or arm.name
    lines = [[line] for line in snippet.format(recipe=recipe, addition=addition).splitlines()]
    title = f"{arm.name} on a model of transformers{', from the directory of this run' if fitted else ''}"
    exported = f"{arm.name} in other programs{'' if arm.recipe else ', from the directory of this run'}"
    served = _export_commands(trial, arm.method, arm.recipe or ".")
    return {
        "Use it with transformers": [Table(title, ["Python"], lines)],
        **({"Serve it": [Table(exported, ["Shell"], [[line] for line in served])]} if served else {}),
    }


def _export_commands(trial: MitigationTrial, spelling: str, source: str) -> list[str]:
    """Commands that write a method for other programs and serve it there; none for a method that cannot leave, or whose
    spelling is cut off."""
    try:
        method = MITIGATIONS.parse(spelling)
    except UsageError:
        return []
    if not isinstance(method, Adapter):
        return []
    export = f"posbias export {shlex.quote(source)}"
    merged = [f"{export} --to merged --merged", *merged_commands("merged")]
    beside = [
        *adapter_commands(trial.model, "adapter", method.rank),
        *gguf_commands(trial.model, "adapter"),
    ]
    return [f"{export} --to adapter --gguf", *beside, *merged]


def _reason_table(trial: MitigationTrial) -> Table:
    judgement = trial.judgement
    cells = [[verdict.name, words(verdict), " ".join(reasons(verdict, judgement))] for verdict in judgement.verdicts]
    return Table("Verdicts", ["method", "verdict", "why"], cells, prose=True)


def _change_table(trial: MitigationTrial) -> Table:
    header = ["method", "endpoint", "change [95 %]", "p", "p of a rise, corrected", "p of a fall, corrected"]
    header += ["p of rare losses, corrected", "samples"]
    cells = [
        [
            verdict.name,
            name,
            _changed(change),
            f"{change.p:.2g}",
            *(
                f"{family[key]:.2g}" if key in family else MISSING
                for family in (verdict.gains, verdict.harms, verdict.unseen)
            ),
            str(verdict.n_samples),
        ]
        for verdict in trial.judgement.verdicts
        for key, name in ENDPOINTS.items()
        if (change := verdict.changes.get(key)) is not None
    ]
    return Table("Changes against the unchanged model, paired over samples", header, cells)


def _effect_table(trial: MitigationTrial) -> Table:
    header = ["method", "side effect", "change [95 %]", "unit", "accepted", "units", "p of harm, corrected"]
    cells = [
        [
            verdict.name,
            name,
            change_text(effect.value, "+", least=4),
            measure_words(effect.unit),
            f"{effect.tolerance:g}",
            str(effect.n_units),
            f"{verdict.harms[name]:.2g}" if name in verdict.harms else MISSING,
        ]
        for verdict in trial.judgement.verdicts
        for name, effect in verdict.effects.items()
    ]
    return Table("Side effects", header, cells)


def _ending_table(trial: MitigationTrial) -> dict[str, list[Table]]:
    """Generated answers that are right, that begin with the right one, and that cannot be judged."""
    readings = {arm.name: arm.reading for arm in trial.arms if arm.reading and arm.reading.answers}
    reasons = [reason for reason in UNJUDGED if any(reason in reading.unjudged for reading in readings.values())]
    header = ["method", "answers", "right", "begin with the right one", *(UNJUDGED[reason] for reason in reasons)]
    cells = [
        [
            name,
            str(reading.answers),
            *(number_text(None if np.isnan(share) else share) for share in (reading.right, reading.starts)),
            *(str(reading.unjudged.get(reason, 0)) for reason in reasons),
        ]
        for name, reading in readings.items()
    ]
    return {"How answers ended": [Table("Generated answers by method", header, cells)]} if cells else {}


def _figures(trial: MitigationTrial) -> list[Figure]:
    """The measure that decided, before and after; the recommended method first, then by worst position."""
    judgement = trial.judgement
    if judgement.measure not in trial.curves:
        return []
    ranked = sorted(
        judgement.verdicts, key=lambda verdict: (verdict.name != judgement.recommended, -_worst(verdict.means))
    )
    first = ranked[:MOST_DRAWN]
    strokes, positions = run_strokes([verdict.name for verdict in first]), list(judgement.positions)
    lines: list[Curve] = list(interval_curves("unchanged", positions, judgement.before, MEASURED))
    for verdict in first:
        lines += interval_curves(verdict.name, positions, verdict.means, strokes[verdict.name])
    n_left = len(ranked) - len(first)
    omitted = f" ({n_left} methods with lower worst positions are not drawn)" if n_left else ""
    measure = label(MEASURES, judgement.measure)
    return [
        Figure(
            "before-and-after",
            f"{trial.task}: {measure} by position, without and with each method{omitted}",
            f"position of the answer among {trial.n_items} (0 is the first)",
            measure,
            tuple(lines),
            markers=True,
        )
    ]


def _worst(means: Sequence[Interval]) -> float:
    return min((mean.value for mean in means if np.isfinite(mean.value)), default=float("-inf"))
