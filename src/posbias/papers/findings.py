"""A published finding beside what came out: the statement of the source, our numbers, and a verdict from intervals.

A statement names one or several cases, a quantity each. That all of them hold needs no correction for their number:
each has to hold with its own 95 % interval. That some hold, or that some are contradicted, is read off intervals that
hold together for the statement (Bonferroni). What is left when those of the whole page hold together is said beside.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.papers.paired import ERROR, NOT_REPRODUCED, REPRODUCED, UNDECIDED, Difference
from posbias.report.tables import Table

NOT_RUN = "not run"
IN_PART = "reproduced in part"

Tests = Mapping[str, Difference]
"""Quantities by case."""
Rule = Callable[[Tests, int | None], str]
"""A verdict from quantities: of the statement by itself (None), or where so many intervals are to hold together."""


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
    tests: Tests = field(default_factory=dict)
    """What the verdict rests on, by case."""
    rule: Rule | None = None
    """What made the verdict of the tests; None where it rests on none."""

    def sentence(self) -> str:
        """Statement, numbers and verdict."""
        return f"{self.where}. Reported: {self.reported} Here: {self.found} {self.verdict.capitalize()}."

    def together(self, quantities: int) -> str:
        """The verdict where as many intervals, those of the whole page, are to hold together."""
        return self.verdict if self.rule is None else self.rule(self.tests, quantities)


_TEXTS = ("where", "reported", "found", "verdict")


def weighed(where: str, reported: str, tests: Tests, *, sign: int = 1, found: str = "") -> Finding:
    """A finding that says that quantities have a sign: all must have it.

    Args:
        where: Figure or section.
        reported: The statement.
        tests: The quantities by case, as the statement would have them all of one sign.
        sign: That sign.
        found: What the quantities are, in words; their values follow.
    """
    return judged(where, reported, tests, rule=partial(combined, sign=sign), found=found)


def judged(where: str, reported: str, tests: Tests, *, rule: Rule, found: str = "") -> Finding:
    """A finding whose verdict a rule of its own makes of its quantities. Arguments as `weighed`."""
    if not tests:
        return Finding(where, reported, "no member for it in this study.", NOT_RUN)
    values = "; ".join(f"{name} {test}" for name, test in tests.items())
    return Finding(where, reported, f"{found} {values}.".strip(), rule(tests, None), dict(tests), rule)


def combined(tests: Tests, quantities: int | None = None, *, sign: int) -> str:
    """One verdict of several cases: reproduced if all hold, not reproduced if any is contradicted and none holds.

    Args:
        tests: The cases.
        quantities: How many intervals are to hold together; None: those of this statement.
        sign: Of the quantities, were the statement true.
    """
    own = [test.supports(sign, quantities=quantities or 1) for test in tests.values()]
    if all(each == REPRODUCED for each in own):
        return REPRODUCED
    together = quantities or len(tests)
    counts = Counter(test.supports(sign, quantities=together) for test in tests.values())
    if counts[NOT_REPRODUCED]:
        return IN_PART if counts[REPRODUCED] else NOT_REPRODUCED
    return IN_PART if counts[REPRODUCED] else UNDECIDED


def quantities_of(findings: Sequence[Finding]) -> int:
    """How many intervals the verdicts of a page rest on."""
    return sum(len(finding.tests) for finding in findings)


def finding_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Plain values for a record: texts, verdicts and, by case, quantities; `together` is what stays page-wide."""
    count = quantities_of(findings)
    return [
        {
            "sort": "finding",
            **{name: getattr(finding, name) for name in _TEXTS},
            "together": finding.together(count),
            "tests": {name: test.as_record() for name, test in finding.tests.items()},
        }
        for finding in findings
    ]


def findings_tables(findings: Sequence[Finding]) -> list[Table]:
    """Reported, found and verdict of every statement; and every quantity with its intervals and test."""
    count = quantities_of(findings)
    header = ["where", "the source reports", "here", "verdict", f"all {count} quantities together"]
    cells = [[*(getattr(entry, name) for name in _TEXTS), entry.together(count)] for entry in findings]
    return [Table("Published findings", header, cells), _quantities_table(findings)]


def _quantities_table(findings: Sequence[Finding]) -> Table:
    header = ["where", "case", "mean [95 %]", "with its statement's others", "p", "seeds"]
    cells = [
        [
            finding.where,
            case,
            str(test),
            test.among(len(finding.tests)).text("+.3f"),
            f"{test.p_value:.3f}",
            str(test.n_seeds),
        ]
        for finding in findings
        for case, test in finding.tests.items()
    ]
    return Table("Quantities over seeds; p: of a zero mean", header, cells)


def tally(findings: Sequence[Finding]) -> str:
    """How many findings have which verdict."""
    counts = Counter(finding.verdict for finding in findings)
    order = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, NOT_RUN)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    return f"Of {len(findings)} published findings: {parts}."


def chance(findings: Sequence[Finding]) -> list[str]:
    """How far verdicts may be chance: how many of a page would be had without any effect, and which stay page-wide.

    Returns:
        One sentence or two; none where no statement has seeds enough for a verdict.
    """
    weighable = [
        finding for finding in findings if any(test.n_seeds >= UNITS_FOR_CLAIM for test in finding.tests.values())
    ]
    if not weighable:
        return []
    count = quantities_of(findings)
    decided = [finding for finding in weighable if finding.verdict != UNDECIDED]
    kept = [finding for finding in decided if finding.together(count) == finding.verdict]
    kinds = Counter(finding.verdict for finding in kept)
    of_all = Counter(finding.verdict for finding in decided)
    parts = ", ".join(f"{kinds[verdict]} of {total} {verdict}" for verdict, total in of_all.items())
    return [
        f"Chance: {len(weighable)} verdicts rest on {count} quantities, intervals over seeds. Had none of them "
        f"a sign, about {ERROR:g} of the statements, {ERROR * len(weighable):.1f}, would yet be called decided. With "
        f"intervals that hold for all {count} at once (Bonferroni, {100 * (1 - ERROR / count):.4g} % each) these keep "
        f"their verdict: {parts or 'none'}."
    ]
