"""The judgement on methods: paired scores before and after each, at the same positions of the same samples, and side
effects.

Endpoints: the mean over positions, the worst position, the spread (best minus worst), and the position that was best
(`evaluation/changes.py`).

The verdict that follows for each method is the matter of `verdicts.py`. Gains of all methods are one family of tests,
harms, side effects among them, another, each corrected by Holm: under no effect at all a verdict of gain is given to
any method in at most 5 % of runs, and one of harm unless few samples of many gain much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posbias.checks import NonNegative, checked_value
from posbias.errors import UsageError
from posbias.evaluation.changes import (
    MEAN,
    UNCHANGED,
    Change,
    change_between,
    changes_of,
    samples_for,
    samples_needed,
)
from posbias.evaluation.curve import (
    AGREEMENT,
    HIGHEST,
    Contrast,
    Scores,
    position_means,
)
from posbias.evaluation.reading import Withheld
from posbias.evaluation.requirements import levels_of
from posbias.mitigation.judging.verdicts import NOTHING, Effect, Verdict, corrected_together, settle
from posbias.statistics import Interval, StoredInterval

FLOOR, CEILING = 0.1, 0.9
"""Mean accuracy below or above which differences between methods cannot be told: log-probabilities still differ."""
SMALLEST = 0.01
"""Change of scores that matters: one answer in a hundred, or .01 nats, by which a right answer becomes 1 % more
probable per token. That is half of what ordinary text may cost. Where samples differ little, much smaller changes are
established of nearly any method, which nobody would notice."""

DECIDING_RISE = 0.05
"""Rise of the mean, in units of the scores, for which the samples that would find it are counted if the observed one
is smaller."""

PerUnit = Float64[np.ndarray, "_"]
Complete = Float64[np.ndarray, "n_complete n_positions"]


@dataclass(frozen=True, eq=False)
class SideEffect:
    """Something that a method should leave as it is, before and after it on the same units."""

    name: str
    before: PerUnit
    """One number per document or sample; NaN if there is none."""
    after: PerUnit
    worse: int = -1
    """Direction of harm: -1 if less is worse (a score), 1 if more is (nats)."""
    tolerance: float = 0.0
    """Change in that direction that is accepted, >= 0, in units of the numbers."""
    unit: str = ""


@dataclass(frozen=True, eq=False)
class ArmScores:
    """The scores of one method, and its side effects."""

    name: str
    after: Scores
    """score[sample, position] with the method, of the samples and positions of the unchanged model's scores."""
    effects: tuple[SideEffect, ...] = ()
    withheld: str = ""
    """Why its answers decide nothing; empty if they do."""


@dataclass(frozen=True)
class Judgement:
    """All methods that were tried on the same samples."""

    measure: str
    positions: tuple[int, ...]
    before: tuple[StoredInterval, ...]
    """The unchanged model's mean at each position."""
    verdicts: tuple[Verdict, ...]
    """One for each method, in the order in which they were given."""
    recommended: str | None
    """Name of the method; None: leave the model as it is."""
    smallest: float = 0.0
    """Change of scores that matters."""

    @property
    def tests(self) -> int:
        """Number of tests in the family of gains."""
        return sum(len(verdict.gains) for verdict in self.verdicts)


@dataclass(frozen=True)
class MeasureChoice:
    """The measure by which methods are judged, and why it is not accuracy."""

    measure: str
    level: float | None = None
    """Mean accuracy of the unchanged model, if it is near its floor or ceiling."""
    undecided: Withheld = ""
    """Why accuracy does not decide, as `Reading.withheld`; empty if it may."""


def judge(
    before: Scores,
    methods: Sequence[ArmScores],
    *,
    positions: Sequence[int],
    measure: str = "accuracy",
    smallest: float = SMALLEST,
) -> Judgement:
    """Judge every method against the unchanged model.

    Args:
        before: score[sample, position] of the unchanged model, more is better; NaN for a missing one.
        methods: Scores of each method, at least 1, none twice.
        positions: Of the columns, ascending.
        measure: Name of the scores.
        smallest: Change of scores that matters, in their units, >= 0: an established change whose estimate is smaller
            is said, and decides nothing. What has a tolerance of its own, such as ordinary text, is judged by that.

    Raises:
        UsageError: no method, one twice, scores of another shape, or a negative change.
    """
    checked_value("judge: smallest", smallest, NonNegative)
    names = [arm.name for arm in methods]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"judging needs at least 1 method, and each only once, got {', '.join(names) or 'none'}")
    for arm in methods:
        if arm.after.shape != before.shape or len(positions) != before.shape[1]:
            raise UsageError(
                f"{arm.name}: {arm.after.shape} scores after, {before.shape} before, {len(positions)} positions; "
                "the same samples at the same positions are needed"
            )
    highest = HIGHEST.get(measure, np.inf)
    tested = corrected_together([_examined(before, arm, positions, smallest, highest) for arm in methods])
    tests = sum(len(verdict.gains) for verdict in tested)
    with_needed = [
        replace(verdict, changes=_with_needed(verdict, _complete(before, arm.after), tests))
        for arm, verdict in zip(methods, tested, strict=True)
    ]
    decided, recommended = settle(with_needed, smallest)
    return Judgement(measure, tuple(positions), position_means(before, highest=highest), decided, recommended, smallest)


def choose_measure(measures: Mapping[str, Scores], *, undecided: str = "") -> MeasureChoice:
    """The measure by which methods are judged, chosen from the unchanged model's measures alone.

    Accuracy, unless it lies below 10 % or above 90 % on average, or its answers decide nothing (`undecided`), and
    log-probabilities are there. Answers that begin with the right one only if they alone are given.
    """
    if "accuracy" not in measures:
        if "logprob" not in measures and "starts" not in measures:
            raise UsageError("no answer was judged and none scored, so nothing can be compared")
        return MeasureChoice("logprob" if "logprob" in measures else "starts")
    if undecided and "logprob" in measures:
        return MeasureChoice("logprob", undecided=undecided)
    level = float(np.nanmean(measures["accuracy"]))
    if FLOOR <= level <= CEILING:
        return MeasureChoice("accuracy")
    return MeasureChoice("logprob" if "logprob" in measures else "accuracy", level)


def _complete(before: Scores, after: Scores) -> tuple[Complete, Complete]:
    """The samples that have a score at every position before and after."""
    complete = ~(np.isnan(before) | np.isnan(after)).any(axis=1)
    return before[complete], after[complete]


def _examined(before: Scores, arm: ArmScores, positions: Sequence[int], smallest: float, highest: float) -> Verdict:
    """Everything about one method that does not depend on the others."""
    old, new = _complete(before, arm.after)
    needed = samples_needed(np.hstack([before, arm.after]))
    enough = len(old) >= needed
    rises = new.mean(axis=0) - old.mean(axis=0) if enough else np.zeros(0)
    return Verdict(
        name=arm.name,
        verdict=NOTHING,
        changes=changes_of(old, new) if enough else {},
        effects={effect.name: _effect(effect, smallest) for effect in arm.effects},
        before=levels_of(old, highest=highest) if enough else None,
        after=levels_of(new, highest=highest) if enough else None,
        means=position_means(arm.after, highest=highest),
        gains={},
        harms={},
        n_samples=len(old),
        samples_needed=needed,
        lost=int((~np.isnan(before).any(axis=1)).sum() - len(old)),
        formerly_best=positions[int(np.argmax(old.mean(axis=0)))] if enough else None,
        lowered=int((rises <= -max(smallest, AGREEMENT)).sum()),
        withheld=arm.withheld,
    )


def _with_needed(verdict: Verdict, scores: tuple[Scores, Scores], tests: int) -> Mapping[str, Change]:
    """The changes, with the samples that would decide about the mean among so many tests."""
    if all(change == UNCHANGED for change in verdict.changes.values()):
        return verdict.changes
    mean = verdict.changes[MEAN]
    needed = samples_for(*scores, max(mean.value.value, DECIDING_RISE), max(1, tests))
    return {**verdict.changes, MEAN: replace(mean, needed=needed)}


def _effect(effect: SideEffect, smallest: float) -> Effect:
    """One side effect, tested against its tolerance; scores must change by what matters, too."""
    of_scores = effect.worse < 0
    complete = ~(np.isnan(effect.before) | np.isnan(effect.after))
    before, after = effect.before[complete], effect.after[complete]
    bound, needed = effect.worse * effect.tolerance, samples_needed(np.concatenate([before, after]))
    compared = Contrast(Interval(float((after - before).mean()) if len(before) else np.nan, -np.inf, np.inf), 1.0)
    if len(before) >= needed:
        compared = change_between(after, before, bound)
    p = compared.p if effect.worse * (compared.value.value - bound) > 0 else 1.0
    return Effect(
        compared.value,
        p,
        len(before),
        effect.tolerance,
        effect.unit,
        smallest if of_scores else 0.0,
        of_scores=of_scores,
        units_needed=needed,
    )
