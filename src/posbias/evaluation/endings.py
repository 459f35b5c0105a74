"""How generated answers ended: by themselves, or at the most tokens that they might have, in their first line or later.

An answer that was cut off in its first line and is not right might have become so: where such answers are many, or more
under a method than without it, answers tell nothing of the method.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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
    """Share of the answers that is right by the task's rule; NaN where there is none."""
    starts: StoredNumber
    """Share of those of which it is known that begins with the right one; NaN where the task has another form."""

    @property
    def share(self) -> float:
        """Of open answers among all."""
        return self.open / self.answers if self.answers else 0.0

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record; None where a share is not known."""
        found = asdict(self)
        return found | {name: None if np.isnan(found[name]) else found[name] for name in ("contains", "starts")}


def endings_of(tables: Mapping[str, Scores], outputs: Iterable[Mapping[str, Any]]) -> Endings:
    """From `Evaluation.tables` and `Evaluation.outputs`."""
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
    """1 where an answer was cut off in its first line and is not right, else 0; NaN where nothing was generated."""
    return np.asarray(tables["cut"] * (tables["correct"] < 1))


def _mean(table: Scores) -> float:
    known = table[~np.isnan(table)]
    return float(known.mean()) if known.size else float("nan")


def why_undecided(before: Mapping[str, Scores], after: Mapping[str, Scores]) -> str:
    """Why answers without a method and with it tell nothing of it, in a clause; empty where they do.

    Args:
        before, after: Tables as `Evaluation.tables`, of the same samples.
    """
    opened = [open_answers(tables) for tables in (before, after)]
    counts = [(int(np.nansum(each)), int((~np.isnan(each)).sum())) for each in opened]
    said = " and ".join(
        f"{count} of {total} {where} it" for (count, total), where in zip(counts, ("without", "with"), strict=True)
    )
    if before is after:
        said = f"{counts[0][0]} of {counts[0][1]}"
    lead = f"answers were cut off in their first line before they were right, {said}"
    if any(count > MOST_CUT * total for count, total in counts):
        return f"{lead}; at most {MOST_CUT:.0%} may be"
    shares = np.column_stack([each.mean(axis=1) for each in opened[::-1]])
    shares = shares[~np.isnan(shares).any(axis=1)]
    if len(shares) >= SAMPLES_FOR_CLAIM and shares.any():
        found = contrast_of(shares, np.array([1.0, -1.0]))
        if found.p < 1 - CONFIDENCE:
            return f"{lead}, which differ (p = {found.p:.2g})"
    return ""
