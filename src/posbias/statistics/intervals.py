"""An estimate with the ends of its confidence interval, as text and in a record.

An end is infinite where nothing is known. An interval without width says that all units agreed, not that the truth is
known: neither its text nor its record shows the ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
"""Coverage that an interval claims unless told otherwise."""
MISSING = "–"
"""What stands for a number that does not exist."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_record(cls, stored: Mapping[str, Any]) -> "Interval":
        """What `as_record` made plain."""
        value, low, high = stored["value"], stored["low"], stored["high"]
        return cls(
            math.nan if value is None else value, -math.inf if low is None else low, math.inf if high is None else high
        )

    @property
    def known(self) -> bool:
        """Whether the ends say anything: one of them is finite, and they differ."""
        return self.low < self.high and (math.isfinite(self.low) or math.isfinite(self.high))

    def excludes(self, reference: float) -> bool:
        """Whether `reference` lies outside the interval."""
        return not self.low <= reference <= self.high

    def including(self, value: float) -> "Interval":
        """The interval, extended to a value that cannot be left out."""
        return Interval(self.value, min(self.low, value), max(self.high, value))

    def as_record(self) -> dict[str, float | None]:
        """Plain numbers; None where a value is infinite or undefined, both ends where the interval is not known."""
        ends = {"low": self.low, "high": self.high} if self.known else {"low": math.nan, "high": math.nan}
        return {
            name: float(number) if math.isfinite(number) else None
            for name, number in {"value": self.value, **ends}.items()
        }

    def text(self, spec: str = ".3f", *, scale: float = 1.0, unit: str = "") -> str:
        """The value with its ends in brackets, such as `31.0 % [28.0, 35.0]`; no brackets where they are not known.

        Args:
            spec: How a number is formatted.
            scale: What every number is multiplied by, such as 100 for percent.
            unit: Follows the value, before the ends.
        """
        if math.isnan(self.value):
            return MISSING
        ends = [_plain(scale * end, spec) for end in (self.low, self.high)] if self.known else []
        return f"{_plain(scale * self.value, spec)}{unit}" + (f" [{', '.join(ends)}]" if ends else "")

    def __str__(self) -> str:
        return self.text()


def _plain(number: float, spec: str) -> str:
    """A formatted number, without the sign of a zero that only rounding made negative."""
    text = format(number, spec)
    return format(0.0, spec) if math.isfinite(number) and not float(text) else text
