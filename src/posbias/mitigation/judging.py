"""Whether a method helps: paired scores before and after it, at the same positions of the same samples, and what it
costs elsewhere.

Endpoints: the mean over positions, the worst position, the spread (best minus worst), and the position that was best.
The worst position is chosen by the same scores that judge it, and a method may move it. Its change

    min_p after_p - min_q before_q = min_p max_q (after_p - before_q)

is therefore bounded by the same minimum and maximum over the ends of the intervals of all P x P paired differences,
each at 1 - .05 / P: whichever positions are truly worst, one of them is corrected for and the other needs no
correction. In simulation such an interval misses in at most 5 % of runs whatever the curves; with the choice made on
other samples (ten folds) it would miss in up to 32 % where positions are nearly alike, with a bootstrap that repeats
the choice in up to 54 % (docs/mitigation.md). Spread and formerly best position are bounded alike.

Verdicts: `do not apply` where harm is established anywhere; else `apply` where the mean or the worst position is
established to rise; else `no effect established`, with the effect that would have been found. Gains of all methods are
one family of tests, harms another, each corrected by Holm: under no effect at all either verdict is given to any method
in at most 5 % of runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.evaluation.curve import (
    SAMPLES_FOR_CLAIM,
    Contrast,
    Scores,
    complete_samples,
    contrast_of,
    is_binary,
    paired_difference,
    position_means,
    spread_of,
)
from posbias.records import plain
from posbias.statistics import CONFIDENCE, POWER, Interval, detectable, estimate, holm, mean_of, wilson

APPLY, NOTHING, HARM = "apply", "no effect established", "do not apply"
MEAN, WORST, SPREAD, FORMERLY_BEST = "mean", "worst position", "spread", "formerly best position"
JUDGED = (MEAN, WORST)
"""Endpoints that decide; the others are reported."""
FLOOR, CEILING = 0.1, 0.9
"""Mean accuracy below or above which differences between methods cannot be told: log-probabilities still differ."""
ALPHA = 1 - CONFIDENCE

PerUnit = Float64[np.ndarray, "_"]
Table = Float64[np.ndarray, "rows columns"]


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
class Change:
    """What a method changes, paired over samples."""

    value: Interval
    """After minus before; the interval leaves out 0 exactly where `p` is below 5 %."""
    p: float
    """Two-sided, of no change, with the choice of positions paid for, not yet the number of methods."""
    detectable: float | None = None
    """Smallest true change that is found with at least 80 % power after all corrections, were this the only one; None
    where no sample changed, or it is not tested."""

    def towards(self, sign: int) -> float:
        """The p-value where the change goes in this direction, else 1."""
        return self.p if sign * self.value.value > 0 else 1.0


UNCHANGED = Change(Interval(0.0, 0.0, 0.0), 1.0)
"""Every log-probability is the same to the last digit, as of a method that leaves prompts of this length alone."""


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
    """APPLY, NOTHING or HARM."""
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
) -> Judgement:
    """Judge every method against the unchanged model.

    Args:
        before: score[sample, position] of the unchanged model, more is better; NaN where there is none.
        tried: Methods, at least 1, none twice.
        positions: Of the columns, ascending.
        measure: What the scores are, for sentences.
        warnings: What else is to be known, such as `choose_measure` finds.

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
    tests = len(JUDGED) * len(tried)
    found = [_examined(before, each, tests=tests) for each in tried]
    gains = _corrected([{name: change.towards(1) for name, change in _judged(each).items()} for each in found])
    harms = _corrected(
        [
            {
                **{name: change.towards(-1) for name, change in _judged(each).items()},
                **{name: effect.p for name, effect in each.effects.items() if effect.n_units >= SAMPLES_FOR_CLAIM},
            }
            for each in found
        ]
    )
    decided = tuple(
        _decided(replace(each, gains=up, harms=down), measure)
        for each, up, down in zip(found, gains, harms, strict=True)
    )
    recommended, text = _recommendation(decided, measure)
    return Judgement(measure, tuple(positions), position_means(before), decided, recommended, text, tuple(warnings))


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
    gaps = _gaps(scores)
    if not gaps.shape[1]:
        return Interval(0.0, 0.0, 0.0)
    low, _, _ = _tested(gaps, is_binary(scores), ALPHA / gaps.shape[1])
    _, high, _ = _tested(gaps, is_binary(scores), ALPHA)
    most = 1.0 if scores.min() >= 0 and scores.max() <= 1 else np.inf
    return Interval(float(gaps.mean(axis=0).max()), max(0.0, float(low.max())), min(most, float(high.max())))


def _examined(before: Scores, tried: Tried, *, tests: int) -> Verdict:
    """Everything about one method that does not depend on the others."""
    there = ~np.isnan(before).any(axis=1)
    kept = there & ~np.isnan(tried.after).any(axis=1)
    old, new = before[kept], tried.after[kept]
    enough = len(old) >= SAMPLES_FOR_CLAIM
    return Verdict(
        name=tried.name,
        verdict=NOTHING,
        reasons=(),
        changes=_changes(old, new, alpha=ALPHA / tests) if enough else {},
        effects={each.name: _effect(each) for each in tried.effects},
        before=levels_of(old) if enough else None,
        after=levels_of(new) if enough else None,
        means=position_means(tried.after),
        gains={},
        harms={},
        n_samples=len(old),
        lost=int(there.sum() - kept.sum()),
    )


def _judged(verdict: Verdict) -> dict[str, Change]:
    return {name: change for name, change in verdict.changes.items() if name in JUDGED}


def _corrected(families: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Holm's correction over all p-values of all methods."""
    flat = [(number, name) for number, family in enumerate(families) for name in family]
    adjusted = holm(np.array([families[number][name] for number, name in flat], dtype=np.float64))
    found: list[dict[str, float]] = [{} for _ in families]
    for (number, name), p in zip(flat, adjusted, strict=True):
        found[number][name] = float(p)
    return found


def _changes(before: Scores, after: Scores, *, alpha: float) -> dict[str, Change]:
    """All endpoints; `alpha` is what a single test of the family has at first, for what would have been found."""
    if np.array_equal(before, after) and not is_binary(np.hstack([before, after])):
        return dict.fromkeys((MEAN, WORST, SPREAD, FORMERLY_BEST), UNCHANGED)
    count, n_positions = before.shape
    both = np.hstack([after, before])
    weights = np.repeat([1.0, -1.0], n_positions) / n_positions
    whole = paired_difference(after[:, 0], before[:, 0]) if n_positions == 1 else contrast_of(both, weights)
    found = {MEAN: Change(whole.value, whole.p, _detectable(spread_of(both, weights), count, alpha))}
    joint = ALPHA / n_positions
    pairs = [[paired_difference(new, old, joint) for old in before.T] for new in after.T]
    worst = int(np.argmin(before.mean(axis=0)))
    widest = max(spread_of(np.column_stack([new, before[:, worst]]), np.array([1.0, -1.0])) for new in after.T)
    # Found only if every position lies above the old worst one: what each may miss is divided among them.
    smallest = _detectable(widest, count, alpha / n_positions, power=1 - (1 - POWER) / n_positions)
    value, low, high, p = np.moveaxis(np.array([[_numbers(each) for each in row] for row in pairs]), 2, 0)
    found[WORST] = replace(_saddle(value, low, high, p, n_positions), detectable=smallest)
    found[SPREAD] = _spread_change(before, after)
    best = int(np.argmax(before.mean(axis=0)))
    fallen = pairs[best][best]
    found[FORMERLY_BEST] = Change(fallen.value, min(1.0, n_positions * fallen.p))
    return found


def _numbers(tested: Contrast) -> tuple[float, float, float, float]:
    """Estimate, ends and p-value."""
    return tested.value.value, tested.value.low, tested.value.high, tested.p


def _detectable(spread: float, count: int, alpha: float, power: float = POWER) -> float | None:
    return detectable(spread, count, alpha=alpha, power=power) if spread > 0 else None


def _saddle(value: Table, low: Table, high: Table, p: Table, comparisons: int) -> Change:
    """Minimum over rows of the maximum over columns: bounds by those of the ends, p-values by those of the tests.

    It is above 0 where every row has a column above 0, below 0 where some row lies below 0 in every column. Ends and
    p-values are those of single differences, the ends at 1 - .05 / comparisons.
    """
    rising = np.where(value > 0, p, 1.0).min(axis=1).max()
    falling = np.where(value < 0, p, 1.0).max(axis=1).min()
    ends = (float(ends.max(axis=1).min()) for ends in (low, high))
    return Change(Interval(float(value.max(axis=1).min()), *ends), min(1.0, comparisons * float(min(rising, falling))))


def _gaps(scores: Scores) -> Float64[np.ndarray, "n_samples pairs"]:
    """First minus second of all ordered pairs of positions."""
    first, second = np.nonzero(~np.eye(scores.shape[1], dtype=bool))
    return np.asarray(scores[:, first] - scores[:, second])


def _tested(
    values: Float64[np.ndarray, "n_samples pairs"], binary: bool, alpha: float
) -> tuple[Float64[np.ndarray, "pairs"], Float64[np.ndarray, "pairs"], Float64[np.ndarray, "pairs"]]:
    """Ends and two-sided p-values of the means of columns, made of scores of 0 and 1 where `binary`."""
    found = estimate(values.mean(axis=0), values, scale=float(np.abs(values).max(initial=0.0)))
    if binary:  # one sample is taken to differ, as in every contrast of such scores
        least = 1 / len(values)
        small = found.error < least
        found = replace(found, error=np.where(small, least, found.error), skewness=np.where(small, 0.0, found.skewness))
    low, high = found.ends(1 - alpha)
    return low, high, np.asarray(found.p())


def _spread_change(before: Scores, after: Scores) -> Change:
    """Best minus worst after, less the same before: a maximum over pairs of a minimum over pairs."""
    old, new = _gaps(before), _gaps(after)
    comparisons, binary = old.shape[1], is_binary(np.hstack([before, after]))
    if not comparisons:
        return Change(Interval(0.0, 0.0, 0.0), 1.0)
    rows = [(old - column[:, None], *_tested(old - column[:, None], binary, ALPHA / comparisons)) for column in new.T]
    value, low, high, p = (np.stack(part) for part in zip(*((v.mean(axis=0), *rest) for v, *rest in rows), strict=True))
    shrunk = _saddle(value, low, high, p, comparisons)  # of before minus after
    return Change(Interval(-shrunk.value.value, -shrunk.value.high, -shrunk.value.low), shrunk.p)


def _effect(given: SideEffect) -> Effect:
    """One side effect, against its tolerance."""
    there = ~(np.isnan(given.before) | np.isnan(given.after))
    before, after = given.before[there], given.after[there]
    if len(before) < SAMPLES_FOR_CLAIM:
        value = float((after - before).mean()) if len(before) else np.nan
        return Effect(Interval(value, -np.inf, np.inf), 1.0, len(before), given.tolerance, given.unit)
    bound = given.worse * given.tolerance
    if given.tolerance:
        found = mean_of(after - before)
        tested = Contrast(found.interval(), float(found.p(bound)))
    else:
        tested = paired_difference(after, before)
    harmful = given.worse * (tested.value.value - bound) > 0
    return Effect(tested.value, tested.p if harmful else 1.0, len(before), given.tolerance, given.unit)


def _decided(verdict: Verdict, measure: str) -> Verdict:
    """The verdict with its reasons."""
    harmed = [name for name, p in verdict.harms.items() if p < ALPHA]
    gained = [name for name, p in verdict.gains.items() if p < ALPHA]
    reasons = [*_harm_sentences(verdict, harmed), *_gain_sentences(verdict, gained)]
    if verdict.lost:
        reasons.append(f"{verdict.lost} samples have no score at some position with the method, and count on no side.")
    if not verdict.changes:
        reasons.append(
            f"Only {verdict.n_samples} samples have a score at every position before and after; a verdict needs "
            f"{SAMPLES_FOR_CLAIM}."
        )
    elif all(change is UNCHANGED for change in verdict.changes.values()):
        reasons.append(f"It changes no score of these {verdict.n_samples} samples at all.")
    elif not gained and not harmed:
        reasons.append(f"No change of {label_of(measure)} is established: {_undecided(verdict)}.")
    decided = HARM if harmed else APPLY if gained else NOTHING
    return replace(verdict, verdict=decided, reasons=tuple(reasons))


def _harm_sentences(verdict: Verdict, names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        if name in verdict.effects:
            effect = verdict.effects[name]
            unit = f" {effect.unit}" if effect.unit else ""
            beyond = f", beyond the {effect.tolerance:g} that are accepted" if effect.tolerance else ""
            found.append(f"Harm: {name} changes by {effect.value.text('+.3f')}{unit}{beyond}.")
        else:
            found.append(f"Harm: {name} falls by {_signed(verdict.changes[name].value, -1)}.")
    return found


def _gain_sentences(verdict: Verdict, names: Sequence[str]) -> list[str]:
    return [f"Gain: {name} rises by {_signed(verdict.changes[name].value, 1)}." for name in names]


def _signed(value: Interval, sign: int) -> str:
    """A change as a size in its own direction."""
    if sign > 0:
        return value.text()
    return Interval(-value.value, -value.high, -value.low).text()


def _undecided(verdict: Verdict) -> str:
    said = []
    for name in JUDGED:
        change = verdict.changes[name]
        found = "" if change.detectable is None else f", {change.detectable:.3f} would have been found"
        said.append(f"{name} {change.value.text('+.3f')}{found}")
    return "; ".join(said)


def label_of(measure: str) -> str:
    """A measure in the words of sentences."""
    return {"logprob": "log-probability per token", "reciprocal_rank": "1 / rank"}.get(measure, measure)


def _tried_besides(verdict: Verdict) -> str:
    """On what else harm was looked for."""
    if not verdict.effects:
        return "but only this task was tried: neither ordinary text nor a short form of it"
    return f"neither here nor for {' and '.join(verdict.effects)}"


def _recommendation(verdicts: Sequence[Verdict], measure: str) -> tuple[str | None, str]:
    """The method whose worst position is best among those to apply, and one paragraph."""
    gaining = [each for each in verdicts if each.verdict == APPLY and each.after is not None]
    harmful = [each.name for each in verdicts if each.verdict == HARM]
    rest = f" Do not apply {', '.join(harmful)}: harm is established." if harmful else ""
    if not gaining:
        if len(harmful) == len(verdicts):
            return None, f"Leave the model as it is.{rest}"
        open_ones = [each for each in verdicts if each.verdict == NOTHING]
        smallest = [each.changes[MEAN].detectable for each in open_ones if each.changes]
        known = [each for each in smallest if each is not None]
        found = f"; a change of the mean by {max(known):.2f} would have been found" if known else ""
        return None, f"Leave the model as it is: no method is established to raise {label_of(measure)}{found}.{rest}"
    best = max(gaining, key=lambda each: (each.after.worst.value, each.after.mean.value))  # type: ignore[union-attr]
    assert best.before is not None
    assert best.after is not None
    said = []
    for endpoint, name in ((MEAN, "mean"), (WORST, "worst")):
        before, after = (getattr(levels, name).value for levels in (best.before, best.after))
        open_one = "" if best.gains.get(endpoint, 1.0) < ALPHA else ", not established by itself"
        said.append(f"{before:.2f} to {after:.2f} ({best.changes[endpoint].value.text('+.2f')}{open_one})")
    text = (
        f"Apply {best.name}: on {best.n_samples} samples that nothing was fitted on, {label_of(measure)} goes from "
        f"{said[0]} on average over positions, and from {said[1]} at the worst position; no harm is established, "
        f"{_tried_besides(best)}."
    )
    others = [each.name for each in gaining if each is not best]
    if others:
        text += f" {', '.join(others)} {'help' if len(others) > 1 else 'helps'}, too; which one is best is not tested."
    return best.name, text + rest
