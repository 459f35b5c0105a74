"""Evaluations of one task at several lengths, and the effective length that they show.

The record has the verb "evaluate_lengths" and the fields of `LengthEvaluation`; each length has a run of its own.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import ClassVar

import numpy as np
from pydantic import InstanceOf

from posbias.errors import UsageError
from posbias.evaluation.curve import DECIDING, SAMPLES_FOR_CLAIM, complete_samples, position_means
from posbias.evaluation.evaluation import LENGTHS, Evaluation
from posbias.evaluation.levels import EFFECTIVE_LENGTH, RECOVERY, Requirement, RequirementCheck, levels_of
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.recovery import Recovery
from posbias.results.records import Record
from posbias.results.result import RESULTS, Result, as_stored
from posbias.results.showing import Shown
from posbias.statistics import CONFIDENCE, POWER, Interval, StoredInterval
from posbias.tasks.language import LanguageTask


@dataclass(frozen=True)
class LengthLevel:
    """Accuracy at one length."""

    length: int
    """Tokens asked for."""
    n_complete: int
    """Samples answered at every depth."""
    worst: StoredInterval
    """Accuracy at the worst depth; its high end holds jointly over all cells."""
    worst_depth: float
    """The depth with the lowest accuracy, 0 (begin) to 1 (end); the first of several."""
    mean: StoredInterval
    withheld: str = ""
    """Why its answers decide nothing; empty if they decide."""
    cells: tuple[StoredInterval, ...] = ()
    """Accuracy at every depth, each with its own interval."""
    recovery: Recovery | None = None
    """How much of the gain of the moved item is left; None if it was not measured."""

    @classmethod
    def of(cls, length: int, evaluation: Evaluation, depths: Sequence[float], curves: int) -> "LengthLevel":
        """The level of one length among as many as were asked for."""
        cells, n_complete = position_means(evaluation.right), len(complete_samples(evaluation.right))
        means = [cell.value for cell in cells]
        worst = mean = Interval(float(np.nanmin(means, initial=np.inf)), 0.0, 1.0)
        if n_complete >= SAMPLES_FOR_CLAIM:
            found = levels_of(evaluation.right, curves=curves)
            worst, mean = found.worst, found.mean
        deepest, withheld = depths[int(np.nanargmin(means))], evaluation.withheld
        return cls(length, n_complete, worst, deepest, mean, withheld, cells, evaluation.recovery)

    def reaches(self, threshold: float) -> bool | None:
        """True if it has this accuracy at every depth; None: not decided."""
        if self.withheld or self.worst.low < threshold <= self.worst.high:
            return None
        return self.worst.low >= threshold

    def deciding(self, threshold: float) -> int:
        """About how many samples would tell the worst depth from a threshold with 80 % power, were it as estimated.

        Normal quantiles: n = ((z[1 - alpha/2] sqrt(t (1 - t)) + z[power] sqrt(p (1 - p))) / (p - t))^2; a p nearer to t
        than DECIDING is taken to be that far.
        """
        from scipy.special import ndtri

        share, distance = self.worst.value, max(DECIDING, abs(self.worst.value - threshold))
        at_threshold, at_share = (math.sqrt(value * (1 - value)) for value in (threshold, share))
        spread = ndtri((1 + CONFIDENCE) / 2) * at_threshold + ndtri(POWER) * at_share
        return math.ceil(float(spread / distance) ** 2)


@dataclass(frozen=True)
class EffectiveLength:
    """The length up to which accuracy is at least the threshold at every depth, so far as the samples decide it."""

    threshold: float
    at_least: int
    """Longest length that is reached (tokens); 0 if none is."""
    by_estimate: int
    """The same by the estimates alone."""
    below: int | None
    """The length after it, if its worst depth is established to lie below the threshold."""
    undecided: int | None
    """The length after it, if the samples decide neither."""


def effective_length(levels: Sequence[LengthLevel], threshold: float) -> EffectiveLength:
    """The bound of ascending lengths: the last before the first that is not reached."""
    reached = list(takewhile(lambda level: level.reaches(threshold), levels))
    likely = list(takewhile(lambda level: level.worst.value >= threshold and not level.withheld, levels))
    at_least, by_estimate = (passed[-1].length if passed else 0 for passed in (reached, likely))
    following = levels[len(reached)] if len(reached) < len(levels) else None
    fails = following is not None and following.reaches(threshold) is False
    length = None if following is None else following.length
    return EffectiveLength(threshold, at_least, by_estimate, length if fails else None, None if fails else length)


@RESULTS.register(LENGTHS)
@dataclass(frozen=True, eq=False, repr=False)
class LengthEvaluation(Result):
    """Answers of a model to one task at several lengths: an evaluation each, and what they say together."""

    drawn_by: ClassVar = "posbias.evaluation.page:length_report"
    record: InstanceOf[Record]
    task: str = ""
    threshold: float = 0.8
    """Accuracy that the effective length asks for at every depth."""
    depths: tuple[float, ...] = ()
    """Depths of the columns, 0 (begin) to 1 (end)."""
    levels: tuple[LengthLevel, ...] = ()
    """The level of every length, ascending; high ends hold jointly over all lengths that were asked for."""
    too_long: Mapping[int, int] = field(default_factory=dict)
    """Samples that were too long for the model at some depth, by length; only lengths that lost some."""
    not_evaluated: tuple[int, ...] = ()
    """Longer lengths, from the first that is too long for the model throughout."""
    cut_off: int = 0
    """Answers that ended at the most tokens, at all lengths."""
    examples: int = 0
    """Prompts at all lengths."""
    notices: tuple[str, ...] = ()
    """What a reader needs to know before any number, of all lengths."""
    evaluations: Mapping[int, InstanceOf[Evaluation]] = field(default_factory=dict)
    """The evaluation at each length, if it was made with it; a run that is read back has it in `length-LENGTH`."""
    requirement: RequirementCheck | None = None
    """The bound that was required, checked; None if there was none."""

    @classmethod
    def of(
        cls,
        at: Mapping[int, Evaluation],
        *,
        task: str,
        options: EvaluateOptions,
        depths: tuple[float, ...],
        notices: Sequence[str],
    ) -> "LengthEvaluation":
        """The result of evaluations at ascending lengths, each at as many depths, and their notices.

        Lengths are missing from the first that is too long throughout.
        """
        first, own = next(iter(at.values())), ("positions", "fingerprint")
        not_evaluated = [length for length in options.lengths if length not in at]
        levels = tuple(LengthLevel.of(length, one, depths, len(options.lengths)) for length, one in at.items())
        lost = {length: int((one.tables["too_long"] > 0).any(axis=1).sum()) for length, one in at.items()}
        lost |= dict.fromkeys(not_evaluated, first.count)
        resolved = {
            **{name: told for name, told in first.record.resolved.items() if name not in own},
            "title": f"{first.source or 'model'}: {task}",
            "task": task,
            "lengths": list(at),
            "not_evaluated": not_evaluated,
            "depths": list(depths),
            "threshold": options.threshold,
            "related": {f"{length} tokens": f"length-{length}/report.html" for length in at},
        }
        scalars = {
            "levels": as_stored(levels),
            "effective_length": as_stored(effective_length(levels, options.threshold)),
            "too_long": {str(length): samples for length, samples in lost.items() if samples},
            "cut_off": sum(one.cut_off for one in at.values()),
            "examples": sum(one.examples for one in at.values()),
            "notices": list(notices),
        }
        return replace(
            cls.from_record(Record(LENGTHS, {}, resolved, scalars, seeds=dict(first.record.seeds))), evaluations=at
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that were evaluated, ascending."""
        return tuple(level.length for level in self.levels)

    @property
    def effective_length(self) -> EffectiveLength:
        """The length up to which accuracy is high enough."""
        return effective_length(self.levels, self.threshold)

    def shown(self) -> Shown:
        """The effective length."""
        return Shown(f"{self.task} at {', '.join(map(str, self.lengths))} tokens")

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on the effective length, or on the worst cell, of accuracy or recovery."""
        if require.what == EFFECTIVE_LENGTH:
            effective = self.effective_length
            return require.check(Interval(effective.by_estimate, effective.at_least, np.inf), EFFECTIVE_LENGTH)
        if require.what not in ("worst", RECOVERY):
            raise UsageError(f"requirement {require}: allowed with lengths: worst, {RECOVERY}, {EFFECTIVE_LENGTH}")
        ends, whys = [level.worst for level in self.levels], [level.withheld for level in self.levels]
        if require.what == RECOVERY:
            found = [level.recovery or Recovery() for level in self.levels]
            ends, whys = [each.worst for each in found], [each.undefined for each in found]
        value = Interval(*(min(getattr(end, name) for end in ends) for name in ("value", "low", "high")))
        withheld = "; ".join(f"at {length} tokens {why}" for length, why in zip(self.lengths, whys, strict=True) if why)
        return require.check(value, "accuracy" if require.what == "worst" else RECOVERY, withheld=withheld)


def depths_of(tasks: Mapping[int, LanguageTask], options: EvaluateOptions) -> tuple[float, ...]:
    """The depths of the columns, 0 to 1, as the longest prompts have them: with fewer items they are nearly the same.

    Raises:
        UsageError: lengths at which another number of positions would be evaluated.
    """
    positions = {length: options.positions_of(task) for length, task in tasks.items()}
    fewest = min(map(len, positions.values()))
    if fewest < max(map(len, positions.values())):
        counts = ", ".join(f"{len(columns)} at {length}" for length, columns in positions.items())
        raise UsageError(
            f"evaluate: lengths need as many positions at each, got {counts}; --positions 'spread({fewest})'"
        )
    longest = max(positions)
    return tuple(position / max(1, tasks[longest].n_items - 1) for position in positions[longest])
