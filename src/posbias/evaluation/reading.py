"""The answers of one evaluation that could be judged, and those that could not: cut off, unread, empty, refused.

What cannot be judged counts as wrong, or is missing, and need not be like the rest. So there is one rule: if more than
a tenth of the answers are of any of these kinds, nothing is concluded from the answers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from posbias.evaluation.curve import Scores
from posbias.evaluation.responders.base import REFUSED
from posbias.evaluation.responders.thoughts import UNFINISHED
from posbias.statistics import StoredNumber
from posbias.tasks.language.calls import call_mark

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
    starts: StoredNumber = np.nan
    """Share of the answers that begin with the right one; NaN if the task has another form of answer."""

    @property
    def withheld(self) -> str:
        """Why nothing is concluded from the answers, as a clause; empty if enough of them could be judged."""
        lost = sum(self.unjudged.values())
        if lost <= MOST_UNJUDGED * self.answers:
            return ""
        words = UNJUDGED | IN_A_VERDICT
        kinds = [f"{self.unjudged[reason]} {words[reason]}" for reason in UNJUDGED if reason in self.unjudged]
        return f"{lost} of {self.answers} answers cannot be judged, more than {MOST_UNJUDGED:.0%}: {', '.join(kinds)}"


Withheld = Annotated[str, BeforeValidator(lambda stored: stored or "")]
"""Why answers decide nothing, as `Reading.withheld`; empty if they decide, for which some records hold nothing."""


def reading_of(tables: Mapping[str, Scores], outputs: Sequence[Mapping[str, Any]]) -> Reading:
    """Count the answers of `Evaluation.outputs`, with `Evaluation.tables` of the same ones; nothing is generated: 0."""
    if all(row["text"] is None for row in outputs):
        return Reading()
    reasons = Counter(reason for row in outputs if (reason := reason_of(row)) is not None and reason != "too_long")
    return Reading(
        answers=sum(row["text"] is not None or row["finish"] == REFUSED for row in outputs),
        unjudged=dict(reasons),
        thought=sum(bool((row["thoughts"] or "").strip()) for row in outputs),
        right=_mean(tables["correct"]),
        starts=_mean(tables["starts"]),
    )


def _mean(table: Scores) -> float:
    values = table[~np.isnan(table)]
    return float(values.mean()) if values.size else float("nan")


def reason_of(row: Mapping[str, Any]) -> str | None:
    """A key of `UNJUDGED`; None if there is an answer, or none was asked for."""
    if row["skipped"] is not None:
        return "refused" if row["finish"] == REFUSED else "too_long"
    if row["text"] is None:
        return None
    if row["thinking"] == UNFINISHED:
        return "unfinished"
    if row["cut"]:
        return "cut_off"
    if not row["text"].strip():
        return "empty"
    return None if row["read"] else "unread"


def unjudged_in(outputs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The outputs without an answer that could be judged, each with its reason, as `Evaluation.unjudged`."""
    return [
        {
            "sample": row["sample"],
            "position": row["position"],
            "reason": reason,
            "detail": row["skipped"] or (call_mark(row["text"]) if reason == "unread" else ""),
        }
        for row in outputs
        if (reason := reason_of(row)) is not None
    ]
