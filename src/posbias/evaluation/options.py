"""`EvaluateOptions`: which samples are requested, at which positions, and how their answers are read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from posbias.checks import check_seed, check_size, check_whole, checked
from posbias.errors import UsageError
from posbias.evaluation.requirements import EFFECTIVE_LENGTH, LEVELS, Requirement
from posbias.limits import AT_ONCE, EXAMPLES, REPEATS, TOKENS
from posbias.registry import parse_literal_call, split_literals, split_numbers
from posbias.tasks.language import LanguageTask
from posbias.tasks.language.verdict_parsing import check_own

SPREAD_POSITIONS = 9
"""Positions that are requested by default: enough to see a bend, few enough to be quick."""
LEAST_THRESHOLD = 0.4
"""Smallest threshold of an effective length: below it the low end of so skewed a share claims too much."""

REQUESTS = "requests"
COUNTED = (REQUESTS, "tokens")
"""Units of a budget that are no money."""
_NUMBER = r"(?P<number>\d+\.?\d*(?:[eE]\+?\d+)?|\.\d+)"
_COUNTED = re.compile(rf"\s*(?P<unit>requests|tokens)\s*=\s*{_NUMBER}\s*")
_MONEY = re.compile(rf"\s*{_NUMBER}\s*(?P<unit>[A-Za-z]{{0,3}}|[€$£¥])\s*")


@dataclass(frozen=True)
class Budget:
    """The most that one call may ask of a server."""

    unit: str
    """`requests`, `tokens` (of prompts and answers), or the name of a currency, which may be empty."""
    most: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read a budget from text: `requests=500`, `tokens=2e6`, `2 USD` or `0.5`."""
        match = _COUNTED.fullmatch(text) or _MONEY.fullmatch(text)
        if match is None or not float(match["number"]):
            raise UsageError(f"max_cost {text!r}: allowed: requests=500, tokens=2e6, or money such as '2 USD', above 0")
        return cls(match["unit"], float(match["number"]))

    def text(self, amount: float) -> str:
        """An amount in the budget's unit."""
        counted = self.unit in COUNTED
        return f"{amount:,.0f} {self.unit}" if counted else f"{amount:,.4g} {self.unit}".rstrip()


@checked
@dataclass(frozen=True)
class EvaluateOptions:
    """Settings of `evaluate`: the samples that are requested, and the folder of finished ones."""

    count: int = 50
    """Samples, each requested at every position, >= 1."""
    skip: int = 0
    """Samples of the task to skip before the first one, >= 0."""
    positions: str | Sequence[int] = "spread"
    """Positions at which the moved item is put: a list such as (0, 4, 9) or its spelling "0,4,9"; "all"; "spread(5)":
    at most 5 positions, evenly spread, both ends among them; "spread": at most SPREAD_POSITIONS."""
    lengths: Annotated[Sequence[int], split_numbers] = ()
    """Lengths of prompts in tokens, ascending, such as "1024,4096", each evaluated at as many positions; empty: the
    task's own length."""
    threshold: float = 0.8
    """Accuracy that the effective length asks for at every position, in [0.4, 1)."""
    require: Requirement | None = None
    """A bound that must hold, such as `Requirement.parse("worst>=0.8")`."""
    sequential: bool = False
    """Add samples, up to `count`, until the required bound, or the threshold at each of several lengths, is decided;
    skip lengths that can no longer change the answer."""
    methods: Annotated[Sequence[Any], split_literals] = ()
    """Methods against position bias under which the first of a list of subjects is evaluated, too: spellings, paths of
    recipes that `mitigate` wrote, or objects."""
    repeats: int = 1
    """Times that the first of a list of servers is asked, each with another seed, which shows its noise (>= 1)."""
    max_cost: str | None = None
    """The most that one call asks of a server: "requests=500", "tokens=2e6", or money at the server's prices, "2 USD".
    A run stops before it would exceed this; resumed, it may use the same amount again."""
    seed: int = 0
    """Seed of samples and folds, >= 0."""
    generate: bool = True
    """Generate answers and judge them by the task's published rule."""
    score: bool = True
    """Score the right answer by teacher forcing, which also ranks models too weak to generate it."""
    max_tokens: int | None = None
    """Tokens generated at most, >= 1; None: the task's own."""
    thinking_tokens: int = 0
    """Additional tokens for thoughts before the answer, >= 0; without them a thinking model may not reach its
    answer."""
    answer_pattern: str | None = None
    """A regular expression whose one group matches the answer; other generated text counts as thoughts. None: thoughts
    are recognised by the marks that models put around them."""
    allow_code: bool = False
    """Permit a task to judge answers with Python code that it names."""
    together: int = 8
    """Samples requested at a time, >= 1; an interruption loses at most these."""
    directory: Path | None = None
    """Run directory in which finished samples are kept until the record is saved; None keeps nothing."""
    resume: bool = False
    """Continue from the samples that are there."""
    overwrite: bool = False
    """Replace finished work in the directory; it is refused otherwise."""

    def __post_init__(self) -> None:
        check_size("evaluate: count", self.count, EXAMPLES)
        check_size("evaluate: skip", self.skip, EXAMPLES, least=0)
        check_size("evaluate: together", self.together, AT_ONCE)
        check_seed(self.seed)
        check_size("evaluate: thinking_tokens", self.thinking_tokens, TOKENS, least=0)
        check_own("evaluate: answer_pattern", self.answer_pattern, groups=1)
        if self.max_tokens is not None:
            check_size("evaluate: max_tokens", self.max_tokens, TOKENS)
        if not LEAST_THRESHOLD <= self.threshold < 1:
            raise UsageError(
                f"evaluate: threshold must be at least {LEAST_THRESHOLD} and below 1, got {self.threshold:g}"
            )
        for length in self.lengths:
            check_size("evaluate: lengths", length, TOKENS)
        if list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"evaluate: lengths must ascend, each once, got {list(self.lengths)}")
        if self.lengths and not self.generate:
            raise UsageError("evaluate: several lengths are compared by accuracy, which takes generated answers")
        check_size("evaluate: repeats", self.repeats, REPEATS)
        if self.max_cost is not None:
            Budget.parse(self.max_cost)
        if self.require is not None:
            self.check_requirement(self.require)
        if self.sequential and (self.goal is None or self.goal.by_estimate):
            raise UsageError(
                "evaluate: sequential needs a bound that samples can decide: a requirement such as worst>=0.8, not by "
                "the estimate, or several lengths"
            )
        bounds_worst = self.require is not None and self.require.what == "worst"
        if self.sequential and self.lengths and bounds_worst and self.require != self.goal:
            raise UsageError(
                f"evaluate: sequential adds samples that decide threshold {self.threshold:g}, not {self.require}; give "
                "both the same number"
            )
        if not (self.generate or self.score):
            raise UsageError("nothing to do: answers are neither generated nor scored; allow at least one of the two")

    @property
    def goal(self) -> Requirement | None:
        """The bound that samples decide at one length; with several, the threshold at each."""
        return Requirement("worst", True, self.threshold) if self.lengths else self.require

    def check_plain(self, owner: str) -> None:
        """Refuse what only `evaluate` itself can do."""
        for name in ("lengths", "sequential", "methods", "repeats", "max_cost"):
            value = getattr(self, name)
            if value and value != 1:
                raise UsageError(f"{owner}: {name} is for evaluate alone, got {value!r}")

    def check_requirement(self, require: Requirement) -> None:
        """Refuse a bound that no result of these settings has a number for."""
        allowed = ("worst", EFFECTIVE_LENGTH) if self.lengths else LEVELS
        if require.what not in allowed:
            lengths = "several lengths" if self.lengths else "one length (--lengths 1024,4096 asks for several)"
            raise UsageError(f"require {require}: allowed: {', '.join(allowed)}, with {lengths}")
        require.check_possible(generated=self.generate)

    def positions_of(self, task: LanguageTask) -> tuple[int, ...]:
        """Positions of the moved item, ascending; all of them must be the task's."""
        if not isinstance(self.positions, str):
            return task.positions(list(self.positions))
        text = self.positions.strip()
        if text == "all":
            return task.positions()
        if text.startswith("spread"):
            name, values, keywords = parse_literal_call(text, "positions")
            if name == "spread" and not keywords and len(values) <= 1:
                most = values[0] if values else SPREAD_POSITIONS
                check_whole("positions: spread", most, least=1)
                spread = np.rint(np.linspace(0, task.n_items - 1, min(most, task.n_items)))
                return tuple(sorted({int(position) for position in spread}))
        try:
            chosen = [int(part) for part in text.split(",")]
        except ValueError:
            raise UsageError(
                f"positions {self.positions!r}: allowed: all, spread, spread(5), or some such as 0,4,9"
            ) from None
        return task.positions(chosen)

    def tokens_of(self, task: LanguageTask) -> int:
        """Tokens that are generated at most, thoughts included; 0 if none are."""
        return (self.max_tokens or task.max_tokens) + self.thinking_tokens if self.generate else 0
