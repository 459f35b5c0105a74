"""How often one model uses an item at each position, as a run measured it, and what a hard distractor takes of that.

The size of the harm is the score without the distractor, or with the gold passage alone, less that with the distractor
among all passages. Both runs ask the same questions, so they are paired.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.comparison import SAME, check_same
from posbias.evaluation.curve import Scores, complete_samples, paired_difference, position_means
from posbias.evaluation.evaluation import GENERATED, Evaluation, load_evaluation, reciprocal_rank
from posbias.statistics import CONFIDENCE, StoredInterval
from posbias.tasks.language import LANGUAGE_TASKS, HardDistractor

PLACEABLE = ("accuracy", "logprob", "reciprocal_rank")
"""Measures that an order of passages may be chosen by, in 0 ... 1: the log-probability as the probability."""


@checked
@dataclass(frozen=True, eq=False)
class MeasuredUse:
    """How often one model uses an item at each position, as a run measured it."""

    scores: Scores
    """score[sample, position]: 1 right, 0 wrong, or a probability; NaN if skipped."""
    positions: tuple[int, ...]
    """Position of each column among the items, ascending."""
    n_items: int
    """Items in each context, >= 1."""
    measure: str = "accuracy"

    def __post_init__(self) -> None:
        ascending = list(self.positions) == sorted(set(self.positions))
        if len(self.positions) != self.scores.shape[1] or not ascending or not self.positions:
            raise UsageError(
                f"positions must ascend, one for each of {self.scores.shape[1]} columns, got {list(self.positions)}"
            )
        if self.positions[0] < 0 or self.positions[-1] >= self.n_items:
            raise UsageError(f"positions must lie in 0 ... {self.n_items - 1}, got {list(self.positions)}")


Measured = MeasuredUse | Evaluation | str | Path
"""A curve, or a run that measured one."""


def read_measured(run: Measured) -> MeasuredUse | Evaluation:
    """A curve as it is; a run read from its directory, so that it is read once."""
    return run if isinstance(run, MeasuredUse) else load_evaluation(run, "placing")


@checked
def measured_use(run: Measured, *, by: str | None = None) -> MeasuredUse:
    """The curve of a finished run, for placing passages.

    Args:
        run: An evaluation, or its directory, or that of an audit with behaviour; a curve is returned as it is.
        by: One of PLACEABLE; None: the first of them that the run measured.

    Raises:
        UsageError: another sort of run, an unfinished one, or a measure it does not have.
    """
    if isinstance(run, MeasuredUse):
        return run
    evaluation = load_evaluation(run, "placing")
    if evaluation.record.status != "done":
        raise UsageError("placing needs a finished run of posbias evaluate, got one that failed")
    tables = evaluation.tables
    scores = {
        "accuracy": tables["correct"],
        "logprob": np.exp(tables["logprob"]),
        "reciprocal_rank": reciprocal_rank(tables["first_rank"], tables["logprob"]),
    }
    withheld = GENERATED if evaluation.withheld else ()
    there = [name for name in PLACEABLE if name not in withheld and not np.isnan(scores[name]).all()]
    if by is None and there:
        by = there[0]
    if by not in there:
        why = f" ({evaluation.withheld})" if evaluation.withheld else ""
        raise UsageError(f"the run has no {by!r}; it has: {', '.join(there) or 'nothing to place by'}{why}")
    return MeasuredUse(scores[by], evaluation.positions, evaluation.n_items, by)


@dataclass(frozen=True)
class Harm:
    """The score that a hard distractor takes, by its place."""

    oracle: StoredInterval
    """Mean score without it."""
    alone: bool
    """True if the gold passage was then alone, so that all other passages take the score; False if only the hard
    distractor was missing."""
    places: tuple[int, ...]
    taken: tuple[StoredInterval, ...]
    """Mean drop at each place, paired over samples; positive: harm. The intervals hold at once (Bonferroni)."""
    n_samples: int
    """Samples with a score everywhere."""


def harm_of(distractor: Measured, oracle: Measured, *, by: str) -> Harm:
    """The drop from the score without the distractor to that with it in each place.

    Raises:
        UsageError: another task than that without the distractor, another model or samples, or fewer than 6 complete
            samples.
    """
    runs = [read_measured(run) for run in (distractor, oracle)]
    evaluations = [run for run in runs if isinstance(run, Evaluation)]
    gold_alone = len(evaluations) < 2 or _is_alone(*evaluations)
    moved, alone = (measured_use(run, by=by) for run in runs)
    if alone.scores.shape != (len(moved.scores), 1):
        raise UsageError(
            f"the oracle needs 1 position and the {len(moved.scores)} samples of the distractor's run, "
            f"got {alone.scores.shape[1]} and {len(alone.scores)}"
        )
    complete = complete_samples(np.hstack([alone.scores, moved.scores]), "the harm of a distractor")
    gold, *by_place = complete.T
    alpha = (1 - CONFIDENCE) / len(by_place)
    taken = tuple(paired_difference(gold, scores, alpha).value for scores in by_place)
    return Harm(position_means(complete[:, :1])[0], gold_alone, moved.positions, taken, len(complete))


def _is_alone(distracted: Evaluation, oracle: Evaluation) -> bool:
    """Whether the oracle has the gold passage alone; a run that is not of the distractor's questions is refused."""
    task = LANGUAGE_TASKS.parse(distracted.task)
    if not isinstance(task, HardDistractor):
        raise UsageError(f"an oracle says what hard_distractor takes, got a run of {distracted.task}")
    forms = {str(replace(task, without=True)): False, str(task.short_forms[0]): True}
    if oracle.task not in forms:
        raise UsageError(f"the oracle must be a run of {' or '.join(forms)}, got one of {oracle.task}")
    check_same(distracted, oracle, SAME[1:])
    for name in ("model", "method"):
        if distracted.responder.get(name) != oracle.responder.get(name):
            raise UsageError(f"the oracle was asked of another {name} than the distractor: {oracle.title!r:.100}")
    return forms[oracle.task]
