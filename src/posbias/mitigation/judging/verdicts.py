"""What follows for a method from what was tested of it, and the sentences that say so (docs/mitigate.md).

`judging.py` tests; here stand the rule, `settle`, and the words. Verdicts, in the order in which they are decided:

- `do not apply`: harm is established of the mean, the worst position, ordinary text or a short form; or of the position
  that was best, unless that is the price of a gain with which the dependence on position is established to shrink.
- `evens out`: such a gain, with its price.
- `apply`: mean or worst position rises, no harm is established, and the dependence on position shrinks.
- `raises`: mean or worst position rises, no harm is established, and position matters more, or as before, or it is not
  decided whether it matters less.
- `established but negligible`: only changes below what matters.
- `no effect established`: otherwise, with the samples that would decide it.
- `no verdict by answers`: they ended in different ways, or too many were cut off.

The dependence on position is the spread, best minus worst position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from posbias.evaluation.curve import SAMPLES_FOR_CLAIM
from posbias.mitigation.judging.endpoints import (
    ALPHA,
    FORMERLY_BEST,
    JUDGED,
    MEAN,
    SPREAD,
    UNCHANGED,
    WORST,
    Change,
    change_text,
)
from posbias.statistics import POWER, Interval, holm

APPLY, EVENS, RAISES, HARM = "apply", "evens out", "raises", "do not apply"
SMALL, NOTHING, WITHHELD = "established but negligible", "no effect established", "no verdict by answers"
GAINS = (APPLY, EVENS, RAISES)
"""Verdicts of methods that may be recommended."""
SHRANK, GREW, STEADY, OPEN = "shrank", "grew", "as before", "not decided"
"""What became of the dependence on position; none of them with a single position or too few samples."""
SAME_SPREAD = 0.5
"""Part of the former spread within which its change must lie, interval and all, for position to matter as before."""


@dataclass(frozen=True)
class Effect:
    """A side effect, tested."""

    value: Interval
    """After minus before."""
    p: float
    """Two-sided, of no more harm than the tolerance; 1 where the change is below it."""
    n_units: int
    tolerance: float
    unit: str
    smallest: float = 0.0
    """Change that matters, where it is one of scores."""
    of_scores: bool = False
    """Whether it is a change of scores of the measure that decides, rather than of nats on ordinary text."""
    units_needed: int = SAMPLES_FOR_CLAIM
    """Units below which it is not tested."""


@dataclass(frozen=True)
class Levels:
    """One curve in three numbers, each with the choice of its positions accounted for."""

    mean: Interval
    worst: Interval
    spread: Interval


@dataclass(frozen=True)
class Verdict:
    """One method, judged."""

    name: str
    verdict: str
    """One of `GAINS`, HARM, SMALL, NOTHING or WITHHELD."""
    reasons: tuple[str, ...]
    """What decided, in whole sentences, every number with its interval."""
    changes: Mapping[str, Change]
    """By endpoint; empty where too few samples are complete."""
    effects: Mapping[str, Effect]
    before: Levels | None
    """Of the same samples as `after`."""
    after: Levels | None
    means: tuple[Interval, ...]
    """With the method, at each position."""
    gains: Mapping[str, float]
    """Holm-corrected p-value of a rise, by endpoint."""
    harms: Mapping[str, float]
    """Holm-corrected p-value of harm, by endpoint and side effect."""
    n_samples: int
    """Complete before and after."""
    lost: int
    """Samples that are complete without the method and not with it, such as prompts that became too long."""
    samples_needed: int = SAMPLES_FOR_CLAIM
    """Complete samples below which nothing is judged."""
    formerly_best: int | None = None
    """The position that was best without the method; None where too few samples are complete."""
    lowered: int = 0
    """Positions whose mean is lower with the method, by what matters or more; not tested."""
    spread_p: float = 1.0
    """Holm-corrected p-value of a change of the spread, over the methods alone."""
    dependence: str = ""
    """On position: SHRANK, GREW, STEADY or OPEN; empty with a single position or too few samples."""
    withheld: str = ""
    """Why answers decide nothing here; empty where they do."""
    words: str = ""
    """The verdict as a table has it: with the price of evening out, and with what position does after a rise."""

    @classmethod
    def of_record(cls, stored: Mapping[str, Any]) -> "Verdict":
        """What `Judgement.as_record` made plain of one; newer fields that an older record lacks have their defaults."""

        def changed(entry: Mapping[str, Any]) -> Change:
            needed = entry.get("needed")
            whole = {**entry, "value": Interval.of_record(entry["value"]), "needed": needed and tuple(needed)}
            return UNCHANGED if whole == asdict(UNCHANGED) | {"value": UNCHANGED.value} else Change(**whole)

        def levels(entry: Mapping[str, Any] | None) -> Levels | None:
            return None if entry is None else Levels(**{name: Interval.of_record(each) for name, each in entry.items()})

        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in stored.items() if name in known}
        return cls(
            **{
                **given,
                "reasons": tuple(stored["reasons"]),
                "changes": {name: changed(entry) for name, entry in stored["changes"].items()},
                "effects": {
                    name: Effect(**{**entry, "value": Interval.of_record(entry["value"])})
                    for name, entry in stored["effects"].items()
                },
                "before": levels(stored["before"]),
                "after": levels(stored["after"]),
                "means": tuple(map(Interval.of_record, stored["means"])),
            }
        )


def corrected(families: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Holm's correction over all p-values of all methods."""
    flat = [(number, name) for number, family in enumerate(families) for name in family]
    adjusted = holm(np.array([families[number][name] for number, name in flat], dtype=np.float64))
    found: list[dict[str, float]] = [{} for _ in families]
    for (number, name), p in zip(flat, adjusted, strict=True):
        found[number][name] = float(p)
    return found


def corrected_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """With p-values corrected over all methods: rises are one family, harms another, changes of the spread a third.

    Of a method whose answers decide nothing only side effects that no answer tells are tested.
    """
    judged = [{} if each.withheld else each.changes for each in verdicts]
    several = [len(each.means) > 1 for each in verdicts]
    gains = corrected([{name: own[name].towards(1) for name in JUDGED if name in own} for own in judged])
    falls = [(*JUDGED, FORMERLY_BEST) if many else JUDGED for many in several]
    harms = corrected(
        [
            {
                **{name: own[name].towards(-1) for name in names if name in own},
                **{
                    name: effect.p
                    for name, effect in each.effects.items()
                    if effect.n_units >= effect.units_needed and not (each.withheld and effect.of_scores)
                },
            }
            for each, own, names in zip(verdicts, judged, falls, strict=True)
        ]
    )
    spreads = corrected(
        [{SPREAD: own[SPREAD].p} if many and own else {} for own, many in zip(judged, several, strict=True)]
    )
    return [
        replace(each, gains=up, harms=down, spread_p=spread.get(SPREAD, 1.0))
        for each, up, down, spread in zip(verdicts, gains, harms, spreads, strict=True)
    ]


def settle(verdicts: Sequence[Verdict], measure: str, smallest: float) -> tuple[tuple[Verdict, ...], str | None, str]:
    """All methods decided, from `corrected_together`; which one is recommended, and why in one paragraph.

    Args:
        verdicts: With their corrected p-values.
        measure: What the scores are, for sentences.
        smallest: Change of scores that matters, >= 0.
    """
    tests = sum(len(each.gains) for each in verdicts)
    decided = tuple(_decided(each, measure, smallest=smallest, tests=tests) for each in verdicts)
    return decided, *_recommendation(decided, measure, smallest)


def _decided(verdict: Verdict, measure: str, *, smallest: float, tests: int) -> Verdict:
    """The verdict with its reasons; `tests` are those of the family of gains."""
    verdict = replace(verdict, dependence=_dependence(verdict, smallest))
    fallen = [name for name, p in verdict.harms.items() if p < ALPHA]
    risen = [name for name, p in verdict.gains.items() if p < ALPHA]
    small = [name for name in (*fallen, *risen) if not _matters(verdict, name, smallest)]
    harmed, gained = ([name for name in names if name not in small] for names in (fallen, risen))
    price = [name for name in harmed if name == FORMERLY_BEST and gained and verdict.dependence == SHRANK]
    reasons = [f"{_capital(verdict.withheld)}."] if verdict.withheld else []
    reasons += [f"Harm: {_change_sentence(verdict, name)}" for name in harmed if name not in price]
    reasons += [f"Gain: {_change_sentence(verdict, name)}" for name in gained]
    reasons += [f"Price: {_change_sentence(verdict, name)}" for name in price]
    reasons += [f"Established but negligible (below {smallest:g}): {_change_sentence(verdict, name)}" for name in small]
    reasons += [f"{_capital(dependence_text(verdict))}."] if verdict.dependence else []
    if verdict.lost:
        reasons.append(f"{verdict.lost} samples lack a score at some position with the method and are left out.")
    reasons += [
        f"Not judged: {name}, of which there are {effect.n_units} units; a verdict needs {effect.units_needed}."
        for name, effect in verdict.effects.items()
        if effect.n_units < effect.units_needed
    ]
    if not verdict.changes:
        reasons.append(
            f"Only {verdict.n_samples} samples have a score at every position before and after; a verdict by "
            f"{label_of(measure)} needs {verdict.samples_needed}."
        )
    elif all(change is UNCHANGED for change in verdict.changes.values()):
        reasons = [f"It changes no score of these {verdict.n_samples} samples at all."]
    elif not (gained or harmed or verdict.withheld):
        open_ones = [name for name in JUDGED if name not in small]
        if open_ones:
            reasons.insert(0, _undecided(verdict, open_ones, measure, tests))
    raised = EVENS if price else APPLY if verdict.dependence in (SHRANK, "") else RAISES
    otherwise = WITHHELD if verdict.withheld else raised if gained else SMALL if small else NOTHING
    decided = replace(verdict, verdict=HARM if len(harmed) > len(price) else otherwise, reasons=tuple(reasons))
    return replace(decided, words=_words(decided))


def _dependence(verdict: Verdict, smallest: float) -> str:
    """What became of the spread."""
    change = verdict.changes.get(SPREAD)
    if change is None or len(verdict.means) < 2:
        return ""
    established = verdict.spread_p < ALPHA
    if established and abs(change.value.value) >= smallest:
        return SHRANK if change.value.value < 0 else GREW
    same = 0.0 if verdict.before is None else SAME_SPREAD * verdict.before.spread.value
    return STEADY if established or max(-change.value.low, change.value.high) <= same else OPEN


def _matters(verdict: Verdict, name: str, smallest: float) -> bool:
    """Whether the estimate of an established change is as large as what matters."""
    effect = verdict.effects.get(name)
    if effect is not None:
        return abs(effect.value.value) >= effect.smallest
    return abs(verdict.changes[name].value.value) >= smallest


def _words(verdict: Verdict) -> str:
    """A verdict in words: with the price of evening out, and with what position does after a rise."""
    if verdict.verdict == EVENS:
        lost = Interval(-verdict.changes[FORMERLY_BEST].value.value, -np.inf, np.inf)
        return f"{EVENS}: the best position loses {change_text(lost, least=2)}"
    if verdict.verdict == RAISES:
        known = {GREW: "position matters more", STEADY: "position matters as before"}
        matters = known.get(verdict.dependence, "whether position matters less is not decided")
        return f"{RAISES} {'some' if verdict.lowered else 'all'}, {matters}"
    return verdict.verdict


def dependence_text(verdict: Verdict) -> str:
    """What became of the dependence on position, with the spread before and after it; empty where it was not asked."""
    if not verdict.dependence or verdict.before is None or verdict.after is None:
        return ""
    said = {
        SHRANK: "the dependence on position shrank",
        GREW: "the dependence on position grew",
        STEADY: "the dependence on position is as before",
        OPEN: "whether the dependence on position shrank or grew is not decided",
    }[verdict.dependence]
    before, after = (levels.spread.value for levels in (verdict.before, verdict.after))
    change = change_text(verdict.changes[SPREAD].value, "+", least=2)
    return f"{said}: best minus worst position goes from {before:.2f} to {after:.2f} ({change})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _change_sentence(verdict: Verdict, name: str) -> str:
    """An established change as a size in its own direction; of a side effect beside what is accepted."""
    effect = verdict.effects.get(name)
    if effect is not None:
        unit = f" {effect.unit}" if effect.unit else ""
        beyond = f", beyond the {effect.tolerance:g} that are accepted" if effect.tolerance else ""
        return f"{name} changes by {change_text(effect.value, '+')}{unit}{beyond}."
    value = verdict.changes[name].value
    told = f"{name} ({verdict.formerly_best})" if name == FORMERLY_BEST else name
    if value.value > 0:
        return f"{told} rises by {change_text(value)}."
    return f"{told} falls by {change_text(Interval(-value.value, -value.high, -value.low))}."


def _undecided(verdict: Verdict, names: Sequence[str], measure: str, tests: int) -> str:
    """What is not established, the rises that would have been, and how many samples would decide."""
    changes = {name: verdict.changes[name] for name in names}
    said = "; ".join(f"{name} {change_text(change.value, '+')}" for name, change in changes.items())
    text = f"No {'other ' if len(names) < len(JUDGED) else ''}change of {label_of(measure)} is established: {said}."
    rises = {name: change.detectable for name, change in changes.items() if change.detectable is not None}
    known = [f"of the {name} by {rise:.3f}" for name, rise in rises.items() if np.isfinite(rise)]
    none = [f"of the {name}" for name in rises if not np.isfinite(rises[name])]
    at = f"{100 * POWER:.0f} % power, {tests} tests"
    if known:
        text += f" A rise {' and '.join(known)} would have been found ({at})"
        text += f", {' and '.join(none)} none with so few samples." if none else "."
    elif none:
        text += f" No rise {' or '.join(none)} could have been found with so few samples ({at})."
    needed = _needed_text(verdict)
    return f"{text} {_capital(needed)} ({at})." if MEAN in names and needed else text


def _needed_text(verdict: Verdict) -> str:
    """How many samples would decide about the mean, in questions; empty where that is not known."""
    needed = verdict.changes[MEAN].needed
    if needed is None:
        return ""
    rise, samples = needed
    unit = 10 ** max(0, len(str(samples)) - 2)
    samples, places = -(-samples // unit) * unit, len(verdict.means)
    at = f", each at {places} positions" if places > 1 else ""
    questions = f"{samples * places:,} questions{at}"
    return f"about {samples:,} samples ({questions}) would decide whether the mean rises by {rise:.2f}"


def label_of(measure: str) -> str:
    """A measure in the words of sentences."""
    words = {
        "logprob": "log-probability per token",
        "reciprocal_rank": "1 / rank",
        "starts": "the share of answers that begin with the right one",
    }
    return words.get(measure, measure)


def _tried_besides(verdict: Verdict) -> str:
    """On what else harm was looked for."""
    besides = [name for name in verdict.effects if name in verdict.harms]
    return f"neither here nor for {' and '.join(besides)}" if besides else "but harm elsewhere was not measured"


def _recommendation(verdicts: Sequence[Verdict], measure: str, smallest: float) -> tuple[str | None, str]:
    """The method whose worst position is best among those that gain, and one paragraph."""
    gaining = [each for each in verdicts if each.verdict in GAINS and each.after is not None]
    harmful = [each.name for each in verdicts if each.verdict == HARM]
    withheld = [each.name for each in verdicts if each.verdict == WITHHELD]
    rest = f" Do not apply {', '.join(harmful)}: harm is established." if harmful else ""
    rest += f" No verdict by answers is given for {', '.join(withheld)}." if withheld else ""
    if not gaining:
        if len(harmful) == len(verdicts):
            return None, f"Leave the model as it is.{rest}"
        if len(withheld) == len(verdicts):
            return None, f"No verdict by answers for any method: {verdicts[0].withheld} ({verdicts[0].name})."
        enough = f" by what matters ({smallest:g})" if any(each.verdict == SMALL for each in verdicts) else ""
        nothing = f"no method is established to raise {label_of(measure)}{enough}{_overlooked(verdicts)}"
        return None, f"Leave the model as it is: {nothing}.{rest}"
    best = max(gaining, key=lambda each: (each.after.worst.value, each.after.mean.value))  # type: ignore[union-attr]
    text = _gain_text(best, measure)
    others = [each.name for each in gaining if each is not best]
    if others:
        text += f" {', '.join(others)} {'gain' if len(others) > 1 else 'gains'}, too; which one is best is not tested."
    return best.name, text + rest


def _gain_text(best: Verdict, measure: str) -> str:
    """What the recommended method does: its verdict, both levels, what is lost, and the dependence on position."""
    assert best.before is not None
    assert best.after is not None
    said = []
    for endpoint, name in ((MEAN, "mean"), (WORST, "worst")):
        before, after = (getattr(levels, name).value for levels in (best.before, best.after))
        open_one = "" if best.gains.get(endpoint, 1.0) < ALPHA else ", not established by itself"
        said.append(
            f"{before:z.2f} to {after:z.2f} ({change_text(best.changes[endpoint].value, '+', least=2)}{open_one})"
        )
    price = [FORMERLY_BEST] if best.verdict == EVENS else []
    harm = "harm that matters" if any(p < ALPHA for name, p in best.harms.items() if name not in price) else "harm"
    lead = f"Apply {best.name}"
    if best.verdict != APPLY:
        lead = f"{best.name} {best.words.partition(':')[0]}"
    text = (
        f"{lead}: on {best.n_samples} samples that no fit used, {label_of(measure)} goes from {said[0]} on average "
        f"over positions, and from {said[1]} at the worst position; "
    )
    if best.verdict == EVENS:
        fall = best.changes[FORMERLY_BEST].value
        size = change_text(Interval(-fall.value, -fall.high, -fall.low), least=2)
        text += (
            f"the best position, {best.formerly_best}, loses {size}. Apply it where answers may stand anywhere, not "
            f"where they stand there. No other {harm} is established, {_tried_besides(best)}."
        )
    else:
        text += f"no {harm} is established, {_tried_besides(best)}."
    return f"{text} {_capital(dependence_text(best))}." if best.dependence else text


def _overlooked(verdicts: Sequence[Verdict]) -> str:
    """The smallest detectable rise of the mean, of every method that nothing is established of, and what would do."""
    open_ones = [each for each in verdicts if each.verdict == NOTHING and each.changes]
    rises = [rise for each in open_ones if (rise := each.changes[MEAN].detectable) is not None]
    if not rises:
        return ""
    if not np.isfinite(min(rises)):
        said = "; no rise of the mean could have been found with so few samples"
    elif not np.isfinite(max(rises)):
        said = "; with some of them no rise of the mean could have been found with so few samples"
    else:
        said = f"; a rise of the mean by {max(rises):.2f} would have been found ({100 * POWER:.0f} % power)"
    most = max(open_ones, key=lambda each: (each.changes[MEAN].needed or (0, 0))[1])
    needed = _needed_text(most)
    return f"{said}; {needed}" if needed else said
