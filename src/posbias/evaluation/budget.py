"""A bound on what one call asks of a server: requests, tokens, or money at the server's prices.

What is still to come is expected from the prompts themselves, each answer with the most tokens that it may have, and
corrected by what samples have really taken so far. A call ends before the samples that would exceed its budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posbias.errors import RunError, UsageError
from posbias.evaluation.options import COUNTED, REQUESTS, Budget, EvaluateOptions
from posbias.evaluation.responders.server_options import WRAPPING
from posbias.evaluation.samples import Sample
from posbias.progress import report
from posbias.tasks.language import LanguageTask

BYTES_PER_TOKEN = 3
"""Of a prompt whose tokens are not counted."""


@dataclass
class Spending:
    """Requests and tokens of a server in this call, against a budget."""

    budget: Budget
    described: Mapping[str, Any]
    """The responder's description; it has the prices per million tokens."""
    ratio: float = 1.0
    """Tokens that samples really took, as a share of those expected; the largest so far."""
    taken: bool = field(default=False, init=False)
    """True once anything was asked."""

    def __post_init__(self) -> None:
        if REQUESTS not in self.described:
            raise UsageError("max_cost bounds what a server is asked; a model in this process has no price")
        counted = self.budget.unit in COUNTED
        if not counted and self.described["price_in"] is None and self.described["price_out"] is None:
            raise UsageError(
                f"max_cost {self.budget.text(self.budget.most)}: money needs prices per million tokens, such as "
                "--server-options 'price_in=3, price_out=15'; else requests=500 or tokens=2e6 is allowed"
            )

    def spent(self, counts: Mapping[str, float]) -> float:
        """Units of the budget taken so far, from `Responder.counts`.

        Raises:
            RunError: the server does not count tokens, of which the budget is made.
        """
        if self.budget.unit == REQUESTS:
            return counts[REQUESTS]
        if counts["uncounted"]:
            raise RunError(
                f"the server does not count tokens, so a budget of {self.budget.text(self.budget.most)} cannot be "
                "kept; allowed: --max-cost 'requests=500'; finished samples are kept"
            )
        if self.budget.unit in COUNTED:
            return counts["prompt_tokens"] + counts["generated_tokens"]
        return counts["cost"]

    def expected(self, samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions) -> float:
        """Units that samples take at most, as it looks before they are asked."""
        examples = [example for sample in samples for example in sample.examples]
        sorts = options.generate + (options.score and self.described.get("scores") is not False)
        if self.budget.unit == REQUESTS:
            return float(len(examples) * sorts)
        read = sorts * sum(
            example.n_tokens or len(str(example.prompt).encode()) / BYTES_PER_TOKEN for example in examples
        )
        around = WRAPPING if self.described.get("structured") else 0
        written = len(examples) * (options.tokens_of(task) + around + (sorts > options.generate))
        if self.budget.unit in COUNTED:
            return read + written
        return (read * (self.described["price_in"] or 0.0) + written * (self.described["price_out"] or 0.0)) / 1e6

    def note(self, taken: float, expected: float) -> None:
        """Correct what is expected by what some samples took."""
        if taken:
            self.ratio = max(taken / expected, self.ratio if self.taken else 0.0)
            self.taken = True

    def announce(self, expected: float, n_samples: int) -> None:
        """Say what the samples take at most, beside the budget."""
        most = self.budget.text(self.budget.most)
        ends = "" if expected <= self.budget.most else "; it may end before all are answered"
        report(f"{n_samples} samples take at most about {self.budget.text(expected)}; the budget is {most}{ends}")

    def affordable(self, expected: Sequence[float], spent: float) -> int:
        """Number of next samples that stay within the budget, from what each is expected to take."""
        reached = spent + self.ratio * np.cumsum(expected)
        return int((reached <= self.budget.most).sum())

    def exceeded(self, spent: float, expected: float, *, missing: int, of: int) -> RunError:
        """The error of a call that ends at its budget, with what the missing samples are expected to take."""
        return RunError(
            f"the budget of {self.budget.text(self.budget.most)} ends here, with {self.budget.text(spent)} spent: "
            f"{of - missing} of {of} samples are answered and kept, {missing} are missing (about "
            f"{self.budget.text(expected * self.ratio)}); --resume goes on with as much again"
        )
