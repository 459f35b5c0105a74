"""Whether a method helps: paired scores before and after it, at the same positions of the same samples, and what it
costs elsewhere.

Endpoints: the mean over positions, the worst position, the spread (best minus worst), and the position that was best
(`endpoints.py`).

What follows from that for each method is the matter of `verdicts.py`, with the smallest detectable rise (`power.py`).
Gains of all methods are one family of tests, harms, side effects among them, another, each corrected by Holm: under no
effect at all a verdict of gain, or of harm, is given to any method in at most 5 % of runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.checks import check_number, check_size, check_whole
from posbias.errors import UsageError
from posbias.evaluation.curve import (
    AGREEMENT,
    Contrast,
    Scores,
    complete_samples,
    is_binary,
    position_means,
)
from posbias.limits import REPEATS
from posbias.mitigation.judging.endpoints import (
    ALPHA,
    MEAN,
    UNCHANGED,
    Change,
    bounds_of,
    change_between,
    changes_of,
    gaps_of,
    samples_needed,
)
from posbias.mitigation.judging.power import Sought, detectable_rises, samples_for
from posbias.mitigation.judging.verdicts import NOTHING, Effect, Levels, Verdict, corrected_together, settle
from posbias.runs.records import plain
from posbias.statistics import CONFIDENCE, Interval, mean_of, wilson

FLOOR, CEILING = 0.1, 0.9
"""Mean accuracy below or above which differences between methods cannot be told: log-probabilities still differ."""
SMALLEST = 0.01
"""Change of scores that matters: one answer in a hundred, or .01 nats, by which a right answer becomes 1 % more
probable per token. That is half of what ordinary text may cost. Where samples differ little, much smaller changes are
established of nearly any method, which nobody would notice."""

DECIDING_RISE = 0.05
"""Rise of the mean, in units of the scores, for which the samples that would find it are counted where the one that
was seen is smaller."""

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
        check_size("judge: draws", self.draws, REPEATS, least=0)
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
    withheld: str = ""
    """Why its answers decide nothing, such as that too many were cut off; empty where they do."""


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
    found = [_examined(before, each, positions, options.smallest) for each in tried]
    found = corrected_together(found)
    tests = sum(len(each.gains) for each in found)
    known = [
        replace(
            verdict,
            changes=_with_power(verdict, _complete(before, each.after), tests=tests, measure=measure, options=options),
        )
        for each, verdict in zip(tried, found, strict=True)
    ]
    decided, recommended, text = settle(known, measure, options.smallest)
    return Judgement(
        measure,
        tuple(positions),
        position_means(before),
        decided,
        recommended,
        text,
        tuple(warnings),
        options.smallest,
    )


def choose_measure(measures: Mapping[str, Scores], *, undecided: str = "") -> tuple[str, tuple[str, ...]]:
    """What the methods are judged by, from the unchanged model's measures alone, and what is to be known of it.

    Accuracy, unless it lies below 10 % or above 90 % on average, or its answers decide nothing (`undecided`: why), and
    log-probabilities are there. Answers that begin with the right one only where they alone are given.
    """
    if "accuracy" not in measures:
        if "logprob" not in measures and "starts" not in measures:
            raise UsageError("no answer was judged and none scored, so nothing can be compared")
        return ("logprob" if "logprob" in measures else "starts"), ()
    if undecided and "logprob" in measures:
        return "logprob", (f"No verdict by answers: {undecided}; methods are judged by log-probability instead",)
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
    low, _, _ = bounds_of(gaps, scores, ALPHA / gaps.shape[1])
    _, high, _ = bounds_of(gaps, scores, ALPHA)
    most = 1.0 if scores.min() >= 0 and scores.max() <= 1 else np.inf
    return Interval(float(gaps.mean(axis=0).max()), max(0.0, float(low.max())), min(most, float(high.max())))


def _complete(before: Scores, after: Scores) -> tuple[Kept, Kept]:
    """The samples that have a score at every position before and after."""
    kept = ~(np.isnan(before) | np.isnan(after)).any(axis=1)
    return before[kept], after[kept]


def _examined(before: Scores, tried: Tried, positions: Sequence[int], smallest: float) -> Verdict:
    """Everything about one method that does not depend on the others."""
    old, new = _complete(before, tried.after)
    needed = samples_needed(np.hstack([before, tried.after]))
    enough = len(old) >= needed
    rises = new.mean(axis=0) - old.mean(axis=0) if enough else np.zeros(0)
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
        samples_needed=needed,
        lost=int((~np.isnan(before).any(axis=1)).sum() - len(old)),
        formerly_best=positions[int(np.argmax(old.mean(axis=0)))] if enough else None,
        lowered=int((rises <= -max(smallest, AGREEMENT)).sum()),
        withheld=tried.withheld,
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
    sought = Sought(max(1, tests), options.smallest, limits, options.draws, options.seed)
    rises = detectable_rises(*scores, sought)
    changes = {name: replace(change, detectable=rises.get(name)) for name, change in verdict.changes.items()}
    rise = max(changes[MEAN].value.value, DECIDING_RISE)
    return changes | {MEAN: replace(changes[MEAN], needed=samples_for(*scores, rise, sought))}


def _effect(given: SideEffect, smallest: float) -> Effect:
    """One side effect, against its tolerance; scores must change by what matters, too."""
    smallest = smallest if given.worse < 0 else 0.0
    there = ~(np.isnan(given.before) | np.isnan(given.after))
    before, after = given.before[there], given.after[there]
    bound, needed = given.worse * given.tolerance, samples_needed(np.concatenate([before, after]))
    compared = Contrast(Interval(float((after - before).mean()) if len(before) else np.nan, -np.inf, np.inf), 1.0)
    if len(before) >= needed:
        compared = change_between(after, before, bound)
    p = compared.p if given.worse * (compared.value.value - bound) > 0 else 1.0
    of_scores = given.worse < 0
    return Effect(compared.value, p, len(before), given.tolerance, given.unit, smallest, of_scores, needed)
