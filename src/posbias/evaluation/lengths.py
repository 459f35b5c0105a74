"""An evaluation at several lengths: accuracy by length and depth, and the length up to which it is high enough.

The effective length is a lower bound. A length is reached if the worst depth's low end is at least the threshold, and
all shorter lengths are reached. No correction for the number of cells is due: to claim too much, the worst cell of the
first length that truly fails would have to pass its own test, which happens in at most 5 % of runs, in 2.9 % at the
threshold 0.8 (`tests/evaluation/test_lengths.py` computes it exactly).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.curve import SAMPLES_FOR_CLAIM, Scores, complete_samples, position_means
from posbias.evaluation.evaluation import CORRECT, EffectiveLength, Evaluation, LengthEvaluation, LengthLevel
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.requirements import levels_of
from posbias.runs.records import Record, plain
from posbias.statistics import Interval, bounded_mean

MOST_SAMPLES = 10_000
"""Samples up to which it is looked how many would decide."""


def length_evaluation(
    evaluations: Mapping[int, Evaluation],
    *,
    task: str,
    options: EvaluateOptions,
    depths: tuple[float, ...],
    too_long: Mapping[int, int],
) -> LengthEvaluation:
    """The result of evaluations of one task at ascending lengths, each at as many depths.

    Lengths are missing from the first that is `too_long` throughout (with its samples).
    """
    first = next(iter(evaluations.values()))
    correct = {length: evaluation.right for length, evaluation in evaluations.items()}
    levels = _levels(evaluations, options, depths)
    record = Record("evaluate", {}, dict(first.record.resolved), seeds=dict(first.record.seeds))
    record.resolved |= {
        "title": f"{first.source or 'model'}: {task}",
        "task": task,
        "lengths": list(evaluations),
        "not_evaluated": [length for length in options.lengths if length not in evaluations],
        "depths": list(depths),
        "related": {f"{length} tokens": f"length-{length}/report.html" for length in evaluations},
    }
    for name in ("positions", "fingerprint"):
        record.resolved.pop(name, None)
    record.scalars = {
        "too_long": {
            **{
                str(length): samples
                for length, evaluation in evaluations.items()
                if (samples := int((np.nansum(evaluation.tables["too_long"], axis=1) > 0).sum()))
            },
            **{str(length): samples for length, samples in too_long.items()},
        },
        "levels": [plain(asdict(level)) for level in levels],
        "effective_length": plain(asdict(effective_length(levels, options.threshold))),
        "curves": {},
        "measures": [],
        **{
            name: [asdict(entry) for evaluation in evaluations.values() for entry in getattr(evaluation, name)]
            for name in ("refused", "unjudged")
        },
        "notices": {name: notice for evaluation in evaluations.values() for name, notice in evaluation.notices.items()},
        **{
            name: sum(getattr(evaluation, name) for evaluation in evaluations.values())
            for name in ("examples", "cut_off", "empty", "unscored", "moved_blanks", "reused", "seconds")
        },
    }
    record.arrays = {f"{CORRECT}{length}": table for length, table in correct.items()}
    outputs = tuple(row for evaluation in evaluations.values() for row in evaluation.outputs)
    return replace(LengthEvaluation.from_record(record), at=dict(evaluations), outputs=outputs)


def _levels(
    evaluations: Mapping[int, Evaluation], options: EvaluateOptions, depths: Sequence[float]
) -> list[LengthLevel]:
    """The level of every length; high ends hold jointly over all lengths that were asked for."""
    return [
        _level(length, evaluation, depths, curves=len(options.lengths)) for length, evaluation in evaluations.items()
    ]


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


def effective_length(levels: "list[LengthLevel]", threshold: float) -> EffectiveLength:
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
