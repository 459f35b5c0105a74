"""A judge's verdicts on responses that were asked in all orders of a rotation: is it right, does it follow the slot?"""

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
    """Rates of a judge's verdicts on pairs, or lists, of responses; intervals are over these, or over their groups."""

    accuracy: StoredInterval
    """Share of right verdicts, over both orders; a tie is wrong, as is what cannot be read."""
    flip_rate: StoredInterval
    """Share of pairs whose preferred response changes with the order: of two, the same slot is named twice; of pairs
    with a response named in all orders."""
    first_pick: StoredInterval
    """Share of verdicts that name the first response, in the same pairs; 1 / `n_slots` without position bias, as each
    one stands first once."""
    tie_rate: StoredInterval
    """Share of ties among the verdicts of pairs with one in all orders."""
    n_pairs: int
    n_both: int
    """Pairs with a response named in all orders."""
    ties: int
    """Answers that call a tie."""
    unread: int
    """Answers that hold no verdict."""
    n_slots: int = 2
    """Responses of each pair or list, and orders in which it was asked."""
    agreed_share: StoredInterval | None = None
    """Share of all pairs that verdicts decide which agree in all orders; None if no response was named in all."""
    agreed_accuracy: StoredInterval | None = None
    """Share of right verdicts in pairs whose verdict prefers the same response in all orders; None if there are none.
    """
    majority_accuracy: StoredInterval | None = None
    """Share of lists in which the response that most orders prefer is the best one (shared first places count by their
    share); None for pairs, whose two orders have no majority."""
    majority_gain: StoredInterval | None = None
    """That share less the accuracy of one verdict, in the same lists."""
    agreement_gain: StoredInterval | None = None
    """`agreed_accuracy` less the accuracy of one verdict in all pairs with a response named in all orders: what keeping
    only verdicts that agree gains; None with fewer than two such pairs."""


def judge_verdicts(
    correct: Scores, chosen: Scores, tie: Scores, clusters: Mapping[str, Scores] = MappingProxyType({})
) -> Verdicts:
    """Rates of verdicts in all orders: the best response stands in slot 0 (column 0), 1, ..., the others follow it.

    Args:
        correct: 1 if the verdict is right, NaN if the prompt was skipped.
        chosen: The slot that it names, NaN if it names none.
        tie: 1 if it is a tie, 0 if it names a response, NaN else.
        clusters: `Evaluation.tables`, whose pairs of one group are one independent unit, their mean.
    """

    def units(values: PerPair, where: Flags | None = None) -> PerPair:
        """One value per pair, or its mean per group; without what is NaN, or lies elsewhere."""
        kept = values if where is None else np.where(where, values, np.nan)
        means = independent(kept[:, None], clusters)[:, 0]
        return np.asarray(means[~np.isnan(means)])

    n_slots, named = correct.shape[1], ~np.isnan(chosen).any(axis=1)
    preferred = _preferred(chosen)
    agreed = (preferred == preferred[:, :1]).all(axis=1)
    single, right = correct.mean(axis=1), (preferred[:, 0] == 0).astype(np.float64)
    majority = _majority(preferred) if n_slots > 2 and named.sum() > 1 else None
    agreement = units(agreed.astype(np.float64), named)
    rights, others = units(right, agreed), units(single, named & ~agreed)
    return Verdicts(
        accuracy=_mean(units(single)),
        flip_rate=_mean(1 - agreement),
        first_pick=_mean(units((chosen == 0).mean(axis=1), named)),
        tie_rate=_mean(units(tie.mean(axis=1))),
        n_pairs=len(correct),
        n_both=int(named.sum()),
        ties=int(np.nansum(tie)),
        unread=int((np.isnan(tie) & ~np.isnan(correct)).sum()),
        n_slots=n_slots,
        agreed_share=_mean(agreement) if len(agreement) else None,
        agreed_accuracy=_mean(rights) if len(rights) else None,
        agreement_gain=_agreement_gain(rights, others, agreement, n_slots) if agreed.sum() > 1 else None,
        majority_accuracy=None if majority is None else _mean(units(majority, named)),
        # Where most orders prefer another response, less than half of them prefer the best.
        majority_gain=None if majority is None else _mean(units(majority - single, named), least=-0.5),
    )


def rates_of_questions(tables: Mapping[str, Scores]) -> dict[str, np.ndarray]:
    """Each question's contribution to `RATES`, from `Evaluation.tables`; NaN if a verdict is missing."""
    chosen = chosen_slots(tables)
    preferred, missing = _preferred(chosen), np.isnan(chosen).any(axis=1)
    flipped = (preferred != preferred[:, :1]).any(axis=1)
    rates = {"flip_rate": flipped.astype(np.float64), "first_pick": (chosen == 0).mean(axis=1)}
    shares = {name: np.where(missing, np.nan, values) for name, values in rates.items()}
    return {"accuracy": tables["correct"].mean(axis=1), **shares}


def chosen_slots(tables: Mapping[str, Scores]) -> Scores:
    """The slot that every verdict names, NaN if it names none, from `Evaluation.tables`."""
    return tables["chosen"] if "chosen" in tables else np.asarray(1 - tables["first_pick"])


def _preferred(chosen: Scores) -> Scores:
    """The response that stands in each chosen slot: 0 is the best one, 1 ... those that follow it."""
    n_slots = chosen.shape[1]
    return np.asarray((chosen - np.arange(n_slots)) % n_slots)


def _majority(preferred: Scores) -> PerPair:
    """1 if most orders prefer the best response, a share if several responses are first."""
    votes = np.stack([(preferred == response).sum(axis=1) for response in range(preferred.shape[1])], axis=1)
    first = votes == votes.max(axis=1, keepdims=True)
    return np.asarray(first[:, 0] / first.sum(axis=1))


def _agreement_gain(rights: PerPair, others: PerPair, agreement: PerPair, n_slots: int) -> Interval:
    """Accuracy of verdicts that agree, less that of single ones: (1 - s)(q - w), with the share s that agrees, which is
    right in q, and single verdicts on the others right in w. Of two orders that differ, one is right: w = 1/2.

    The interval holds for any s, q and w that their own intervals hold, which hold at once (Bonferroni).
    """
    parts = 2 if n_slots == 2 else 3
    confidence = 1 - (1 - CONFIDENCE) / parts
    right, agrees, other = (_mean(shares, confidence=confidence) for shares in (rights, agreement, others))
    if parts == 2:
        other = Interval(0.5, 0.5, 0.5)
    elif not len(others):
        other = Interval(0.5, 0.0, 1.0)
    differing = (1 - agrees.high, 1 - agrees.low)
    return Interval(
        (1 - agrees.value) * (right.value - other.value),
        min(share * (right.low - other.high) for share in differing),
        max(share * (right.high - other.low) for share in differing),
    )


def _mean(values: PerPair, *, least: float = 0.0, confidence: float = CONFIDENCE) -> Interval:
    """Mean of values in `least` ... 1, whatever their distribution; infinite if there are none."""
    if not len(values):
        return Interval(np.nan, -np.inf, np.inf)
    found, width = bounded_mean((values - least) / (1 - least), confidence), 1 - least
    return Interval(*(least + width * end for end in (found.value, found.low, found.high)))
