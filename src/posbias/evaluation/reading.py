"""The answers of one evaluation that could be judged, and those that could not; the verdicts of a judge in both orders.

What cannot be judged (cut off, unread, empty, refused) counts as wrong, or is missing, and need not be like the rest.
So there is one rule: if more than a tenth of the answers are of any of these kinds, nothing is concluded from them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posbias.evaluation.curve import Scores, independent
from posbias.evaluation.responders.base import REFUSED
from posbias.statistics import Interval, StoredInterval, StoredNumber, bounded_mean

UNJUDGED = {
    "too_long": "longer than the model's context",
    "refused": "refused by the server",
    "unfinished": "still within thoughts",
    "cut_off": "cut off before what the task's rule reads was complete",
    "empty": "empty",
    "unread": "without what the task's rule judges (a verdict, letter, number or call)",
}
"""Reasons why there is no answer to judge. Prompts of the first two are left out, answers of the others are wrong."""
IN_A_VERDICT = {"cut_off": "cut off too early", "unread": "unreadable"}
"""The longer of these reasons as a verdict has them, which is a line."""
LEFT_OUT = ("too_long", "refused")
MOST_UNJUDGED = 0.1
"""Share of the answers that may not be judged; beyond it nothing is concluded from the others."""


@dataclass(frozen=True)
class Reading:
    """Counts of the answers of one evaluation that were judged, and of those that could not be."""

    answers: int = 0
    """Answers, and prompts that a server refused."""
    unjudged: Mapping[str, int] = field(default_factory=dict)
    """Those without anything to judge, by their reason in `UNJUDGED`."""
    thought: int = 0
    """Answers that came with thoughts, finished or not."""
    right: StoredNumber = np.nan
    """Share of the answers that is right by the task's rule; NaN if there is none."""

    @property
    def withheld(self) -> str:
        """Why nothing is concluded from the answers, as a clause; empty if enough of them could be judged."""
        lost = sum(self.unjudged.values())
        if lost <= MOST_UNJUDGED * self.answers:
            return ""
        words = UNJUDGED | IN_A_VERDICT
        kinds = [f"{self.unjudged[reason]} {words[reason]}" for reason in UNJUDGED if reason in self.unjudged]
        return f"{lost} of {self.answers} answers cannot be judged, more than {MOST_UNJUDGED:.0%}: {', '.join(kinds)}"


def reading_of(correct: Scores, outputs: Sequence[Mapping[str, Any]]) -> Reading:
    """Count the answers of `Evaluation.outputs`, right or wrong as the table has them; nothing is generated: 0."""
    if all(row["text"] is None for row in outputs):
        return Reading()
    reasons = Counter(row["unjudged"] for row in outputs if row["unjudged"] not in (None, "too_long"))
    answers = sum(row["text"] is not None or row["finish"] == REFUSED for row in outputs)
    thought = sum(bool((row["thoughts"] or "").strip()) for row in outputs)
    return Reading(answers, dict(reasons), thought, np.nan if np.isnan(correct).all() else float(np.nanmean(correct)))


@dataclass(frozen=True)
class Verdicts:
    """Rates of a judge's verdicts on pairs of responses; intervals are over pairs, or over their groups."""

    accuracy: StoredInterval
    """Share of right verdicts, over both orders; a tie is wrong, as is what cannot be read."""
    flip_rate: StoredInterval
    """Share of pairs whose preferred response changes with the order, the same slot being named twice; of pairs with a
    response named in both orders."""
    first_pick: StoredInterval
    """Share of verdicts that name the first response, in the same pairs; 1/2 without position bias."""
    tie_rate: StoredInterval
    """Share of ties among the verdicts of pairs with one in both orders."""
    n_both: int
    """Pairs with a response named in both orders."""
    ties: int
    """Answers that call a tie."""


def judge_verdicts(tables: Mapping[str, Scores]) -> Verdicts:
    """Rates of verdicts in both orders: the better response stands in slot 0 (column 0), then in slot 1.

    Args:
        tables: As `Evaluation.tables`. `correct`: 1 if the verdict is right, NaN if the prompt was skipped;
            `first_pick`: 1 if it names the first slot, 0 if the second, NaN if it names none; `tie`: 1 if it is a tie,
            0 if it names a response, NaN else. Pairs of one group are one independent unit, their mean.
    """
    first_pick, tie = tables["first_pick"], tables["tie"]

    def rate(values: Scores) -> Interval:
        """The mean over both orders, NaN where one lacks, whatever its distribution; infinite if there is none."""
        means = independent(values.mean(axis=1, keepdims=True), tables)[:, 0]
        known = means[~np.isnan(means)]
        return bounded_mean(known) if len(known) else Interval(np.nan, -np.inf, np.inf)

    flipped = np.where(np.isnan(first_pick).any(axis=1), np.nan, first_pick[:, 0] == first_pick[:, 1])
    return Verdicts(
        accuracy=rate(tables["correct"]),
        flip_rate=rate(flipped[:, None]),
        first_pick=rate(first_pick),
        tie_rate=rate(tie),
        n_both=int((~np.isnan(flipped)).sum()),
        ties=int(np.nansum(tie)),
    )
