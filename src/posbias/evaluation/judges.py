"""A judge's verdicts on pairs of responses that were asked in both orders: is it right, and does it follow the slot?
And how many answers, of a judge or any model, could be read at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from posbias.evaluation.curve import Scores, is_binary
from posbias.evaluation.responders.thoughts import UNFINISHED
from posbias.statistics import Interval, StoredInterval, jackknife, leave_one_out, mean_of, wilson

UNBIASED = 0.5
"""First-pick rate of a judge that does not look at the slot."""

MOST_UNREAD = 0.1
"""Share of the answers that may be unreadable; beyond it nothing is concluded from the others."""


@dataclass(frozen=True)
class Reading:
    """Counts of the generated answers that could be read, and of those that could not."""

    answers: int
    unread: int
    """Answers in which nothing can be judged: a judge's that hold no verdict, any that never came out of thoughts."""
    unfinished: int = 0
    """Answers among them that never came out of the model's thoughts."""
    thought: int = 0
    """Answers that came with thoughts, finished or not."""

    @property
    def withheld(self) -> bool:
        """True if so many could not be read that the others, which need not be like them, decide nothing."""
        return self.unread > MOST_UNREAD * self.answers

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**asdict(self), "withheld": self.withheld, "most_unread": MOST_UNREAD}


def reading_of(tables: Mapping[str, Scores], outputs: Sequence[Mapping[str, Any]]) -> Reading:
    """Count the answers that could be read, from `Evaluation.tables` and `Evaluation.outputs`."""
    unfinished = unread = sum(row["thinking"] == UNFINISHED for row in outputs)
    answered = ~np.isnan(tables["correct"])
    if "tie" in tables:
        unread = int((np.isnan(tables["tie"]) & answered).sum())
    thought = sum(bool((row["thoughts"] or "").strip()) for row in outputs)
    return Reading(int(answered.sum()), unread, unfinished, thought)


@dataclass(frozen=True)
class Verdicts:
    """Rates of a judge's verdicts on pairs; each interval is over pairs."""

    accuracy: StoredInterval
    """Share of right verdicts, over both orders; a tie is wrong, as is what cannot be read."""
    flip_rate: StoredInterval
    """Share of pairs whose verdict names the same slot in both orders, so that the preferred response changes; of pairs
    with a response named in both."""
    first_pick: StoredInterval
    """Share of verdicts that name the first response, in the same pairs; 1/2 without position bias, as each one stands
    first once."""
    tie_rate: StoredInterval
    """Share of ties among the verdicts of pairs with one in both orders."""
    n_pairs: int
    n_both: int
    """Pairs with a response named in both orders."""
    ties: int
    """Answers that call a tie."""
    unread: int
    """Answers that hold no verdict."""
    agreed_accuracy: StoredInterval | None = None
    """Share of right verdicts in pairs whose verdict prefers the same response in both orders; None if there are none.
    """
    agreement_gain: StoredInterval | None = None
    """That share less the accuracy of one verdict in all pairs with a response named in both: what asking twice and
    keeping only verdicts that agree gains, at twice the price; None with fewer than two such pairs."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        rates = {name: getattr(self, name).as_record() for name in ("accuracy", "flip_rate", "first_pick", "tie_rate")}
        counts = {name: getattr(self, name) for name in ("n_pairs", "n_both", "ties", "unread")}
        agreement = {
            name: None if (rate := getattr(self, name)) is None else rate.as_record()
            for name in ("agreed_accuracy", "agreement_gain")
        }
        return {**rates, **counts, **agreement}


def judge_verdicts(correct: Scores, first_pick: Scores, tie: Scores) -> Verdicts:
    """Rates of verdicts in both orders.

    Args:
        correct: 1 if the verdict on a pair is right with the better response in slot 0 (column 0), 1 (column 1);
            NaN if the prompt was skipped.
        first_pick: 1 if it names the first response, 0 the second, NaN else.
        tie: 1 if it is a tie, 0 if it names a response, NaN else.
    """
    judged = correct[~np.isnan(correct).any(axis=1)]
    named = ~np.isnan(first_pick).any(axis=1)
    agreed = first_pick[:, 0] != first_pick[:, 1]  # the slot changes with the order, so the response is the same
    picked = first_pick[~np.isnan(first_pick).any(axis=1)]
    return Verdicts(
        accuracy=_mean(judged.mean(axis=1)),
        flip_rate=wilson((picked[:, 0] == picked[:, 1]).astype(np.float64)),
        first_pick=_mean(picked.mean(axis=1)),
        tie_rate=_mean(tie[~np.isnan(tie).any(axis=1)].mean(axis=1)),
        n_pairs=len(correct),
        n_both=len(picked),
        ties=int(np.nansum(tie)),
        unread=int((np.isnan(tie) & ~np.isnan(correct)).sum()),
        agreed_accuracy=wilson(correct[named & agreed, 0]) if (named & agreed).any() else None,
        agreement_gain=_agreement_gain(correct[named], agreed[named]),
    )


def _agreement_gain(correct: Scores, agreed: np.ndarray) -> Interval | None:
    """Accuracy of the pairs whose two verdicts agree, less that of single verdicts, over pairs."""
    if len(agreed) < 2 or agreed.sum() < 2:
        return None
    weights = leave_one_out(len(agreed))
    right_and_agreed, share, single = (weights @ values for values in (correct[:, 0] * agreed, agreed, correct.mean(1)))
    return jackknife(right_and_agreed / share - single).interval(least=-1.0, most=1.0)


def _mean(shares: np.ndarray) -> Interval:
    """Mean of the shares of pairs, each 0, 1/2 or 1."""
    if is_binary(shares):
        return wilson(shares)
    return mean_of(shares).interval(least=0.0, most=1.0)
