"""An evaluation at several lengths: accuracy by length and depth, and the length up to which it is high enough.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Float64
from pydantic import InstanceOf

from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM, Scores, complete_samples, position_means
from posbias.evaluation.evaluation import LENGTHS, Evaluation
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.requirements import EFFECTIVE_LENGTH, Requirement, RequirementCheck, levels_of
from posbias.runs.parts import below
from posbias.runs.records import Record, plain
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import Interval, bounded_mean

MOST_SAMPLES = 10_000
"""Samples up to which it is looked how many would decide."""


@dataclass(frozen=True)
class LengthLevel:
    """Accuracy at one length."""

    length: int
    """Tokens asked for."""
    task: str
    """The task at this length, as a literal call."""
    prompt_tokens: float
    """Mean tokens of its prompts; NaN if they were not counted."""
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
        if self.withheld:
            return None
        if self.worst.low >= threshold:
            return True
        return False if self.worst.high < threshold else None


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
    samples_needed: int | None = None
    """Samples that would decide about `undecided` if its worst depth stays as it is; None: more than MOST_SAMPLES."""


@RESULTS.register("evaluate_lengths")
@dataclass(frozen=True, eq=False, repr=False)
class LengthEvaluation(Result):
    """Answers of a model to one task at several lengths: an evaluation each, and what they say together."""

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
    found: ClassVar[bool] = False

    @classmethod
    def from_record(cls, record: Record) -> "LengthEvaluation":
        """The evaluations that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        at = {
            int(length): Evaluation.from_record(
                Record("evaluate", {}, **part, arrays=below(record.arrays, f"{length}/"), seeds=record.seeds)
            )
            for length, part in record.scalars["at"].items()
        }
        return from_stored(cls, {**record.resolved, **record.scalars, "record": record, "at": at})

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
        lost = {
            length: int((np.nansum(evaluation.tables["too_long"], axis=1) > 0).sum())
            for length, evaluation in self.at.items()
        }
        lost |= dict.fromkeys(self.not_evaluated, next(iter(self.at.values())).count if self.at else 0)
        return {length: samples for length, samples in lost.items() if samples}

    @cached_property
    def levels(self) -> list[LengthLevel]:
        """The level of every length; high ends hold jointly over all lengths that were asked for."""
        curves = len(self.at) + len(self.not_evaluated)
        return [_level(length, evaluation, self.depths, curves=curves) for length, evaluation in self.at.items()]

    @property
    def effective_length(self) -> EffectiveLength:
        """The length up to which accuracy is high enough."""
        return effective_length(self.levels, self.threshold)

    @cached_property
    def cells(self) -> dict[int, tuple[Interval, ...]]:
        """Accuracy of every length and depth, each with its own interval."""
        return {length: position_means(evaluation.right) for length, evaluation in self.at.items()}

    def accuracy(self) -> Float64[np.ndarray, "lengths depths"]:
        """Mean accuracy of every cell; NaN if nothing was answered there."""
        return np.array([[cell.value for cell in cells] for cells in self.cells.values()])

    def shown(self) -> Shown:
        """The effective length."""
        return Shown(f"{self.task} at {', '.join(map(str, self.lengths))} tokens", facts=self.facts())

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on the effective length, or on the worst cell."""
        if require.what == EFFECTIVE_LENGTH:
            effective = self.effective_length
            value = Interval(effective.by_estimate, effective.at_least, np.inf)
            return RequirementCheck.of(require, EFFECTIVE_LENGTH, value)
        if require.what != "worst":
            raise UsageError(f"requirement {require}: allowed with several lengths: worst, {EFFECTIVE_LENGTH}")
        ends = [level.worst for level in self.levels]
        value = Interval(*(min(getattr(end, name) for end in ends) for name in ("value", "low", "high")))
        withheld = "; ".join(f"at {level.length} tokens {level.withheld}" for level in self.levels if level.withheld)
        return RequirementCheck.of(require, "accuracy", value, withheld=withheld)


def length_evaluation(
    evaluations: Mapping[int, Evaluation], *, task: str, options: EvaluateOptions, depths: tuple[float, ...]
) -> LengthEvaluation:
    """The result of evaluations of one task at ascending lengths, each at as many depths.

    Lengths are missing from the first that is too long throughout.
    """
    first = next(iter(evaluations.values()))
    shared = {name: fact for name, fact in first.record.resolved.items() if name not in ("positions", "fingerprint")}
    resolved = shared | {
        "title": f"{first.source or 'model'}: {task}",
        "task": task,
        "lengths": list(evaluations),
        "not_evaluated": [length for length in options.lengths if length not in evaluations],
        "depths": list(depths),
        "threshold": options.threshold,
        "related": {f"{length} tokens": f"length-{length}/report.html" for length in evaluations},
    }
    records = {str(length): evaluation.record for length, evaluation in evaluations.items()}
    record = Record(LENGTHS, {}, resolved, seeds=dict(first.record.seeds))
    record.scalars["at"] = {
        length: {"resolved": part.resolved, "scalars": part.scalars} for length, part in records.items()
    }
    record.arrays = {
        f"{length}/{name}": table for length, part in records.items() for name, table in part.arrays.items()
    }
    found = LengthEvaluation.from_record(record)
    record.scalars |= {
        "too_long": {str(length): samples for length, samples in found.too_long.items()},
        "levels": [plain(asdict(level)) for level in found.levels],
        "effective_length": plain(asdict(found.effective_length)),
    }
    return replace(found, at=evaluations)


def _level(length: int, evaluation: Evaluation, depths: Sequence[float], *, curves: int) -> LengthLevel:
    scores: Scores = evaluation.right
    n_complete = len(complete_samples(scores))
    means = np.array([cell.value for cell in position_means(scores)])
    worst = mean = Interval(float(np.nanmin(means, initial=np.inf)), 0.0, 1.0)
    if n_complete >= SAMPLES_FOR_CLAIM:
        levels = levels_of(scores, curves=curves)
        worst, mean = levels.worst, levels.mean
    return LengthLevel(
        length=length,
        task=evaluation.task,
        prompt_tokens=float(np.nanmean(evaluation.tables["prompt_tokens"])),
        n_complete=n_complete,
        worst=worst,
        worst_depth=float(depths[int(np.nanargmin(means))]),
        mean=mean,
        withheld=evaluation.withheld,
    )


def effective_length(levels: Sequence[LengthLevel], threshold: float) -> EffectiveLength:
    """The bound of ascending lengths: the last before the first that is not reached."""
    reached = [level.reaches(threshold) is True for level in levels]
    likely = [level.worst.value >= threshold and not level.withheld for level in levels]
    n_reached, n_likely = ([*passed, False].index(False) for passed in (reached, likely))
    following = levels[n_reached] if n_reached < len(levels) else None
    fails = following is not None and following.reaches(threshold) is False
    lengths = [0, *(level.length for level in levels)]
    undecided = following if following is not None and not fails else None
    return EffectiveLength(
        threshold=threshold,
        at_least=lengths[n_reached],
        by_estimate=lengths[n_likely],
        below=following.length if following is not None and fails else None,
        undecided=None if undecided is None else undecided.length,
        samples_needed=None if undecided is None else _samples_needed(undecided, threshold),
    )


def _samples_needed(level: LengthLevel, threshold: float) -> int | None:
    """Samples, more than there are, with which its worst depth would be told from the threshold."""
    count = max(SAMPLES_FOR_CLAIM, level.n_complete + 1)
    while count <= MOST_SAMPLES:
        answers = np.zeros(count)
        answers[: int(level.worst.value * count)] = 1.0
        interval = bounded_mean(answers)
        if interval.low >= threshold or interval.high < threshold:
            return count
        count += max(1, count // 10)
    return None


def depths_of(positions: Mapping[int, tuple[int, ...]], n_items: Mapping[int, int]) -> tuple[float, ...]:
    """The depths of the columns, 0 to 1, as the longest prompts have them: with fewer items they are nearly the same.

    Raises:
        UsageError: lengths at which another number of positions would be evaluated.
    """
    if len({len(columns) for columns in positions.values()}) > 1:
        counts = ", ".join(f"{len(columns)} at {length}" for length, columns in positions.items())
        fewest = min(len(columns) for columns in positions.values())
        raise UsageError(
            f"evaluate: lengths need as many positions at each, got {counts}; --positions 'spread({fewest})'"
        )
    longest = max(positions)
    return tuple(position / max(1, n_items[longest] - 1) for position in positions[longest])
