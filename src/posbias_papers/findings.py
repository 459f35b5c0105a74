"""A published finding beside what came out: the statement of the source, our numbers, and a verdict from intervals.

Trained members are a table: factors, seed, status and arrays; rows are selected by factors and stacked over seeds, and
members that failed or diverged are counted, never averaged in. The unit is the seed. Two configurations trained with
the same seed saw the same data, so their difference is taken seed by seed. Interval and p-value are of one procedure
(Student's), which can be had at the confidence that many quantities at once need. No skewness is estimated: differences
of equally trained networks are near symmetric, with six seeds it would widen every interval, and the published pages
stay as they were judged.

A statement names one or several cases, a quantity each. That all of them hold needs no correction for their number:
each has to hold with its own 95 % interval. That some hold, or that some are contradicted, is read off intervals that
hold together for the statement (Bonferroni).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison.distances import UNITS_FOR_CLAIM
from posbias.errors import RunError, UsageError
from posbias.results.tables import Table
from posbias.statistics import CONFIDENCE, Estimate, Interval, mean_of

ERROR = 1 - CONFIDENCE
"""How often an interval, or several that hold together, may miss."""
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided"


@dataclass(frozen=True, eq=False)
class Difference:
    """A quantity with a sign, over seeds."""

    mean: Estimate
    """Mean over seeds."""
    n_seeds: int

    @property
    def interval(self) -> Interval:
        """The 95 % interval of the mean; infinite with one seed."""
        return self.among(1)

    @property
    def p_value(self) -> float:
        """Two-sided, of a zero mean; 1 where nothing is known."""
        return float(self.mean.p())

    def among(self, quantities: int) -> Interval:
        """The interval of this quantity where `quantities` of them hold together with 95 % (Bonferroni).

        Args:
            quantities: How many, this one among them; >= 1.
        """
        return self.mean.interval(1 - ERROR / quantities)

    def supports(self, *, quantities: int = 1) -> str:
        """Verdict of the interval on a positive sign.

        Args:
            quantities: How many intervals are to hold together, this one among them.

        Returns:
            `reproduced`: the interval lies above zero; `not reproduced`: below; `undecided`: it contains zero, or there
            are fewer than six seeds.
        """
        if self.n_seeds < UNITS_FOR_CLAIM:
            return UNDECIDED
        interval = self.among(quantities)
        return REPRODUCED if interval.low > 0 else NOT_REPRODUCED if interval.high < 0 else UNDECIDED

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record."""
        error = float(self.mean.error)
        return {**self.interval.as_record(), "error": error, "p_value": self.p_value, "n_seeds": self.n_seeds}

    def __str__(self) -> str:
        return self.interval.text("+.3f")


def difference(per_seed: Float64[np.ndarray, "n_seeds"]) -> Difference:
    """Mean over seeds with its interval and test.

    Args:
        per_seed: One value per seed, finite: a quantity whose sign matters, or a paired difference of two.

    Raises:
        UsageError: no seed, or a value that is not finite.
    """
    if not len(per_seed) or not np.all(np.isfinite(per_seed)):
        raise UsageError(f"a difference needs at least one seed and finite values, got {per_seed.tolist()}")
    return Difference(replace(mean_of(per_seed), skewness=np.zeros(())), len(per_seed))


FINISHED = ("done", "stopped_early")
"""Statuses of members that ended well, so that their numbers count."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One trained model."""

    factors: Mapping[str, Any]
    """Settings that tell it from other members, the seed excluded: mask, encoding, depth, ..."""
    seed: int
    status: str
    arrays: Mapping[str, np.ndarray]
    """Evaluations and profiles by name, float64; all members of equal factors have equal shapes."""

    def has(self, factors: Mapping[str, Any]) -> bool:
        """True if it has all these factors."""
        return self.factors.items() >= factors.items()


@dataclass(frozen=True, eq=False)
class Seeded:
    """A number of trained members by seed and place."""

    seeds: tuple[int, ...]
    """Increasing; a seed is here only where all its places are."""
    rows: Float64[np.ndarray, "n_seeds n_places"]

    def at(self, seeds: Sequence[int]) -> Float64[np.ndarray, "n_chosen n_places"]:
        """The rows of some of its seeds."""
        return self.rows[[self.seeds.index(seed) for seed in seeds]]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Members of one or several studies."""

    members: Sequence[Outcome]

    @cached_property
    def finished(self) -> list[Outcome]:
        """The members that ended well."""
        return [member for member in self.members if member.status in FINISHED]

    def seeds(self, **factors: Any) -> list[int]:
        """Seeds of the finished members with these factors, in order."""
        return sorted({member.seed for member in self.finished if member.has(factors)})

    def values(self, name: str, factors: Mapping[str, Any], seeds: Sequence[int]) -> Float64[np.ndarray, "n_seeds ..."]:
        """One array of the member with these factors and each seed, stacked.

        Raises:
            RunError: no such finished member, or several.
        """
        having = [member for member in self.finished if member.has(factors)]
        rows = []
        for seed in seeds:
            matching = [member for member in having if member.seed == seed and name in member.arrays]
            if len(matching) != 1:
                raise RunError(
                    f"{len(matching)} finished members with {dict(factors)}, seed {seed} and {name!r}; need 1"
                )
            rows.append(np.asarray(matching[0].arrays[name], dtype=np.float64))
        return np.stack(rows)

    def common_seeds(self, *cells: Mapping[str, Any]) -> list[int]:
        """Seeds for which every cell has a finished member."""
        return sorted(set.intersection(*(set(self.seeds(**cell)) for cell in cells))) if cells else []

    def levels(self, name: str, **factors: Any) -> list[Any]:
        """Values a factor takes among members with the given ones, in order of appearance."""
        return list(dict.fromkeys(m.factors[name] for m in self.members if name in m.factors and m.has(factors)))

    def cells(self, **factors: Any) -> list[dict[str, Any]]:
        """The factors of every sort of finished member with the given ones, in order of appearance."""
        found = {tuple(m.factors.items()): dict(m.factors) for m in self.finished if m.has(factors)}
        return list(found.values())

    def facts(self) -> dict[str, Any]:
        """For a record: how many members there are, and what each that did not finish was, and how it ended."""
        lost = [
            f"{', '.join(f'{name} {value}' for name, value in member.factors.items())}, seed {member.seed}: "
            f"{member.status}"
            for member in self.members
            if member.status not in FINISHED
        ]
        return {"members": len(self.members), "lost": lost}


NOT_RUN, UNTRAINED = "not run", "no member for it in this study."
IN_PART = "reproduced in part"

Tests = Mapping[str, Difference]
"""Quantities by case."""
Rule = Callable[[Tests], str]
"""A verdict from quantities."""


@dataclass(frozen=True)
class Finding:
    """One published finding put to the test."""

    where: str
    """Figure or section of the source."""
    reported: str
    """Claim of the source, one sentence."""
    found: str
    """Outcome here, with its numbers."""
    verdict: str
    """`reproduced`, `reproduced in part`, `not reproduced`, `undecided` or `not run`."""
    tests: Tests = field(default_factory=dict)
    """Quantities that the verdict rests on, by case."""


def weighed(where: str, reported: str, tests: Tests, *, quantity: str = "", rule: Rule | None = None) -> Finding:
    """A finding that says that quantities are positive: all must be.

    Args:
        where: Figure or section.
        reported: Claim of the source, one sentence.
        tests: The quantities by case, as the statement would have them all positive.
        quantity: Name of the quantities.
        rule: Makes the verdict of the quantities in place of `combined`.
    """
    if not tests:
        return Finding(where, reported, UNTRAINED, NOT_RUN)
    values = "; ".join(f"{name} {test}" for name, test in tests.items())
    return Finding(where, reported, f"{quantity} {values}.".strip(), (rule or combined)(tests), dict(tests))


def combined(tests: Tests) -> str:
    """One verdict of several cases: reproduced if all hold, not reproduced if any is contradicted and none holds."""
    if all(test.supports() == REPRODUCED for test in tests.values()):
        return REPRODUCED
    counts = Counter(test.supports(quantities=len(tests)) for test in tests.values())
    if counts[NOT_REPRODUCED]:
        return IN_PART if counts[REPRODUCED] else NOT_REPRODUCED
    return IN_PART if counts[REPRODUCED] else UNDECIDED


def finding_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Plain values for a record: the words, verdicts and, by case, quantities."""
    return [
        {
            "sort": "finding",
            **{name: getattr(finding, name) for name in ("where", "reported", "found", "verdict")},
            "tests": {name: test.as_record() for name, test in finding.tests.items()},
        }
        for finding in findings
    ]


def findings_tables(findings: Sequence[Finding]) -> list[Table]:
    """Reported, found and verdict of every statement; and every quantity with its intervals and test."""
    cells = [[entry.where, entry.reported, entry.found, entry.verdict] for entry in findings]
    found = Table("Published findings", ["where", "the source reports", "here", "verdict"], cells)
    header = ["where", "case", "mean [95 %]", "with its statement's others", "p", "seeds"]
    numbers = [
        [
            entry.where,
            case,
            str(test),
            test.among(len(entry.tests)).text("+.3f"),
            f"{test.p_value:.3f}",
            f"{test.n_seeds}",
        ]
        for entry in findings
        for case, test in entry.tests.items()
    ]
    return [found, Table("Quantities over seeds; p: of a zero mean", header, numbers)]


def said_of(findings: Sequence[Finding], facts: Mapping[str, Any]) -> list[str]:
    """How many findings came out, and which members (`Outcomes.facts`) did not finish; the tables have the rest."""
    lost = facts["lost"]
    left_out = f"{len(lost)} of {facts['members']} members did not finish and are left out: {'; '.join(lost[:8])}."
    counts = Counter(finding.verdict for finding in findings)
    order = (REPRODUCED, IN_PART, NOT_REPRODUCED, UNDECIDED, NOT_RUN)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    return [f"Of {len(findings)} published findings: {parts}.", *([left_out] if lost else [])]
