"""Evaluations of one task at several lengths, and the effective length that they show.

The record has the verb "evaluate_lengths" and holds an evaluation for each length, with its arrays below LENGTH/.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import ClassVar

import numpy as np
from pydantic import InstanceOf

from posbias.errors import UsageError
from posbias.evaluation.curve import DECIDING, SAMPLES_FOR_CLAIM, complete_samples, position_means
from posbias.evaluation.evaluation import LENGTHS, Evaluation
from posbias.evaluation.levels import EFFECTIVE_LENGTH, Requirement, RequirementCheck, levels_of
from posbias.evaluation.options import EvaluateOptions
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result, from_stored
from posbias.results.showing import Shown
from posbias.runs.parts import below
from posbias.statistics import CONFIDENCE, POWER, Interval
from posbias.tasks.language import LanguageTask


@dataclass(frozen=True)
class LengthLevel:
    """Accuracy at one length."""

    length: int
    """Tokens asked for."""
    n_complete: int
    """Samples answered at every depth."""
    worst: Interval
    """Accuracy at the worst depth; its high end holds jointly over all cells."""
    worst_depth: float
    """The depth with the lowest accuracy, 0 (begin) to 1 (end); the first of several."""
    mean: Interval
    withheld: str = ""
    """Why its answers decide nothing, as `Reading.withheld`; empty if they decide."""

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
    said_by: ClassVar = "posbias.evaluation.page:length_verdict"
    record: InstanceOf[Record]
    task: str = ""
    threshold: float = 0.8
    """Accuracy that the effective length asks for at every depth."""
    depths: tuple[float, ...] = ()
    """Depths of the columns, 0 (begin) to 1 (end)."""
    not_evaluated: tuple[int, ...] = ()
    """Longer lengths, from the first that is too long for the model throughout."""
    at: Mapping[int, InstanceOf[Evaluation]] = field(default_factory=dict)
    """The evaluation at each length, ascending, without its texts if it was read back."""
    requirement: RequirementCheck | None = None
    """The bound that was required, checked; None if there was none."""

    @classmethod
    def from_record(cls, record: Record) -> "LengthEvaluation":
        """The evaluations that a record holds."""
        at = {
            int(length): Evaluation.from_record(
                Record("evaluate", {}, **part, arrays=below(record.arrays, f"{length}/"), seeds=record.seeds)
            )
            for length, part in record.scalars["at"].items()
        }
        return from_stored(cls, {**record.resolved, **record.scalars, "record": record, "at": at})

    @classmethod
    def of(
        cls, at: Mapping[int, Evaluation], *, task: str, options: EvaluateOptions, depths: tuple[float, ...]
    ) -> "LengthEvaluation":
        """The result of evaluations at ascending lengths, each at as many depths.

        Lengths are missing from the first that is too long throughout.
        """
        first = next(iter(at.values()))
        own = ("positions", "fingerprint")
        resolved = {name: told for name, told in first.record.resolved.items() if name not in own}
        resolved |= {
            "title": f"{first.source or 'model'}: {task}",
            "task": task,
            "lengths": list(at),
            "not_evaluated": [length for length in options.lengths if length not in at],
            "depths": list(depths),
            "threshold": options.threshold,
            "related": {f"{length} tokens": f"length-{length}/report.html" for length in at},
        }
        parts = {str(length): one.record for length, one in at.items()}
        scalars = {"at": {name: {"resolved": part.resolved, "scalars": part.scalars} for name, part in parts.items()}}
        record = Record(LENGTHS, {}, resolved, scalars, seeds=dict(first.record.seeds))
        record.arrays = {f"{name}/{key}": table for name, part in parts.items() for key, table in part.arrays.items()}
        found = cls.from_record(record)
        record.scalars["levels"] = [plain(asdict(level)) for level in found.levels]
        record.scalars["effective_length"] = plain(asdict(found.effective_length))
        return replace(found, at=at)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that were evaluated, ascending."""
        return tuple(self.at)

    @property
    def reused(self) -> int:
        """Samples that were there, finished."""
        return sum(evaluation.reused for evaluation in self.at.values())

    @property
    def too_long(self) -> dict[int, int]:
        """Samples that were too long for the model at some depth, by length; only lengths that lost some."""
        tables = {length: evaluation.tables["too_long"] for length, evaluation in self.at.items()}
        lost = {length: int((table > 0).any(axis=1).sum()) for length, table in tables.items()}
        lost |= {length: len(next(iter(tables.values()))) for length in self.not_evaluated}
        return {length: samples for length, samples in lost.items() if samples}

    @cached_property
    def levels(self) -> list[LengthLevel]:
        """The level of every length; high ends hold jointly over all lengths that were asked for."""
        levels = []
        for length, evaluation in self.at.items():
            scores, means = evaluation.right, [cell.value for cell in self.cells[length]]
            worst = mean = Interval(float(np.nanmin(means, initial=np.inf)), 0.0, 1.0)
            if (n_complete := len(complete_samples(scores))) >= SAMPLES_FOR_CLAIM:
                found = levels_of(scores, curves=len(self.at) + len(self.not_evaluated))
                worst, mean = found.worst, found.mean
            depth = self.depths[int(np.nanargmin(means))]
            levels.append(LengthLevel(length, n_complete, worst, depth, mean, evaluation.withheld))
        return levels

    @property
    def effective_length(self) -> EffectiveLength:
        """The length up to which accuracy is high enough."""
        return effective_length(self.levels, self.threshold)

    @cached_property
    def cells(self) -> dict[int, tuple[Interval, ...]]:
        """Accuracy of every length and depth, each with its own interval."""
        return {length: position_means(evaluation.right) for length, evaluation in self.at.items()}

    def shown(self) -> Shown:
        """The effective length."""
        return Shown(f"{self.task} at {', '.join(map(str, self.lengths))} tokens")

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on the effective length, or on the worst cell."""
        if require.what == EFFECTIVE_LENGTH:
            effective = self.effective_length
            return require.check(Interval(effective.by_estimate, effective.at_least, np.inf), EFFECTIVE_LENGTH)
        if require.what != "worst":
            raise UsageError(f"requirement {require}: allowed with several lengths: worst, {EFFECTIVE_LENGTH}")
        ends = [level.worst for level in self.levels]
        value = Interval(*(min(getattr(end, name) for end in ends) for name in ("value", "low", "high")))
        withheld = "; ".join(f"at {level.length} tokens {level.withheld}" for level in self.levels if level.withheld)
        return require.check(value, "accuracy", withheld=withheld)


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
