"""A judge's verdicts on pairs of responses that were asked in both orders: is it right, does it follow the slot?"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Float64

from posbias.evaluation.curve import Scores
from posbias.evaluation.samples import independent
from posbias.statistics import CONFIDENCE, Interval, StoredInterval, bounded_mean

RATES = ("accuracy", "flip_rate", "first_pick")
"""Rates in which judges are compared, fields of `Verdicts`."""

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


def rates_of_questions(tables: Mapping[str, Scores]) -> dict[str, np.ndarray]:
    """Each question's contribution to `RATES`, from `Evaluation.tables`; NaN if a verdict is missing."""
    first_pick = tables["first_pick"]
    missing = np.isnan(first_pick).any(axis=1)
    flipped = np.where(missing, np.nan, first_pick[:, 0] == first_pick[:, 1])
    return {"accuracy": tables["correct"].mean(axis=1), "flip_rate": flipped, "first_pick": first_pick.mean(axis=1)}


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
