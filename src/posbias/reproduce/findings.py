"""A published finding beside what came out: the statement of the source, our numbers, and a verdict from intervals."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posbias.report.reproductions import Table
from posbias.reproduce.paired import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Difference

NOT_RUN = "not run"
IN_PART = "reproduced in part"


@dataclass(frozen=True)
class Finding:
    """One published finding put to the test."""

    where: str
    """Figure or section of the source."""
    reported: str
    """What the source reports, one sentence."""
    found: str
    """What came out, with its numbers."""
    verdict: str
    """`reproduced`, `reproduced in part`, `not reproduced`, `undecided` or `not run`."""
    tests: Mapping[str, Difference] = field(default_factory=dict)
    """What the verdict rests on, by case."""

    def sentence(self) -> str:
        """Statement, numbers and verdict."""
        return f"{self.where}. Reported: {self.reported} Here: {self.found} {self.verdict.capitalize()}."

    def row(self) -> dict[str, Any]:
        """Plain values for a record."""
        tests = {name: test.as_record() for name, test in self.tests.items()}
        return {"sort": "finding", **{name: getattr(self, name) for name in _TEXTS}, "tests": tests}


_TEXTS = ("where", "reported", "found", "verdict")


def weighed(where: str, reported: str, tests: Mapping[str, Difference], *, sign: int = 1, found: str = "") -> Finding:
    """A finding that says that quantities have a sign: all must have it.

    Args:
        where: Figure or section.
        reported: The statement.
        tests: The quantities by case, as the statement would have them all of one sign.
        sign: That sign.
        found: What the quantities are, in words; their values follow.
    """
    if not tests:
        return Finding(where, reported, "no member for it in this study.", NOT_RUN)
    values = "; ".join(f"{name} {test}" for name, test in tests.items())
    return Finding(where, reported, f"{found} {values}.".strip(), combined(tests.values(), sign), dict(tests))


def combined(tests: Any, sign: int) -> str:
    """One verdict of several: reproduced if all are, not reproduced if any is contradicted and none holds."""
    counts = Counter(test.supports(sign) for test in tests)
    if counts[NOT_REPRODUCED]:
        return IN_PART if counts[REPRODUCED] else NOT_REPRODUCED
    if counts[REPRODUCED]:
        return IN_PART if counts[UNDECIDED] else REPRODUCED
    return UNDECIDED


def findings_table(findings: Sequence[Finding]) -> Table:
    """What the source reports, what came out, and the verdict."""
    header = ["where", "the source reports", "here", "verdict"]
    return Table("Published findings", header, [[getattr(entry, name) for name in _TEXTS] for entry in findings])


def tally(findings: Sequence[Finding]) -> str:
    """How many findings have which verdict."""
    counts = Counter(finding.verdict for finding in findings)
    order = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, NOT_RUN)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    return f"Of {len(findings)} published findings: {parts}."
