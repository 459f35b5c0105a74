"""An evaluation at several lengths: accuracy by length and depth, and the length up to which it is high enough.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from jaxtyping import Float64
from pydantic import InstanceOf

from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM, Scores, position_means
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.requirements import EFFECTIVE_LENGTH, Requirement, RequirementCheck, levels_of
from posbias.runs.parts import below
from posbias.runs.records import Record, plain
from posbias.runs.results import from_stored
from posbias.statistics import Interval, StoredInterval, wilson

CORRECT = "correct/"
"""Arrays of right (1) and wrong (0) answers, by length: [n_samples n_depths], NaN if a prompt was too long."""
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
    worst: StoredInterval
    """Accuracy at the worst depth; its high end holds jointly over all cells."""
    worst_depth: float
    """The depth with the lowest accuracy, 0 (begin) to 1 (end); the first of several."""
    mean: StoredInterval
    cut_off: int = 0
    """Answers that ended at `max_tokens`; they count as wrong unless they were right before."""
    examples: int = 0


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


@dataclass(frozen=True, eq=False, repr=False)
class LengthEvaluation(Evaluation):
    """Answers of a model to one task at several lengths; `Evaluation` has the sums over all of them."""

    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    """Depths of the columns, 0 (begin) to 1 (end)."""
    levels: tuple[LengthLevel, ...] = ()
    effective_length: EffectiveLength | None = None
    correct: Mapping[int, InstanceOf[np.ndarray]] = field(default_factory=dict)
    """Right and wrong answers of every length, [n_samples n_depths]."""
    at: Mapping[int, InstanceOf[Evaluation]] = field(default_factory=dict)
    """The evaluation at each length; a run that is read back has them in `length-N` below its directory."""

    @classmethod
    def from_record(cls, record: Record) -> "LengthEvaluation":
        """The evaluations that a record holds, without their texts."""
        tables = below(record.arrays, CORRECT)
        correct = {length: tables[str(length)] for length in record.resolved["lengths"]}
        return from_stored(cls, {**record.resolved, **record.scalars, "record": record, "correct": correct})

    def cells(self) -> dict[int, tuple[Interval, ...]]:
        """Accuracy of every length and depth, each with its own interval."""
        return {length: position_means(table) for length, table in self.correct.items()}

    def accuracy(self) -> Float64[np.ndarray, "lengths depths"]:
        """Mean accuracy of every cell; NaN if nothing was answered there."""
        return np.array([[cell.value for cell in cells] for cells in self.cells().values()])

    def shown(self) -> Shown:
        """The effective length."""
        return Shown(f"{self.task} at {', '.join(map(str, self.lengths))} tokens", facts=self.facts())

    def check(self, require: Requirement) -> RequirementCheck:
        """The check of a bound on the effective length, or on the worst cell."""
        effective = self.effective_length
        assert effective is not None
        if require.what == EFFECTIVE_LENGTH:
            value = Interval(effective.by_estimate, effective.at_least, np.inf)
        elif require.what == "worst":
            ends = [level.worst for level in self.levels]
            value = Interval(*(min(getattr(end, name) for end in ends) for name in ("value", "low", "high")))
        else:
            raise UsageError(f"requirement {require}: allowed with several lengths: worst, {EFFECTIVE_LENGTH}")
        measure = EFFECTIVE_LENGTH if require.what == EFFECTIVE_LENGTH else "accuracy"
        return RequirementCheck(str(require), measure, value, require.met(value), require.by_estimate)


def length_evaluation(
    evaluations: Mapping[int, Evaluation], *, task: str, threshold: float, depths: tuple[float, ...]
) -> LengthEvaluation:
    """The result of evaluations of one task at ascending lengths, each at as many depths."""
    first = next(iter(evaluations.values()))
    correct = {length: evaluation.tables["correct"] for length, evaluation in evaluations.items()}
    levels = [_level(length, evaluation, depths, curves=len(evaluations)) for length, evaluation in evaluations.items()]
    record = Record("evaluate", {}, dict(first.record.resolved), seeds=dict(first.record.seeds))
    record.resolved |= {
        "title": f"{first.source or 'model'}: {task}",
        "task": task,
        "lengths": list(evaluations),
        "depths": list(depths),
        "related": {f"{length} tokens": f"length-{length}/report.html" for length in evaluations},
    }
    for name in ("positions", "fingerprint"):
        record.resolved.pop(name, None)
    record.scalars = {
        "levels": [plain(asdict(level)) for level in levels],
        "effective_length": plain(asdict(effective_length(levels, threshold))),
        "curves": {},
        "measures": [],
        "refused": [asdict(refusal) for evaluation in evaluations.values() for refusal in evaluation.refused],
        "notices": {name: notice for evaluation in evaluations.values() for name, notice in evaluation.notices.items()},
        **{
            name: sum(getattr(evaluation, name) for evaluation in evaluations.values())
            for name in ("examples", "cut_off", "empty", "unscored", "moved_blanks", "reused", "seconds")
        },
    }
    record.arrays = {f"{CORRECT}{length}": table for length, table in correct.items()}
    outputs = tuple(row for evaluation in evaluations.values() for row in evaluation.outputs)
    return replace(LengthEvaluation.from_record(record), at=dict(evaluations), outputs=outputs)


def _level(length: int, evaluation: Evaluation, depths: tuple[float, ...], *, curves: int) -> LengthLevel:
    scores: Scores = evaluation.tables["correct"]
    n_complete = int((~np.isnan(scores).any(axis=1)).sum())
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
        worst_depth=depths[int(np.nanargmin(means))],
        mean=mean,
        cut_off=evaluation.cut_off,
        examples=evaluation.examples,
    )


def effective_length(levels: "list[LengthLevel]", threshold: float) -> EffectiveLength:
    """The bound of ascending lengths: the last before the first that is not reached."""
    reached = [level.worst.low >= threshold for level in levels]
    likely = [level.worst.value >= threshold for level in levels]
    n_reached, n_likely = ([*passed, False].index(False) for passed in (reached, likely))
    following = levels[n_reached] if n_reached < len(levels) else None
    fails = following is not None and following.worst.high < threshold
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
        interval = wilson(answers)
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
