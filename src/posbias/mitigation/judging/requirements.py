"""What a run may require of the model that is recommended, such as `worst>=0.6`: for pipelines."""

import re
from dataclasses import dataclass

from posbias.errors import UsageError
from posbias.mitigation.judging.verdicts import Levels
from posbias.statistics import Interval

GRAMMAR = re.compile(
    r"\s*(?P<what>[a-z]+)\s*(?P<sign>>=|<=)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)
WHAT = ("worst", "mean", "spread")


@dataclass(frozen=True)
class Requirement:
    """A bound on one number of a curve."""

    what: str
    """One of WHAT: the worst position, the mean over positions, or best minus worst."""
    at_least: bool
    number: float

    @classmethod
    def parse(cls, text: str) -> "Requirement":
        """From `worst>=0.6`, `mean>=.5` or `spread<=0.2`."""
        found = GRAMMAR.fullmatch(text)
        if found is None or found["what"] not in WHAT:
            raise UsageError(f"requirement {text!r}: allowed are {', '.join(WHAT)}, >= or <=, and a number: worst>=0.6")
        return cls(found["what"], found["sign"] == ">=", float(found["number"]))

    def value(self, levels: Levels) -> Interval:
        """What it is about, of one curve."""
        value: Interval = getattr(levels, self.what)
        return value

    @property
    def possible(self) -> bool:
        """Whether log-probabilities, none of which is above 0, could meet it."""
        return self.what == "spread" or not self.at_least or self.number <= 0

    def met(self, levels: Levels) -> bool:
        """Whether the estimate meets it; its interval may reach beyond."""
        value = self.value(levels).value
        return value >= self.number if self.at_least else value <= self.number

    def __str__(self) -> str:
        return f"{self.what}{'>=' if self.at_least else '<='}{self.number:g}"
