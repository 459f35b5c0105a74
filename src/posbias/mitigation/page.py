"""Methods against position bias, judged: the recommendation first, one table, curves before and after, the rest folded.

Everything comes from the typed result (`posbias.mitigation.MitigationTrial`).
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from inspect import getdoc

import numpy as np

from posbias.evaluation.curve import change_text
from posbias.evaluation.evaluation import MEASURES
from posbias.evaluation.finished_page import axis_of, notice_sentences
from posbias.evaluation.levels import (
    ALPHA,
    FORMERLY_BEST,
    JUDGED,
    MEAN,
    SPREAD,
    UNCHANGED,
    WORST,
)
from posbias.evaluation.page import measure_words, requirement_text
from posbias.mitigation.judging import (
    APPLY,
    CEILING,
    EVENS,
    GAINS,
    GREW,
    HARM,
    NOTHING,
    OPEN,
    RAISES,
    SHRANK,
    SMALL,
    STEADY,
    WITHHELD,
    Judgement,
    MeasureChoice,
    Verdict,
)
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation
from posbias.mitigation.result import ORDINARY_TEXT, ArmResult, MitigationTrial
from posbias.results.figures import MEASURED, Curve, Figure
from posbias.results.naming import label
from posbias.results.page import Report
from posbias.results.tables import Table, capital, number_text
from posbias.statistics import MISSING, POWER

MOST_DRAWN = 6
"""Methods drawn beside the unchanged model: the recommended one and those after it by their worst position."""
NOTE = (
    "Every method answers the same test samples at the same positions as the unchanged model; no fit saw them. Changes "
    "are paired over samples, with 95 % intervals. Verdicts are corrected (Holm) for the number of methods and "
    "endpoints. Do not apply: mean, worst position, the position that was best, ordinary text or a short form of the "
    "task is harmed. Otherwise, if mean or worst position rises: apply, if position matters less than before; evens "
    "out, if the position that was best pays for that; raises, if it is not established that position matters less. "
    "That nothing is established does not mean that there is no effect."
)
FORM = (
    "The log-probability of right answers also rises if answers merely take the form that is scored; "
    "generated answers (--by accuracy) tell the two apart."
)


def mitigation_report(trial: MitigationTrial) -> Report:
    """The method to apply, if any, and why."""
    resolved, judgement = trial.record.resolved, trial.judgement
    n_samples = max(verdict.n_samples for verdict in judgement.verdicts)
    whys = [
        {"method": verdict.name, "verdict": words(verdict), "why": " ".join(reasons(verdict, judgement))}
        for verdict in judgement.verdicts
    ]
    # The measure that decided at every position, before and after: what the picture draws.
    curves = {"unchanged": judgement.before, **{verdict.name: verdict.means for verdict in judgement.verdicts}}
    means = [[name, *(mean.text(".2f") for mean in of_arm)] for name, of_arm in curves.items() if len(of_arm)]
    header = ["method", *(f"position {place}" for place in judgement.positions)]
    by_position = Table(f"{label(MEASURES, judgement.measure)} by position of the answer", header, means)
    required = [] if trial.requirement is None else [requirement_text(trial.requirement)]
    here = (resolved.get("responder") or {}).get("kind") == "local"
    return Report(
        kicker="posbias · methods against position bias, judged",
        notices=notice_sentences(trial.notices, count=resolved.get("count"), here=here),
        verdict=[*recommendation(judgement), *required],
        basis=f"{n_samples} samples that no fit used.",
        caveats=[*warnings(trial.choice, trial.arms), *([FORM] if judgement.measure == "logprob" else [])],
        summary=[by_position, _verdict_table(trial)],
        picture=_figures(trial),
        note=NOTE,
        folded={
            "Why each verdict": [Table.of("Verdicts", whys, prose=True)],
            "Every number": [_number_table(trial)],
            **_use(trial),
        },
        left_out=list(trial.left_out),
    )


def _verdict_table(trial: MitigationTrial) -> Table:
    """The changes that each method makes, and the verdict that follows."""
    judgement = trial.judgement
    # Levels of the unchanged model, on the samples of the first method that has enough.
    before = next((verdict.before for verdict in judgement.verdicts if verdict.before is not None), None)
    levels = [MISSING] * 3 if before is None else [str(before.mean), str(before.worst), str(before.spread)]
    rows = [["unchanged", MISSING, *levels, MISSING, seconds_each(trial.arms[0])]]
    for verdict, arm in zip(judgement.verdicts, trial.arms[1:], strict=True):
        changes = [str(verdict.changes[name]) if verdict.changes else MISSING for name in (MEAN, WORST, SPREAD)]
        rows.append([verdict.name, words(verdict), *changes, text_change(verdict, arm), seconds_each(arm)])
    of = f"mean, change [95 %] of {label(MEASURES, judgement.measure)}"
    header = ["method", "verdict", of, "worst position, change", "best minus worst, change"]
    header += ["ordinary text", "seconds per request"]
    return Table(f"{trial.model}, {trial.task}: what each method does", header, rows)


def _use(trial: MitigationTrial) -> dict[str, list[Table]]:
    """How the recommended method is put on a model of transformers and leaves for others, or how it changes prompts."""
    arm = trial.recommended
    kind = "" if arm is None else arm.method.partition("(")[0]
    if arm is None or kind not in MITIGATIONS:
        return {}
    method = MITIGATIONS[kind]
    if not issubclass(method, Mitigation):
        summary = " ".join((getdoc(method) or "").partition("\n\n")[0].split())
        return {"Use it": [Table(arm.method, ["What is asked"], [[summary]], prose=True)]}
    recipe = f"{arm.directory}/recipe.json" if arm.fitted is not None else arm.recipe or arm.name
    lines = [f"pb.mitigated(model, {recipe!r}).install()  # a model of transformers, until it is removed"]
    if arm.needs_passages or method.needs_passages is True:  # the texts PASSAGES stand in PROMPT, in this order
        placed = "passages=PASSAGES, prompt=PROMPT, tokenizer=tokenizer"
        lines = [f"with pb.mitigated(model, {recipe!r}, {placed}):  # generate"]
    if kind == Adapter.name:
        export = f"posbias export {shlex.quote(arm.recipe or '.')} --to"
        whole = [f"{export} merged --merged  # a whole model, for all others"]
        lines += [
            f"{export} adapter --gguf  # in a shell: for {'PEFT' if arm.needs_passages else 'vLLM, PEFT'}, llama.cpp"
        ]
        lines += [] if arm.needs_passages else whole  # a weight acts on all tokens
    here = ", from the directory of this run" if arm.fitted is not None else ""
    return {"Use it": [Table(f"{arm.name} in Python{here} (docs/mitigate.md)", ["Lines"], [[line] for line in lines])]}


def _number_table(trial: MitigationTrial) -> Table:
    """Every endpoint and side effect of every method, with its p-values."""
    header = ["method", "endpoint or side effect", "change [95 %]", "p", "p of a rise, corrected"]
    header += ["p of harm, corrected", "p of rare losses, corrected", "units", "accepted"]
    cells = []
    for verdict in trial.judgement.verdicts:
        rows = {name: (str(c), c.p, verdict.n_samples, "") for name, c in verdict.changes.items()}
        for name, effect in verdict.effects.items():
            change = change_text(effect.value, least=4, unit=f" {measure_words(effect.unit)}")
            rows[name] = change, effect.p, effect.n_units, f"{effect.tolerance:g}"
        for name, (change, p, units, accepted) in rows.items():
            families = (verdict.gains, verdict.harms, verdict.unseen)
            corrected = [f"{family[name]:.2g}" if name in family else MISSING for family in families]
            cells.append([verdict.name, name, change, f"{p:.2g}", *corrected, str(units), accepted])
    return Table("Changes against the unchanged model, paired over samples", header, cells)


def _figures(trial: MitigationTrial) -> list[Figure]:
    """The measure that decided, before and after; the recommended method first, then by worst position."""
    judgement = trial.judgement
    if judgement.measure not in trial.curves:
        return []

    def rank(verdict: Verdict) -> tuple[bool, float]:
        worst = min((mean.value for mean in verdict.means if np.isfinite(mean.value)), default=-np.inf)
        return verdict.name != judgement.recommended, -worst

    ranked, measure = sorted(judgement.verdicts, key=rank), label(MEASURES, judgement.measure)
    means = {"unchanged": judgement.before, **{verdict.name: verdict.means for verdict in ranked[:MOST_DRAWN]}}
    before, *after = (Curve.of_intervals(name, judgement.positions, of_arm) for name, of_arm in means.items())
    lines = (replace(before, stroke=MEASURED), *after)
    n_left = len(ranked) - MOST_DRAWN
    omitted = f" ({n_left} methods with lower worst positions are not drawn)" if n_left > 0 else ""
    title = f"{trial.task}: {measure} by position, without and with each method{omitted}"
    return [Figure("before-and-after", title, axis_of(trial.n_items), measure, lines, markers=True)]


def recommendation(judgement: Judgement) -> list[str]:
    """The recommended method and its effect, or why the model should stay as it is, line by line."""
    verdicts, measure = judgement.verdicts, measure_words(judgement.measure)
    by_verdict: dict[str, list[str]] = {}
    for verdict in verdicts:
        by_verdict.setdefault(verdict.verdict, []).append(verdict.name)
    harmful, withheld = by_verdict.get(HARM, []), by_verdict.get(WITHHELD, [])
    warned = [f"Do not apply {', '.join(harmful)}: harm is established."] if harmful else []
    gaining = [verdict for verdict in verdicts if verdict.verdict in GAINS]
    best = next((verdict for verdict in gaining if verdict.name == judgement.recommended), None)
    if best is None and len(withheld) == len(verdicts):
        why = [f"{capital(verdicts[0].withheld)}."] if verdicts[0].withheld else []
        return [f"No verdict by answers for any method ({verdicts[0].name}).", *why]
    warned += [f"No verdict by answers is possible for {', '.join(withheld)}."] if withheld else []
    if best is not None:
        others = [verdict.name for verdict in gaining if verdict is not best]
        also = f"{', '.join(others)} also gain{'' if len(others) > 1 else 's'}; which is best was not tested."
        return [*_gain_lines(best, measure), *([also] if others else []), *warned]
    if len(harmful) == len(verdicts):
        return ["Leave the model as it is.", *warned]
    enough = f" by at least {judgement.smallest:g}" if SMALL in by_verdict else ""
    lines = [f"Leave the model as it is: no method is shown to raise {measure}{enough}."]
    if undecided := [verdict for verdict in verdicts if verdict.verdict == NOTHING and verdict.changes]:
        rising = [verdict.name for verdict in undecided if verdict.established(judgement.smallest).unsure]
        lines += [f"{', '.join(rising)}: a gain in these samples, too few to exclude rare losses."] if rising else []
        lines += _needed(max(undecided, key=lambda verdict: (verdict.changes[MEAN].needed or (0, 0))[1]))
    return [*lines, *warned]


def _gain_lines(best: Verdict, measure: str) -> list[str]:
    """The verdict on the recommended method, both levels, its price, other harm, and the dependence on position."""
    assert best.before is not None
    assert best.after is not None
    lines = [
        {
            APPLY: f"Apply {best.name}.",
            EVENS: f"{best.name} evens scores out.",
            RAISES: f"{best.name} raises scores at {'some' if best.lowered else 'all'} positions; {_fate(best)}.",
        }[best.verdict]
    ]
    for endpoint, before, after, lead in (
        (MEAN, best.before.mean, best.after.mean, f"On average over positions, {measure} goes"),
        (WORST, best.before.worst, best.after.worst, "At the worst position it goes"),
    ):
        p = max(best.gains.get(endpoint, 1.0), best.unseen.get(endpoint, 0.0))
        alone = "" if p < ALPHA else ", not established by itself"
        change = change_text(best.changes[endpoint].value, least=2)
        lines.append(f"{lead} from {before.value:z.2f} to {after.value:z.2f} ({change}{alone}).")
    price = [FORMERLY_BEST] if best.verdict == EVENS else []
    if price:
        fall = change_text(best.changes[FORMERLY_BEST].value, least=2)
        lines.append(
            f"The best position, {best.formerly_best}, pays ({fall}). Apply it where answers may stand anywhere."
        )
    small = any(p < ALPHA for name, p in best.harms.items() if name not in price)
    harm = f"No {'other ' if price else ''}harm {'that matters ' if small else ''}is established"
    besides = [name for name in best.effects if name in best.harms]
    scope = f" here or for {' and '.join(besides)}" if besides else ", but only this task was judged"
    return [*lines, f"{harm}{scope}.", *_dependence(best)]


def _needed(verdict: Verdict, among: str = "") -> list[str]:
    """The number of samples that would decide about the mean, in questions; nothing if it is not known."""
    needed = verdict.changes[MEAN].needed
    if needed is None:
        return []
    rise, samples = needed
    unit = 10 ** max(0, len(str(samples)) - 2)
    samples, places = -(-samples // unit) * unit, len(verdict.means)
    questions = f"{samples * places:,} questions" + (f", each at {places} positions" if places > 1 else "")
    return [f"About {samples:,} samples ({questions}) would decide whether the mean rises by {rise:.2f}{among}."]


def words(verdict: Verdict) -> str:
    """The verdict as a table has it: with the price of evening out, and with what position does after a rise."""
    if verdict.verdict == EVENS:
        return f"{EVENS}: the best position loses {-verdict.changes[FORMERLY_BEST].value.value:.2f}"
    if verdict.verdict == RAISES:
        return f"{RAISES} {'some' if verdict.lowered else 'all'}, {_fate(verdict)}"
    return verdict.verdict


def _fate(verdict: Verdict) -> str:
    """What position does after a rise."""
    fates = {GREW: "position matters more", STEADY: "position matters as before"}
    return fates.get(verdict.dependence, "whether position matters less is not decided")


def reasons(verdict: Verdict, judgement: Judgement) -> list[str]:
    """Everything that decided about a method: changes by what is established of them, each with its interval."""
    if verdict.changes and all(change == UNCHANGED for change in verdict.changes.values()):
        return [f"It changes no score of these {verdict.n_samples} samples at all."]
    harms, gains, price, negligible, unsure = verdict.established(judgement.smallest)
    told = {*harms, *gains, *price, *negligible, *unsure}
    undecided = [] if verdict.withheld else [name for name in verdict.changes if name in JUDGED and name not in told]
    by_lead = {
        "Harm": harms,
        "Gain": gains,
        "Price": price,
        "Only in these samples, too few to exclude rare losses": unsure,
        f"Established but negligible (below {judgement.smallest:g})": negligible,
        "Not established": undecided,
    }
    sentences = [f"{capital(verdict.withheld)}."] if verdict.withheld else []
    sentences += [f"{lead}: {_changes(verdict, names)}." for lead, names in by_lead.items() if names]
    if MEAN in undecided or MEAN in unsure:
        sentences += _needed(verdict, f" ({100 * POWER:.0f} % power, {judgement.tests} tests)")
    sentences += _dependence(verdict)
    if verdict.lost:
        sentences.append(f"{verdict.lost} samples lack a score at some position with the method and are left out.")
    sentences += [
        f"Not judged: {name}, of which there are {effect.n_units} units; a verdict needs {effect.units_needed}."
        for name, effect in verdict.effects.items()
        if effect.n_units < effect.units_needed
    ]
    if not verdict.changes:
        sentences.append(
            f"Only {verdict.n_samples} samples have a score at every position before and after; a verdict by "
            f"{measure_words(judgement.measure)} needs {verdict.samples_needed}."
        )
    return sentences


def _changes(verdict: Verdict, names: Sequence[str]) -> str:
    """Changes with their intervals; a side effect beside what is accepted."""
    texts = []
    for name in names:
        if (effect := verdict.effects.get(name)) is not None:
            beyond = f" (accepted: {effect.tolerance:g})" if effect.tolerance else ""
            unit = f" {measure_words(effect.unit)}" if effect.unit else ""
            texts.append(f"{name} {change_text(effect.value, unit=unit)}{beyond}")
        else:
            place = f" ({verdict.formerly_best})" if name == FORMERLY_BEST else ""
            texts.append(f"{name}{place} {verdict.changes[name]}")
    return "; ".join(texts)


def _dependence(verdict: Verdict) -> list[str]:
    """The fate of the dependence on position, with the spread before and after; nothing if it was not asked for."""
    if not verdict.dependence or verdict.before is None or verdict.after is None:
        return []
    fate = {
        SHRANK: "The dependence on position shrank",
        GREW: "The dependence on position grew",
        STEADY: "The dependence on position is as before",
        OPEN: "Whether the dependence on position shrank or grew is not decided",
    }[verdict.dependence]
    if verdict.dependence == OPEN and verdict.changes[SPREAD].value.excludes(0.0):
        fate = "Corrected for several methods, it is not decided whether position matters less"
    before, after = (levels.spread.value for levels in (verdict.before, verdict.after))
    change = change_text(verdict.changes[SPREAD].value, least=2)
    return [f"{fate}: best minus worst position goes from {before:.2f} to {after:.2f} ({change})."]


def warnings(choice: MeasureChoice, arms: Sequence[ArmResult]) -> list[str]:
    """What the verdicts do not say: the choice of measure, unjudged answers."""
    lines = []
    instead = f"methods are judged by {measure_words(choice.measure)} instead"
    if choice.undecided:
        lines.append(f"No verdict by answers: {choice.undecided}; {instead}")
    if choice.level is not None:
        side = "ceiling" if choice.level > CEILING else "floor"
        hint = instead if choice.measure != "accuracy" else "score the answers, or take an easier or harder task"
        lead = f"accuracy is near its {side}: {choice.level:.3f} on average without a method, where little shows"
        lines.append(f"{lead}; {hint}")
    return lines + [f"{arm.name}: {arm.reading.withheld}" for arm in arms if arm.reading.withheld]


def text_change(verdict: Verdict, arm: ArmResult) -> str:
    """The change of the loss on ordinary text, or why there is none."""
    effect = verdict.effects.get(ORDINARY_TEXT)
    if effect is None:
        return arm.text_reason or MISSING
    return change_text(effect.value, least=4, unit=" nats")


def seconds_each(arm: ArmResult) -> str:
    """Seconds of one request."""
    return number_text(arm.effort.seconds / arm.effort.requests if arm.effort.requests else None)
