"""A judge's verdicts on pairs of responses that were asked in both orders: is it right, and does it follow the slot?"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.evaluation.curve import Scores, is_binary
from posbias.statistics import Interval, mean_of, wilson

UNBIASED = 0.5
"""First-pick rate of a judge that does not look at the slot."""


@dataclass(frozen=True)
class Verdicts:
    """What a judge made of some pairs; each interval is over pairs."""

    accuracy: Interval
    """Share of right verdicts, over both orders; a verdict that names neither response is wrong."""
    flip_rate: Interval
    """Share of pairs whose verdict names the same slot in both orders, so that the preferred response changes; of pairs
    with a verdict in both."""
    first_pick: Interval
    """Share of verdicts that name the first response; 1/2 without position bias, as each one stands first once."""
    n_pairs: int
    n_both: int
    """Pairs with a verdict in both orders."""
    undecided: int
    """Answers that name neither response."""

    @property
    def findings(self) -> list[str]:
        """What the intervals support."""
        first = self.first_pick
        if not first.known:
            return ["there are no verdicts in both orders, so nothing can be said of the slot"]
        leaning = "no preference for a slot is established"
        if first.excludes(UNBIASED):
            leaning = f"the {'first' if first.value > UNBIASED else 'second'} slot is preferred"
        return [
            f"right in {self.accuracy} of the verdicts",
            f"the verdict follows the slot in {self.flip_rate} of {self.n_both} pairs",
            f"the first response is picked in {first}: {leaning}",
        ]

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        rates = {name: getattr(self, name).as_record() for name in ("accuracy", "flip_rate", "first_pick")}
        counts = {name: getattr(self, name) for name in ("n_pairs", "n_both", "undecided")}
        return {**rates, **counts, "findings": self.findings}


def judge_verdicts(correct: Scores, first_pick: Scores) -> Verdicts:
    """Rates of verdicts in both orders.

    Args:
        correct: 1 where the verdict on a pair is right with the better response in slot 0 (column 0), 1 (column 1);
            NaN where the prompt was skipped.
        first_pick: 1 where it names the first response, 0 the second, NaN where neither.
    """
    asked = ~np.isnan(correct).any(axis=1)
    both = ~np.isnan(first_pick).any(axis=1)
    picked = first_pick[both]
    return Verdicts(
        accuracy=_mean(correct[asked].mean(axis=1)),
        flip_rate=wilson((picked[:, 0] == picked[:, 1]).astype(np.float64)),
        first_pick=_mean(picked.mean(axis=1)),
        n_pairs=len(correct),
        n_both=int(both.sum()),
        undecided=int((np.isnan(first_pick) & ~np.isnan(correct)).sum()),
    )


def _mean(shares: np.ndarray) -> Interval:
    """Of the shares of pairs, each 0, 1/2 or 1."""
    if is_binary(shares):
        return wilson(shares)
    return mean_of(shares).interval(least=0.0, most=1.0)
