"""The judgement on methods: paired scores before and after each, at the same positions of the same samples, and side
effects; and the verdict that follows (docs/mitigate.md), which `posbias.mitigation.page` words.

Endpoints: the mean over positions, the worst position, the spread (best minus worst), and the position that was best
(`evaluation/levels.py`). Verdicts, in the order in which they are decided:

- `do not apply`: harm is established of the mean, the worst position, ordinary text or a short form; or of the position
  that was best, unless that is the price of a gain with which the dependence on position is established to shrink.
- `evens out`: such a gain, with its price.
- `apply`: mean or worst position rises, so far that rare losses which no sample showed would not undo it, no harm is
  established, and the dependence on position (the spread) shrinks. Harm needs no such margin.
- `raises`: mean or worst position rises, no harm is established, and position matters more, or as before, or it is not
  decided whether it matters less.
- `established but negligible`: only changes below what matters.
- `no effect established`: otherwise, with the samples that would decide it.
- `no verdict by answers`: they ended in different ways, or too many were cut off.

Gains of all methods are one family of tests, harms, side effects among them, another, each corrected by Holm: under no
effect at all a verdict of gain is given to any method in at most 5 % of runs, and one of harm unless few samples of
many gain much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from posbias.checks import NonNegative, checked_value
from posbias.errors import UsageError
from posbias.evaluation.curve import AGREEMENT, SAMPLES_FOR_CLAIM, Change, Scores, position_means
from posbias.evaluation.levels import (
    ALPHA,
    FORMERLY_BEST,
    JUDGED,
    MEAN,
    SPREAD,
    UNCHANGED,
    Levels,
    change_between,
    changes_of,
    levels_of,
    samples_for,
    samples_needed,
)
from posbias.statistics import Interval, StoredInterval, holm_over

APPLY, EVENS, RAISES, HARM = "apply", "evens out", "raises", "do not apply"
SMALL, NOTHING, WITHHELD = "established but negligible", "no effect established", "no verdict by answers"
GAINS = (APPLY, EVENS, RAISES)
"""Verdicts of methods that may be recommended."""
SHRANK, GREW, STEADY, OPEN = "shrank", "grew", "as before", "not decided"
"""Fates of the dependence on position; none of them with a single position or too few samples."""
SAME_SPREAD = 0.5
"""Part of the former spread within which its change must lie, interval and all, for position to matter as before."""


@dataclass(frozen=True)
class Effect:
    """A side effect, tested."""

    value: StoredInterval
    """After minus before."""
    p: float
    """Two-sided, of no more harm than the tolerance; 1 if the change is below it."""
    n_units: int
    tolerance: float
    unit: str
    """Unit of the numbers, or the measure whose scores they are."""
    smallest: float = 0.0
    """Smallest change that matters, if it is one of scores."""
    of_scores: bool = False
    """It is a change of scores of the measure that decides, rather than of nats on ordinary text."""
    units_needed: int = SAMPLES_FOR_CLAIM
    """Units below which it is not tested."""


@dataclass(frozen=True)
class Verdict:
    """One method, judged."""

    name: str
    verdict: str
    """One of `GAINS`, HARM, SMALL, NOTHING or WITHHELD."""
    changes: Mapping[str, Change]
    """The change at every endpoint; empty if too few samples are complete."""
    effects: Mapping[str, Effect]
    before: Levels | None
    """Levels of the unchanged model on the same samples as `after`."""
    after: Levels | None
    means: tuple[StoredInterval, ...]
    """Mean with the method at each position."""
    gains: Mapping[str, float]
    """Holm-corrected p-value of a rise, by endpoint."""
    harms: Mapping[str, float]
    """Holm-corrected p-value of harm, by endpoint and side effect."""
    n_samples: int
    """Samples that are complete before and after."""
    lost: int
    """Samples that are complete without the method and not with it, such as prompts that became too long."""
    samples_needed: int = SAMPLES_FOR_CLAIM
    """Complete samples below which nothing is judged."""
    formerly_best: int | None = None
    """The position that was best without the method; None if too few samples are complete."""
    lowered: int = 0
    """Positions whose mean is lower with the method, by what matters or more; not tested."""
    spread_p: float = 1.0
    """Holm-corrected p-value of a change of the spread, over the methods alone."""
    unseen: Mapping[str, float] = field(default_factory=dict)
    """Holm-corrected p-value of rare losses that would undo a rise and are in no sample, by endpoint."""
    dependence: str = ""
    """The fate of the dependence on position: SHRANK, GREW, STEADY or OPEN; empty if it was not asked for."""
    withheld: str = ""
    """Why answers decide nothing here; empty if they do."""

    def matters(self, name: str, smallest: float) -> bool:
        """True if the estimate of an established change, or side effect, is as large as what matters."""
        effect = self.effects.get(name)
        value, least = (self.changes[name].value, smallest) if effect is None else (effect.value, effect.smallest)
        return abs(value.value) >= least

    def established(self, smallest: float) -> "Established":
        """Everything that is established of the method after all corrections."""
        falls = [name for name, p in self.harms.items() if p < ALPHA]
        rises = [name for name, p in self.gains.items() if p < ALPHA]
        negligible = [name for name in (*falls, *rises) if not self.matters(name, smallest)]
        harms, gains = ([name for name in names if name not in negligible] for names in (falls, rises))
        unsure = [name for name in gains if self.unseen.get(name, 0.0) >= ALPHA]
        gains = [name for name in gains if name not in unsure]
        price = [name for name in harms if name == FORMERLY_BEST and gains and self.dependence == SHRANK]
        return Established([name for name in harms if name not in price], gains, price, negligible, unsure)


class Established(NamedTuple):
    """Established changes by their names."""

    harms: list[str]
    gains: list[str]
    price: list[str]
    """The fall of the position that was best, if that is what evening out costs."""
    negligible: list[str]
    """Changes in either direction below what matters."""
    unsure: list[str]
    """Rises that rare losses, which no sample showed, could undo."""


def _harms(verdict: Verdict, changes: Mapping[str, Change]) -> dict[str, float]:
    """p-values of falls and of side effects."""
    falls = (*JUDGED, FORMERLY_BEST) if len(verdict.means) > 1 else JUDGED
    effects = {
        name: effect.p
        for name, effect in verdict.effects.items()
        if effect.n_units >= effect.units_needed and not (verdict.withheld and effect.of_scores)
    }
    return {name: changes[name].towards(-1) for name in falls if name in changes} | effects


def settle(verdicts: Sequence[Verdict], smallest: float) -> tuple[tuple[Verdict, ...], str | None]:
    """All methods decided together, from their changes and side effects, and the name of the recommended one.

    p-values are corrected over all methods: rises are one family, harms another, spreads a third. If a method's answers
    decide nothing, only side effects that no answer tells are tested. Recommended is the method whose worst position is
    best among those that gain; None: leave the model as it is.

    Args:
        verdicts: Methods with what does not depend on the others.
        smallest: Change of scores that matters, >= 0.
    """
    judged = [{} if verdict.withheld else verdict.changes for verdict in verdicts]
    gains = holm_over([{name: of[name].towards(1) for name in JUDGED if name in of} for of in judged])
    unseen = holm_over(
        [{name: of[name].unseen if of[name].value.value > 0 else 1.0 for name in JUDGED if name in of} for of in judged]
    )
    harms = holm_over([_harms(verdict, of) for verdict, of in zip(verdicts, judged, strict=True)])
    spreads = holm_over(
        [{SPREAD: of[SPREAD].p} if of and len(v.means) > 1 else {} for v, of in zip(verdicts, judged, strict=True)]
    )
    decided = tuple(
        _decided(replace(verdict, gains=up, harms=down, spread_p=spread.get(SPREAD, 1.0), unseen=rare), smallest)
        for verdict, up, down, spread, rare in zip(verdicts, gains, harms, spreads, unseen, strict=True)
    )
    best = max(
        (verdict for verdict in decided if verdict.verdict in GAINS and verdict.after is not None),
        key=lambda verdict: (verdict.after.worst.value, verdict.after.mean.value),  # type: ignore[union-attr]
        default=None,
    )
    return decided, None if best is None else best.name


def _decided(verdict: Verdict, smallest: float) -> Verdict:
    """The verdict by the rule at the top of this module."""
    verdict = replace(verdict, dependence=_dependence(verdict, smallest))
    established = verdict.established(smallest)
    raised = EVENS if established.price else APPLY if verdict.dependence in (SHRANK, "") else RAISES
    if established.harms:
        code = HARM
    elif verdict.withheld:
        code = WITHHELD
    elif established.gains:
        code = raised
    else:
        code = SMALL if established.negligible else NOTHING
    return replace(verdict, verdict=code)


def _dependence(verdict: Verdict, smallest: float) -> str:
    """The fate of the spread."""
    change = verdict.changes.get(SPREAD)
    if change is None or len(verdict.means) < 2:
        return ""
    established = verdict.spread_p < ALPHA
    if established and abs(change.value.value) >= smallest:
        return SHRANK if change.value.value < 0 else GREW
    steady = 0.0 if verdict.before is None else SAME_SPREAD * verdict.before.spread.value
    return STEADY if established or max(-change.value.low, change.value.high) <= steady else OPEN


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
    undecided: str = ""
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
    examined = [_examined(before, arm, positions, smallest) for arm in methods]
    tests = len(JUDGED) * sum(bool(verdict.changes) and not verdict.withheld for verdict in examined)
    for number, (arm, verdict) in enumerate(zip(methods, examined, strict=True)):
        if any(change != UNCHANGED for change in verdict.changes.values()):
            mean = verdict.changes[MEAN]
            rise = max(mean.value.value, DECIDING_RISE)
            needed = samples_for(*_complete(before, arm.after), rise, max(1, tests))
            examined[number] = replace(verdict, changes={**verdict.changes, MEAN: replace(mean, needed=needed)})
    decided, recommended = settle(examined, smallest)
    return Judgement(measure, tuple(positions), position_means(before), decided, recommended, smallest)


def choose_measure(measures: Mapping[str, Scores], *, undecided: str = "") -> MeasureChoice:
    """The measure by which methods are judged, chosen from the unchanged model's measures alone.

    Accuracy, unless it lies below 10 % or above 90 % on average, or its answers decide nothing (`undecided`), and
    log-probabilities are there.
    """
    if "accuracy" not in measures:
        if "logprob" not in measures:
            raise UsageError("no answer was judged and none scored, so nothing can be compared")
        return MeasureChoice("logprob")
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


def _examined(before: Scores, arm: ArmScores, positions: Sequence[int], smallest: float) -> Verdict:
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
        before=levels_of(old) if enough else None,
        after=levels_of(new) if enough else None,
        means=position_means(arm.after),
        gains={},
        harms={},
        n_samples=len(old),
        samples_needed=needed,
        lost=int((~np.isnan(before).any(axis=1)).sum() - len(old)),
        formerly_best=positions[int(np.argmax(old.mean(axis=0)))] if enough else None,
        lowered=int((rises <= -max(smallest, AGREEMENT)).sum()),
        withheld=arm.withheld,
    )


def _effect(effect: SideEffect, smallest: float) -> Effect:
    """One side effect, tested against its tolerance; scores must change by what matters, too."""
    of_scores = effect.worse < 0
    complete = ~(np.isnan(effect.before) | np.isnan(effect.after))
    before, after = effect.before[complete], effect.after[complete]
    bound, needed = effect.worse * effect.tolerance, samples_needed(np.concatenate([before, after]))
    compared = Change(Interval(float((after - before).mean()) if len(before) else np.nan, -np.inf, np.inf), 1.0)
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
