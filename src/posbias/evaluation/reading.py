"""The answers of one evaluation that could be judged, and those that could not; the verdicts of a judge in both orders.

What cannot be judged (cut off, unread, empty, refused) counts as wrong, or is missing, and need not be like the rest.
So there is one rule: if more than a tenth of the answers are of any of these kinds, nothing is concluded from them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Float64
from pydantic import BeforeValidator

from posbias.evaluation.curve import Scores
from posbias.evaluation.responders.base import REFUSED, UNFINISHED
from posbias.evaluation.samples import independent
from posbias.statistics import CONFIDENCE, Interval, StoredInterval, StoredNumber, bounded_mean
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
    known = [table[~np.isnan(table)] for table in (tables["correct"], tables["starts"])]
    right, starts = (float(values.mean()) if len(values) else np.nan for values in known)
    answers = sum(row["text"] is not None or row["finish"] == REFUSED for row in outputs)
    return Reading(answers, dict(reasons), sum(bool((row["thoughts"] or "").strip()) for row in outputs), right, starts)


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
    unjudged = []
    for row in outputs:
        if (reason := reason_of(row)) is not None:
            detail = row["skipped"] or (call_mark(row["text"]) if reason == "unread" else "")
            unjudged.append({"sample": row["sample"], "position": row["position"], "reason": reason, "detail": detail})
    return unjudged


PerPair = Float64[np.ndarray, "_"]
Flags = Bool[np.ndarray, "_"]


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
    """`agreed_accuracy` less the accuracy of one verdict in all pairs with a response named in both orders: what
    keeping only verdicts that agree gains; None with fewer than two such pairs."""


def judge_verdicts(
    correct: Scores, first_pick: Scores, tie: Scores, clusters: Mapping[str, Scores] = MappingProxyType({})
) -> Verdicts:
    """Rates of verdicts in both orders: the better response stands in slot 0 (column 0), then in slot 1.

    Args:
        correct: 1 if the verdict is right, NaN if the prompt was skipped.
        first_pick: 1 if it names the first slot, 0 if the second, NaN if it names none.
        tie: 1 if it is a tie, 0 if it names a response, NaN else.
        clusters: `Evaluation.tables`, whose pairs of one group are one independent unit, their mean.
    """

    def units(values: PerPair, where: Flags | None = None) -> PerPair:
        """One value per pair, or its mean per group; without what is NaN, or lies elsewhere."""
        kept = values if where is None else np.where(where, values, np.nan)
        means = independent(kept[:, None], clusters)[:, 0]
        return np.asarray(means[~np.isnan(means)])

    named = ~np.isnan(first_pick).any(axis=1)
    agreed = named & (first_pick[:, 0] != first_pick[:, 1])
    agreement, rights = units(agreed.astype(np.float64), named), units(first_pick[:, 0], agreed)
    return Verdicts(
        accuracy=_mean(units(correct.mean(axis=1))),
        flip_rate=_mean(1 - agreement),
        first_pick=_mean(units(first_pick.mean(axis=1), named)),
        tie_rate=_mean(units(tie.mean(axis=1))),
        n_pairs=len(correct),
        n_both=int(named.sum()),
        ties=int(np.nansum(tie)),
        unread=int((np.isnan(tie) & ~np.isnan(correct)).sum()),
        agreed_accuracy=_mean(rights) if len(rights) else None,
        agreement_gain=_agreement_gain(rights, agreement) if agreed.sum() > 1 else None,
    )


def _agreement_gain(rights: PerPair, agreement: PerPair) -> Interval:
    """Accuracy of verdicts that agree, less that of single ones: (1 - s)(q - 1/2), with the share s that agrees, which
    is right in q; of two orders that differ, one is right.

    The interval holds for any s and q that their own intervals hold, which hold at once (Bonferroni).
    """
    right, agrees = (_mean(shares, confidence=1 - (1 - CONFIDENCE) / 2) for shares in (rights, agreement))
    differing = (1 - agrees.high, 1 - agrees.low)
    return Interval(
        (1 - agrees.value) * (right.value - 0.5),
        min(share * (right.low - 0.5) for share in differing),
        max(share * (right.high - 0.5) for share in differing),
    )


def _mean(values: PerPair, *, confidence: float = CONFIDENCE) -> Interval:
    """Mean of values in 0 ... 1, whatever their distribution; infinite if there are none."""
    return bounded_mean(values, confidence) if len(values) else Interval(np.nan, -np.inf, np.inf)
