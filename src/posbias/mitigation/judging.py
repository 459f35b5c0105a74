"""Whether a method helps: paired scores before and after it, at the same positions of the same samples, and what it
costs elsewhere.

Endpoints: the mean over positions, the worst position, the spread (best minus worst), and the position that was best
(`endpoints.py`).

Verdicts: `do not apply` where harm is established anywhere; else `apply` where the mean or the worst position is
established to rise; else `established but negligible` where only smaller changes of scores are established;
else `no effect established`, with the smallest detectable rise (`power.py`). Gains of all methods are one family of
tests, harms, side effects among them, another, each corrected by Holm: under no effect at all either verdict is given
to any method in at most 5 % of runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.checks import check_number, check_whole
from posbias.errors import UsageError
from posbias.evaluation.curve import (
    SAMPLES_FOR_CLAIM,
    Contrast,
    Scores,
    complete_samples,
    is_binary,
    paired_difference,
    position_means,
)
from posbias.mitigation.endpoints import (
    ALPHA,
    JUDGED,
    MEAN,
    UNCHANGED,
    WORST,
    Change,
    change_text,
    changes_of,
    gaps_of,
    tested,
)
from posbias.mitigation.power import Sought, detectable_rises
from posbias.records import plain
from posbias.statistics import CONFIDENCE, POWER, Interval, holm, mean_of, wilson

APPLY, NOTHING, HARM = "apply", "no effect established", "do not apply"
SMALL = "established but negligible"
FLOOR, CEILING = 0.1, 0.9
"""Mean accuracy below or above which differences between methods cannot be told: log-probabilities still differ."""
SMALLEST = 0.01
"""Change of scores that matters: one answer in a hundred, or .01 nats, by which a right answer becomes 1 % more
probable per token. That is half of what ordinary text may cost. Where samples differ little, much smaller changes are
established of nearly any method, which nobody would notice."""

PerUnit = Float64[np.ndarray, "_"]
Kept = Float64[np.ndarray, "n_complete n_positions"]


@dataclass(frozen=True)
class JudgeOptions:
    """What decides, and how the smallest detectable rise is estimated."""

    smallest: float = SMALLEST
    """Change of scores that matters, in their units, >= 0: an established change whose estimate is smaller is said, and
    decides nothing. What has a tolerance of its own, such as ordinary text, is judged by that."""
    draws: int = 300
    """Of the samples, >= 0, for the smallest detectable rise; 0: it is not estimated."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        check_number("judge: smallest", self.smallest)
        check_whole("judge: draws", self.draws, least=0)
        check_whole("judge: seed", self.seed, least=0)


@dataclass(frozen=True, eq=False)
class SideEffect:
    """Something that a method should leave as it is, before and after it on the same units."""

    name: str
    before: PerUnit
    """One number per document or sample; NaN where there is none."""
    after: PerUnit
    worse: int = -1
    """Direction of harm: -1 where less is worse (a score), 1 where more is (nats)."""
    tolerance: float = 0.0
    """Change in that direction that is accepted, >= 0, in units of the numbers."""
    unit: str = ""


@dataclass(frozen=True, eq=False)
class Tried:
    """A method that was tried."""

    name: str
    after: Scores
    """score[sample, position] with the method, of the samples and positions of the unchanged model's scores."""
    effects: tuple[SideEffect, ...] = ()


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
    """APPLY, NOTHING, SMALL or HARM."""
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


@dataclass(frozen=True)
class Judgement:
    """All methods that were tried on the same samples."""

    measure: str
    positions: tuple[int, ...]
    before: tuple[Interval, ...]
    """The unchanged model's mean at each position."""
    verdicts: tuple[Verdict, ...]
    """In the order in which the methods were given."""
    recommended: str | None
    """Name of the method; None: leave the model as it is."""
    recommendation: str
    """One paragraph in plain words."""
    warnings: tuple[str, ...] = ()
    """What keeps the figures from telling more, such as a ceiling."""
    smallest: float = 0.0
    """Change of scores that matters."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record; None where a number is infinite or undefined."""
        found: dict[str, Any] = plain(asdict(self))
        return found


def judge(
    before: Scores,
    tried: Sequence[Tried],
    *,
    positions: Sequence[int],
    measure: str = "accuracy",
    warnings: Sequence[str] = (),
    options: JudgeOptions | None = None,
) -> Judgement:
    """Judge every method against the unchanged model.

    Args:
        before: score[sample, position] of the unchanged model, more is better; NaN where there is none.
        tried: Methods, at least 1, none twice.
        positions: Of the columns, ascending.
        measure: What the scores are, for sentences.
        warnings: What else is to be known, such as `choose_measure` finds.
        options: What decides.

    Raises:
        UsageError: no method, one twice, or scores of another shape.
    """
    names = [each.name for each in tried]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"judging needs at least 1 method and each once, got {', '.join(names) or 'none'}")
    for each in tried:
        if each.after.shape != before.shape or len(positions) != before.shape[1]:
            raise UsageError(
                f"{each.name}: {each.after.shape} scores after, {before.shape} before, {len(positions)} positions; "
                "the same samples at the same positions are needed"
            )
    options = options or JudgeOptions()
    found = [_examined(before, each, options.smallest) for each in tried]
    gains = corrected([{name: change.towards(1) for name, change in _judged(each).items()} for each in found])
    harms = corrected(
        [
            {
                **{name: change.towards(-1) for name, change in _judged(each).items()},
                **{name: effect.p for name, effect in each.effects.items() if effect.n_units >= SAMPLES_FOR_CLAIM},
            }
            for each in found
        ]
    )
    tests = sum(map(len, gains))
    decided = []
    for each, verdict, up, down in zip(tried, found, gains, harms, strict=True):
        changes = _with_power(verdict, _complete(before, each.after), tests=tests, measure=measure, options=options)
        own = replace(verdict, changes=changes, gains=up, harms=down)
        decided.append(_decided(own, measure, smallest=options.smallest, tests=tests))
    recommended, text = _recommendation(decided, measure, options.smallest)
    return Judgement(
        measure,
        tuple(positions),
        position_means(before),
        tuple(decided),
        recommended,
        text,
        tuple(warnings),
        options.smallest,
    )


def choose_measure(measures: Mapping[str, Scores]) -> tuple[str, tuple[str, ...]]:
    """What the methods are judged by, from the unchanged model's measures alone, and what is to be known of it.

    Accuracy, unless it lies below 10 % or above 90 % on average and log-probabilities are there.
    """
    if "accuracy" not in measures:
        if "logprob" not in measures:
            raise UsageError("no answer was judged and none scored, so nothing can be compared")
        return "logprob", ()
    level = float(np.nanmean(measures["accuracy"]))
    if FLOOR <= level <= CEILING:
        return "accuracy", ()
    side = "floor" if level < FLOOR else "ceiling"
    said = f"accuracy is near its {side}: {level:.3f} on average without a method, where little can be told"
    if "logprob" in measures:
        return "logprob", (f"{said}; methods are judged by log-probability per token instead",)
    return "accuracy", (f"{said}; score the answers, or take an easier or harder task",)


def levels_of(scores: Scores) -> Levels:
    """Mean, worst position and spread of one curve.

    The low end of the worst position needs no correction: it is the lowest of all low ends, and so not above the low
    end of the position that is truly worst. The high end is the lowest of high ends that hold at once.
    """
    complete = complete_samples(scores, "a level", n_positions=1)
    n_positions = complete.shape[1]
    means = complete.mean(axis=0)
    shares = bool(complete.min() >= 0 and complete.max() <= 1)
    range_of = (0.0, 1.0) if shares else (-np.inf, np.inf)

    def of(column: PerUnit, confidence: float) -> Interval:
        if is_binary(column):
            return wilson(column, confidence)
        return mean_of(column).interval(confidence, least=range_of[0], most=range_of[1])

    alone = [of(column, CONFIDENCE) for column in complete.T]
    jointly = [of(column, 1 - ALPHA / n_positions) for column in complete.T]
    worst = Interval(float(means.min()), min(each.low for each in alone), min(each.high for each in jointly))
    return Levels(of(complete.mean(axis=1), CONFIDENCE), worst, _spread_level(complete))


def _spread_level(scores: Scores) -> Interval:
    """Best minus worst, within what holds for all pairs at once (low end) and for each alone (high end)."""
    gaps = gaps_of(scores)
    if not gaps.shape[1]:
        return Interval(0.0, 0.0, 0.0)
    low, _, _ = tested(gaps, is_binary(scores), ALPHA / gaps.shape[1])
    _, high, _ = tested(gaps, is_binary(scores), ALPHA)
    most = 1.0 if scores.min() >= 0 and scores.max() <= 1 else np.inf
    return Interval(float(gaps.mean(axis=0).max()), max(0.0, float(low.max())), min(most, float(high.max())))


def _complete(before: Scores, after: Scores) -> tuple[Kept, Kept]:
    """The samples that have a score at every position before and after."""
    kept = ~(np.isnan(before) | np.isnan(after)).any(axis=1)
    return before[kept], after[kept]


def _examined(before: Scores, tried: Tried, smallest: float) -> Verdict:
    """Everything about one method that does not depend on the others."""
    old, new = _complete(before, tried.after)
    enough = len(old) >= SAMPLES_FOR_CLAIM
    return Verdict(
        name=tried.name,
        verdict=NOTHING,
        reasons=(),
        changes=changes_of(old, new) if enough else {},
        effects={each.name: _effect(each, smallest) for each in tried.effects},
        before=levels_of(old) if enough else None,
        after=levels_of(new) if enough else None,
        means=position_means(tried.after),
        gains={},
        harms={},
        n_samples=len(old),
        lost=int((~np.isnan(before).any(axis=1)).sum() - len(old)),
    )


def _with_power(
    verdict: Verdict, scores: tuple[Scores, Scores], *, tests: int, measure: str, options: JudgeOptions
) -> Mapping[str, Change]:
    """The changes, with the smallest detectable rises among so many tests."""
    if not options.draws or all(change is UNCHANGED for change in verdict.changes.values()):
        return verdict.changes
    both = np.concatenate(scores)
    limits = (-np.inf, np.inf)
    if both.min() >= 0 and both.max() <= 1:
        limits = (0.0, 1.0)
    elif measure == "logprob":
        limits = (-np.inf, max(0.0, float(both.max())))
    sought = Sought(tests, options.smallest, limits, options.draws, options.seed)
    rises = detectable_rises(*scores, sought)
    return {name: replace(change, detectable=rises.get(name)) for name, change in verdict.changes.items()}


def _judged(verdict: Verdict) -> dict[str, Change]:
    return {name: change for name, change in verdict.changes.items() if name in JUDGED}


def corrected(families: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Holm's correction over all p-values of all methods."""
    flat = [(number, name) for number, family in enumerate(families) for name in family]
    adjusted = holm(np.array([families[number][name] for number, name in flat], dtype=np.float64))
    found: list[dict[str, float]] = [{} for _ in families]
    for (number, name), p in zip(flat, adjusted, strict=True):
        found[number][name] = float(p)
    return found


def _effect(given: SideEffect, smallest: float) -> Effect:
    """One side effect, against its tolerance; scores must change by what matters, too."""
    smallest = smallest if given.worse < 0 else 0.0
    there = ~(np.isnan(given.before) | np.isnan(given.after))
    before, after = given.before[there], given.after[there]
    if len(before) < SAMPLES_FOR_CLAIM:
        value = float((after - before).mean()) if len(before) else np.nan
        return Effect(Interval(value, -np.inf, np.inf), 1.0, len(before), given.tolerance, given.unit, smallest)
    bound = given.worse * given.tolerance
    if given.tolerance:
        found = mean_of(after - before)
        compared = Contrast(found.interval(), float(found.p(bound)))
    else:
        compared = paired_difference(after, before)
    harmful = given.worse * (compared.value.value - bound) > 0
    return Effect(compared.value, compared.p if harmful else 1.0, len(before), given.tolerance, given.unit, smallest)


def _decided(verdict: Verdict, measure: str, *, smallest: float, tests: int) -> Verdict:
    """The verdict with its reasons; `tests` are those of the family of gains."""
    fallen = [name for name, p in verdict.harms.items() if p < ALPHA]
    risen = [name for name, p in verdict.gains.items() if p < ALPHA]
    small = {name for name in (*fallen, *risen) if not _matters(verdict, name, smallest)}
    harmed, gained = ([name for name in names if name not in small] for names in (fallen, risen))
    reasons = [f"Harm: {_change_sentence(verdict, name)}" for name in harmed]
    reasons += [f"Gain: {_change_sentence(verdict, name)}" for name in gained]
    reasons += [
        f"Established but negligible (below {smallest:g}): {_change_sentence(verdict, name)}"
        for name in (*fallen, *risen)
        if name in small
    ]
    if verdict.lost:
        reasons.append(f"{verdict.lost} samples lack a score at some position with the method and are left out.")
    if not verdict.changes:
        reasons.append(
            f"Only {verdict.n_samples} samples have a score at every position before and after; a verdict needs "
            f"{SAMPLES_FOR_CLAIM}."
        )
    elif all(change is UNCHANGED for change in verdict.changes.values()):
        reasons.append(f"It changes no score of these {verdict.n_samples} samples at all.")
    elif not gained and not harmed:
        open_ones = [name for name in JUDGED if name not in small]
        if open_ones:
            reasons.append(_undecided(verdict, open_ones, measure, tests))
    decided = HARM if harmed else APPLY if gained else SMALL if small else NOTHING
    return replace(verdict, verdict=decided, reasons=tuple(reasons))


def _matters(verdict: Verdict, name: str, smallest: float) -> bool:
    """Whether the estimate of an established change is as large as what matters."""
    effect = verdict.effects.get(name)
    if effect is not None:
        return abs(effect.value.value) >= effect.smallest
    return abs(verdict.changes[name].value.value) >= smallest


def _change_sentence(verdict: Verdict, name: str) -> str:
    """An established change as a size in its own direction; of a side effect beside what is accepted."""
    effect = verdict.effects.get(name)
    if effect is not None:
        unit = f" {effect.unit}" if effect.unit else ""
        beyond = f", beyond the {effect.tolerance:g} that are accepted" if effect.tolerance else ""
        return f"{name} changes by {change_text(effect.value, '+')}{unit}{beyond}."
    value = verdict.changes[name].value
    if value.value > 0:
        return f"{name} rises by {change_text(value)}."
    return f"{name} falls by {change_text(Interval(-value.value, -value.high, -value.low))}."


def _undecided(verdict: Verdict, names: Sequence[str], measure: str, tests: int) -> str:
    """What is not established, and the rises that would have been."""
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
    return text


def label_of(measure: str) -> str:
    """A measure in the words of sentences."""
    return {"logprob": "log-probability per token", "reciprocal_rank": "1 / rank"}.get(measure, measure)


def _tried_besides(verdict: Verdict) -> str:
    """On what else harm was looked for."""
    if not verdict.effects:
        return "but harm elsewhere was not measured"
    return f"neither here nor for {' and '.join(verdict.effects)}"


def _recommendation(verdicts: Sequence[Verdict], measure: str, smallest: float) -> tuple[str | None, str]:
    """The method whose worst position is best among those to apply, and one paragraph."""
    gaining = [each for each in verdicts if each.verdict == APPLY and each.after is not None]
    harmful = [each.name for each in verdicts if each.verdict == HARM]
    rest = f" Do not apply {', '.join(harmful)}: harm is established." if harmful else ""
    if not gaining:
        if len(harmful) == len(verdicts):
            return None, f"Leave the model as it is.{rest}"
        enough = f" by what matters ({smallest:g})" if any(each.verdict == SMALL for each in verdicts) else ""
        nothing = f"no method is established to raise {label_of(measure)}{enough}{_overlooked(verdicts)}"
        return None, f"Leave the model as it is: {nothing}.{rest}"
    best = max(gaining, key=lambda each: (each.after.worst.value, each.after.mean.value))  # type: ignore[union-attr]
    assert best.before is not None
    assert best.after is not None
    said = []
    for endpoint, name in ((MEAN, "mean"), (WORST, "worst")):
        before, after = (getattr(levels, name).value for levels in (best.before, best.after))
        open_one = "" if best.gains.get(endpoint, 1.0) < ALPHA else ", not established by itself"
        said.append(
            f"{before:z.2f} to {after:z.2f} ({change_text(best.changes[endpoint].value, '+', least=2)}{open_one})"
        )
    harm = "harm that matters" if any(p < ALPHA for p in best.harms.values()) else "harm"
    text = (
        f"Apply {best.name}: on {best.n_samples} samples that no fit used, {label_of(measure)} goes from "
        f"{said[0]} on average over positions, and from {said[1]} at the worst position; no {harm} is established, "
        f"{_tried_besides(best)}."
    )
    others = [each.name for each in gaining if each is not best]
    if others:
        text += f" {', '.join(others)} {'help' if len(others) > 1 else 'helps'}, too; which one is best is not tested."
    return best.name, text + rest


def _overlooked(verdicts: Sequence[Verdict]) -> str:
    """The smallest detectable rise of the mean, of every method that nothing is established of."""
    rises = [each.changes[MEAN].detectable for each in verdicts if each.verdict == NOTHING and each.changes]
    known = [rise for rise in rises if rise is not None]
    if not known:
        return ""
    if not np.isfinite(min(known)):
        return "; no rise of the mean could have been found with so few samples"
    if not np.isfinite(max(known)):
        return "; with some of them no rise of the mean could have been found with so few samples"
    return f"; a rise of the mean by {max(known):.2f} would have been found ({100 * POWER:.0f} % power)"
