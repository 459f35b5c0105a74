"""How generated answers ended: by themselves, or at the most tokens that they might have, in their first line or later.

An answer that was cut off in its first line and is not right might have become so: if such answers are many, or more
under a method than without it, answers tell nothing of the method.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from posbias.evaluation.curve import SAMPLES_FOR_CLAIM, Scores, contrast_of
from posbias.evaluation.responders.base import CUT_OFF, STOPPED
from posbias.statistics import CONFIDENCE, StoredNumber

MOST_CUT = 0.1
"""Share of the answers that may be cut off before they are right; beyond it answers decide nothing."""


@dataclass(frozen=True)
class Endings:
    """Counts of the generated answers of one evaluation."""

    answers: int
    finished: int
    """Ended by an end token, or at a stop text."""
    ran_on: int
    """Ended at the most tokens, in a later line than their first."""
    cut: int
    """Ended at the most tokens, in their first line."""
    open: int
    """Those of `cut` that are not right, and might have become so."""
    others: int
    """Ended in a way of the server's own, such as its content filter."""
    contains: StoredNumber
    """Share of the answers that is right by the task's rule; NaN if there is none."""
    starts: StoredNumber
    """Share of the judged answers that begin with the right one; NaN if the task has another form of answer."""

    @property
    def share(self) -> float:
        """Share of open answers among all, 0 ... 1."""
        return self.open / self.answers if self.answers else 0.0

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record; None if a share is not known."""
        counts = asdict(self)
        return counts | {name: None if np.isnan(counts[name]) else counts[name] for name in ("contains", "starts")}


def endings_of(tables: Mapping[str, Scores], outputs: Iterable[Mapping[str, Any]]) -> Endings:
    """Count the endings of `Evaluation.outputs`, with `Evaluation.tables` of the same answers."""
    finishes = [row["finish"] for row in outputs if row["text"] is not None]
    at_most = finishes.count(CUT_OFF)
    cut = int(np.nansum(tables["cut"]))
    return Endings(
        answers=len(finishes),
        finished=finishes.count(STOPPED),
        ran_on=at_most - cut,
        cut=cut,
        open=int(np.nansum(open_answers(tables))),
        others=len(finishes) - at_most - finishes.count(STOPPED),
        contains=_mean(tables["correct"]),
        starts=_mean(tables["starts"]),
    )


def open_answers(tables: Mapping[str, Scores]) -> Scores:
    """1 if an answer was cut off in its first line and is not right, else 0; NaN if nothing was generated."""
    return np.asarray(tables["cut"] * (tables["correct"] < 1))


def _mean(table: Scores) -> float:
    values = table[~np.isnan(table)]
    return float(values.mean()) if values.size else float("nan")


@dataclass(frozen=True)
class Undecided:
    """Open answers, because of which answers tell nothing of a method."""

    open_before: int
    answers_before: int
    open_after: int
    """Open answers with the method; those without it if there is none."""
    answers_after: int
    p: float | None
    """p-value of the difference, if that is the reason; None: there are too many, more than MOST_CUT."""
    alone: bool = False
    """True if the open answers without a method are too many by themselves."""


UndecidedAnswers = Annotated[Undecided | None, BeforeValidator(lambda stored: stored or None)]
"""Open answers as a record holds them; None if they decide."""


def why_undecided(before: Mapping[str, Scores], after: Mapping[str, Scores]) -> Undecided | None:
    """The open answers because of which answers without a method and with it tell nothing of it; None if they tell.

    Args:
        before, after: Tables as `Evaluation.tables`, of the same samples.
    """
    opened = [open_answers(tables) for tables in (before, after)]
    counts = [(int(np.nansum(table)), int((~np.isnan(table)).sum())) for table in opened]
    undecided = Undecided(*counts[0], *counts[1], p=None, alone=before is after)
    if any(count > MOST_CUT * total for count, total in counts):
        return undecided
    shares = np.column_stack([table.mean(axis=1) for table in opened[::-1]])
    shares = shares[~np.isnan(shares).any(axis=1)]
    if len(shares) >= SAMPLES_FOR_CLAIM and shares.any():
        contrast = contrast_of(shares, np.array([1.0, -1.0]))
        if contrast.p < 1 - CONFIDENCE:
            return replace(undecided, p=contrast.p)
    return None
