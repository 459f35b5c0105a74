"""A judge's verdicts on responses that were asked in all orders of a rotation: is it right, does it follow the slot?"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from posbias.evaluation.curve import Scores, is_binary
from posbias.runs.records import plain
from posbias.statistics import Interval, StoredInterval, jackknife, leave_one_out, mean_of, wilson

RATES = ("accuracy", "flip_rate", "first_pick")
"""Rates in which judges are compared, fields of `Verdicts`."""


@dataclass(frozen=True)
class Verdicts:
    """Rates of a judge's verdicts on pairs, or lists, of responses; each interval is over these."""

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

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        stored: dict[str, Any] = plain(asdict(self))
        return stored


def judge_verdicts(correct: Scores, chosen: Scores, tie: Scores) -> Verdicts:
    """Rates of verdicts in all orders: the best response stands in slot 0 (column 0), 1, ..., the others follow it.

    Args:
        correct: 1 if the verdict is right, NaN if the prompt was skipped.
        chosen: The slot that it names, NaN if it names none.
        tie: 1 if it is a tie, 0 if it names a response, NaN else.
    """
    judged, n_slots = correct[~np.isnan(correct).any(axis=1)], correct.shape[1]
    named = ~np.isnan(chosen).any(axis=1)
    picked = chosen[named]
    preferred = _preferred(picked)
    agreed = (preferred == preferred[:, :1]).all(axis=1)
    single, right = correct[named].mean(axis=1), (preferred[:, 0] == 0).astype(np.float64)
    majority = _majority(preferred) if n_slots > 2 and len(picked) > 1 else None
    return Verdicts(
        accuracy=_mean(judged.mean(axis=1)),
        flip_rate=wilson((~agreed).astype(np.float64)),
        first_pick=_mean((picked == 0).mean(axis=1)),
        tie_rate=_mean(tie[~np.isnan(tie).any(axis=1)].mean(axis=1)),
        n_pairs=len(correct),
        n_both=len(picked),
        ties=int(np.nansum(tie)),
        unread=int((np.isnan(tie) & ~np.isnan(correct)).sum()),
        n_slots=n_slots,
        agreed_share=wilson(agreed.astype(np.float64)) if len(agreed) else None,
        agreed_accuracy=wilson(right[agreed]) if agreed.any() else None,
        agreement_gain=_agreement_gain(single, right, agreed.astype(np.float64)),
        majority_accuracy=None if majority is None else _mean(majority),
        majority_gain=None if majority is None else mean_of(majority - single).interval(least=-1.0, most=1.0),
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


def disagreement(first: Scores, other: Scores) -> Interval | None:
    """Share of prompts on which two judges name different slots, over questions on which both name one in all orders;
    None if there are none."""
    differs = (first != other)[~np.isnan(first + other).any(axis=1)]
    return _mean(differs.mean(axis=1)) if len(differs) else None


def _preferred(chosen: Scores) -> Scores:
    """The response that stands in each chosen slot: 0 is the best one, 1 ... those that follow it."""
    n_slots = chosen.shape[1]
    return np.asarray((chosen - np.arange(n_slots)) % n_slots)


def _majority(preferred: Scores) -> np.ndarray:
    """1 if most orders prefer the best response, a share if several responses are first."""
    votes = np.stack([(preferred == response).sum(axis=1) for response in range(preferred.shape[1])], axis=1)
    first = votes == votes.max(axis=1, keepdims=True)
    return np.asarray(first[:, 0] / first.sum(axis=1))


def _agreement_gain(single: np.ndarray, right: np.ndarray, agreed: np.ndarray) -> Interval | None:
    """Accuracy of the pairs whose verdicts agree, less that of single verdicts, over pairs."""
    if len(agreed) < 2 or agreed.sum() < 2:
        return None
    weights = leave_one_out(len(agreed))
    right_and_agreed, share, alone = (weights @ values for values in (right * agreed, agreed, single))
    return jackknife(right_and_agreed / share - alone).interval(least=-1.0, most=1.0)


def _mean(shares: np.ndarray) -> Interval:
    """Mean of the shares of pairs, each 0, 1/2 or 1."""
    if is_binary(shares):
        return wilson(shares)
    return mean_of(shares).interval(least=0.0, most=1.0)
