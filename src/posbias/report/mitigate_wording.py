"""Verdicts of a trial in words, from its facts: the recommendation, line by line, and the reasons for each verdict."""

from collections.abc import Sequence

import numpy as np

from posbias.evaluation.changes import (
    FORMERLY_BEST,
    JUDGED,
    MEAN,
    SPREAD,
    UNCHANGED,
    WORST,
    Change,
    change_text,
)
from posbias.evaluation.requirements import ALPHA
from posbias.mitigation.judging.judge import CEILING, Judgement, MeasureChoice
from posbias.mitigation.judging.verdicts import (
    APPLY,
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
    Verdict,
)
from posbias.mitigation.trial.result import ORDINARY_TEXT, ArmResult
from posbias.report.evaluate import measure_words
from posbias.report.tables import number_text
from posbias.statistics import MISSING, POWER, Interval

MOST_NAMED = 12
"""Methods that one line of the recommendation names; more of them are counted, and the table names all."""


def recommendation(judgement: Judgement) -> list[str]:
    """The recommended method and its effect, or why the model should stay as it is, line by line."""
    verdicts, measure = judgement.verdicts, measure_words(judgement.measure)
    gaining = [verdict for verdict in verdicts if verdict.verdict in GAINS and verdict.after is not None]
    harmful = [verdict.name for verdict in verdicts if verdict.verdict == HARM]
    withheld = [verdict.name for verdict in verdicts if verdict.verdict == WITHHELD]
    warned = [f"Do not apply {_names(harmful)}: harm is established."] if harmful else []
    warned += [f"No verdict by answers is possible for {_names(withheld)}."] if withheld else []
    best = next((verdict for verdict in gaining if verdict.name == judgement.recommended), None)
    if best is not None:
        gainers = [verdict.name for verdict in gaining if verdict is not best]
        also = f"{_names(gainers)} also {'gain' if len(gainers) > 1 else 'gains'}; which method is best was not tested."
        return [*_gain_lines(best, measure), *([also] if gainers else []), *warned]
    if len(harmful) == len(verdicts):
        return ["Leave the model as it is.", *warned]
    first = verdicts[0]
    if len(withheld) == len(verdicts) and first.withheld:
        return [f"No verdict by answers for any method ({first.name}).", f"{_capital(first.withheld)}."]
    enough = f" by at least {judgement.smallest:g}" if any(v.verdict == SMALL for v in verdicts) else ""
    lead = f"Leave the model as it is: no method is shown to raise {measure}{enough}."
    return [lead, *_undecided_lines(verdicts, judgement.smallest), *warned]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} methods, {names[0]} among them"


def _gain_lines(best: Verdict, measure: str) -> list[str]:
    """The verdict on the recommended method, both levels, its price, other harm, and the dependence on position."""
    assert best.before is not None
    assert best.after is not None
    effects = {
        APPLY: f"Apply {best.name}.",
        EVENS: f"{best.name} evens scores out.",
        RAISES: f"{best.name} raises scores at {'some' if best.lowered else 'all'} positions; {_fate(best)}.",
    }
    lines = [effects[best.verdict]]
    for endpoint, name, lead in (
        (MEAN, "mean", f"On average over positions, {measure} goes"),
        (WORST, "worst", "At the worst position it goes"),
    ):
        before, after = (getattr(levels, name).value for levels in (best.before, best.after))
        p = max(best.gains.get(endpoint, 1.0), best.unseen.get(endpoint, 0.0))
        alone = "" if p < ALPHA else ", not established by itself"
        change = change_text(best.changes[endpoint].value, "+", least=2)
        lines.append(f"{lead} from {before:z.2f} to {after:z.2f} ({change}{alone}).")
    price = [FORMERLY_BEST] if best.verdict == EVENS else []
    harm = "harm that matters" if any(p < ALPHA for name, p in best.harms.items() if name not in price) else "harm"
    if price:
        lines.append(
            f"The best position, {best.formerly_best}, loses {_loss(best.changes[FORMERLY_BEST])}. "
            "Apply it where answers may stand anywhere."
        )
    besides = [name for name in best.effects if name in best.harms]
    scope = f"here or for {' and '.join(besides)}" if besides else "but only this task was judged"
    lines.append(f"No {'other ' if price else ''}{harm} is established{' ' if besides else ', '}{scope}.")
    return [*lines, f"{_capital(dependence_text(best))}."] if best.dependence else lines


def _undecided_lines(verdicts: Sequence[Verdict], smallest: float) -> list[str]:
    """The methods that gain in the samples alone, and how many samples would decide about all that are undecided."""
    undecided = [verdict for verdict in verdicts if verdict.verdict == NOTHING and verdict.changes]
    if not undecided:
        return []
    rising = [verdict.name for verdict in undecided if verdict.established(smallest).unsure]
    lines = [f"{_names(rising)}: a gain in these samples, too few to exclude rare losses."] if rising else []
    needed = _needed_text(max(undecided, key=lambda verdict: (verdict.changes[MEAN].needed or (0, 0))[1]))
    return [*lines, f"{_capital(needed)}."] if needed else lines


def _needed_text(verdict: Verdict) -> str:
    """The number of samples that would decide about the mean, in questions; empty if it is not known."""
    needed = verdict.changes[MEAN].needed
    if needed is None:
        return ""
    rise, samples = needed
    unit = 10 ** max(0, len(str(samples)) - 2)
    samples, places = -(-samples // unit) * unit, len(verdict.means)
    at = f", each at {places} positions" if places > 1 else ""
    questions = f"{samples * places:,} questions{at}"
    return f"about {samples:,} samples ({questions}) would decide whether the mean rises by {rise:.2f}"


def words(verdict: Verdict) -> str:
    """The verdict as a table has it: with the price of evening out, and with what position does after a rise."""
    if verdict.verdict == EVENS:
        lost = Interval(-verdict.changes[FORMERLY_BEST].value.value, -np.inf, np.inf)
        return f"{EVENS}: the best position loses {change_text(lost, least=2)}"
    if verdict.verdict == RAISES:
        return f"{RAISES} {'some' if verdict.lowered else 'all'}, {_fate(verdict)}"
    return verdict.verdict


def _fate(verdict: Verdict) -> str:
    """What position does after a rise."""
    fates = {GREW: "position matters more", STEADY: "position matters as before"}
    return fates.get(verdict.dependence, "whether position matters less is not decided")


def reasons(verdict: Verdict, judgement: Judgement) -> list[str]:
    """Everything that decided about a method, in whole sentences, every number with its interval."""
    smallest = judgement.smallest
    if verdict.changes and all(change == UNCHANGED for change in verdict.changes.values()):
        return [f"It changes no score of these {verdict.n_samples} samples at all."]
    harms, gains, price, negligible, unsure = verdict.established(smallest)
    sentences = [f"{_capital(verdict.withheld)}."] if verdict.withheld else []
    for lead, names in (("Harm", harms), ("Gain", gains), ("Price", price)):
        sentences += [f"{lead}: {_change_sentence(verdict, name)}" for name in names]
    if harms or gains or verdict.withheld:
        sentences += [f"Only in these samples: {_change_sentence(verdict, name)}" for name in unsure]
    below = f"Established but negligible (below {smallest:g})"
    sentences += [f"{below}: {_change_sentence(verdict, name)}" for name in negligible]
    sentences += [f"{_capital(dependence_text(verdict))}."] if verdict.dependence else []
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
    elif not (gains or harms or price or verdict.withheld):
        undecided = [name for name in JUDGED if name not in negligible]
        if undecided:
            sentences.insert(0, _undecided_sentence(verdict, undecided, judgement))
    return sentences


def dependence_text(verdict: Verdict) -> str:
    """The fate of the dependence on position, with the spread before and after; empty if it was not asked for."""
    if not verdict.dependence or verdict.before is None or verdict.after is None:
        return ""
    fate = {
        SHRANK: "the dependence on position shrank",
        GREW: "the dependence on position grew",
        STEADY: "the dependence on position is as before",
        OPEN: "whether the dependence on position shrank or grew is not decided",
    }[verdict.dependence]
    if verdict.dependence == OPEN and verdict.changes[SPREAD].value.excludes(0.0):
        fate = "corrected for several methods, it is not decided whether position matters less"
    before, after = (levels.spread.value for levels in (verdict.before, verdict.after))
    change = change_text(verdict.changes[SPREAD].value, "+", least=2)
    return f"{fate}: best minus worst position goes from {before:.2f} to {after:.2f} ({change})"


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
    return lines + [f"{arm.name}: {arm.reading.withheld}" for arm in arms if arm.reading and arm.reading.withheld]


def text_change(verdict: Verdict, arm: ArmResult) -> str:
    """The change of the loss on ordinary text, or why there is none."""
    effect = verdict.effects.get(ORDINARY_TEXT)
    if effect is None:
        return arm.text_reason or MISSING
    return change_text(effect.value, "+", least=4, unit=" nats")


def seconds_each(arm: ArmResult) -> str:
    """Seconds of one request."""
    return number_text(arm.effort.seconds / arm.effort.requests if arm.effort.requests else None)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _loss(change: Change) -> str:
    """A fall as a positive size."""
    value = change.value
    return change_text(Interval(-value.value, -value.high, -value.low), least=2)


def _change_sentence(verdict: Verdict, name: str) -> str:
    """An established change as a size in its own direction; a side effect beside what is accepted."""
    effect = verdict.effects.get(name)
    if effect is not None:
        unit = f" {measure_words(effect.unit)}" if effect.unit else ""
        beyond = f", beyond the {effect.tolerance:g} that are accepted" if effect.tolerance else ""
        return f"{name} changes by {change_text(effect.value, '+')}{unit}{beyond}."
    value = verdict.changes[name].value
    place = f"{name} ({verdict.formerly_best})" if name == FORMERLY_BEST else name
    if value.value > 0:
        return f"{place} rises by {change_text(value)}."
    return f"{place} falls by {change_text(Interval(-value.value, -value.high, -value.low))}."


def _undecided_sentence(verdict: Verdict, names: Sequence[str], judgement: Judgement) -> str:
    """Changes that are not established, and how many samples would decide."""
    unsure = verdict.established(judgement.smallest).unsure
    text = "".join(
        f"In these samples the {_change_sentence(verdict, name)[:-1]}; {verdict.n_samples} samples are too few to "
        "exclude rare losses that would undo it. "
        for name in unsure
    )
    sizes = "; ".join(f"{name} {change_text(verdict.changes[name].value, '+')}" for name in names if name not in unsure)
    if sizes:
        further = "other " if len(names) < len(JUDGED) or unsure else ""
        text += f"No {further}change of {measure_words(judgement.measure)} is established: {sizes}. "
    needed = _needed_text(verdict) if MEAN in names else ""
    return f"{text}{_capital(needed)} ({100 * POWER:.0f} % power, {judgement.tests} tests)." if needed else text.strip()
