"""Published claims put to the test: how many hold, what fails, a table of all verdicts, and each with its evidence.

A record holds the names of claims and premises, and numbers. The words stand with the claims, as templates over those
numbers, and are filled here: for the page, for a terminal and for JSON.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import TextWrapper
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import InstanceOf

from posbias.display.figures import RUNS, Curve, Figure
from posbias.display.showing import Shown
from posbias.registry import Registry
from posbias.report.page import REPORTS, Report, Section
from posbias.report.tables import Table
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import MISSING

CLAIMS: Registry[Any] = Registry("claim")
"""Published claims, each with the words on its numbers."""
MODEL_CLAIMS: Registry["Words"] = Registry("claim on a model")
"""Their forms on one model, likewise."""
PREMISES: Registry["PremiseWords"] = Registry("premise")
"""Assumptions that one model can meet or not, likewise."""

Outcome = Literal["holds", "holds with a correction", "fails as stated"]
Facts = Mapping[str, Any]
"""Numbers by name, also names and lists of positions."""

EVIDENCE = "evidence"
TITLE = "Published claims put to the test"
TEXT_WIDTH = 112
"""Characters of a line of a verdict as text."""
LONGEST_LIST = 8
"""Positions of a list that are written out."""
MARKS = {"holds": "holds", "fails": "fails", "fails as stated": "fails"}
"""Colours of verdicts; the others lie between."""
PREDICATES = {
    "holds": ("holds", "hold"),
    "premises not met (holds all the same)": ("holds without its premises", "hold without their premises"),
    "premises not met (fails all the same)": ("fails, its premises not met", "fail, their premises not met"),
    "holds with a correction": ("holds with a correction", "hold with a correction"),
    "fails": ("fails", "fail"),
    "fails as stated": ("fails as stated", "fail as stated"),
}
"""Verdicts as predicates of one statement and of several; the table of the page begins with the last."""


def listed(positions: Sequence[int]) -> str:
    """Positions written out, the first of many."""
    return ", ".join(map(str, positions[:LONGEST_LIST])) + (" ..." if len(positions) > LONGEST_LIST else "")


def _filled(template: str, facts: Facts) -> str:
    """A template with the facts that it names; a number that could not be stored is NaN."""
    texts = {name: listed(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}
    return template.format(**{name: math.nan if fact is None else fact for name, fact in texts.items()})


class Words:
    """The words on a claim's numbers: templates, which a record does not hold."""

    computed: ClassVar[str]
    """Name of the finding's value."""
    sharper: ClassVar[str] = ""
    """The correction, or a stronger fact; may be empty."""

    @staticmethod
    def phrases(numbers: Facts) -> Facts:
        """Words that the templates take beside the numbers, chosen by them."""
        return {}


@dataclass(frozen=True, eq=False)
class Finding:
    """Numbers of an experiment that a verdict follows from."""

    value: float
    """The one number that decides."""
    as_stated: bool
    """True if the statement held as printed on every instance."""
    figure: InstanceOf[Figure]
    """The evidence as curves."""
    corrected: bool = False
    """True if the corrected statement held although the printed one did not."""
    numbers: Facts = field(default_factory=dict)
    instances: int = 1
    """Number of random instances that were examined."""

    @property
    def outcome(self) -> Outcome:
        """The verdict that follows from the comparisons."""
        if self.as_stated:
            return "holds"
        return "holds with a correction" if self.corrected else "fails as stated"


class PremiseWords(NamedTuple):
    """Templates over facts: an assumption, and the evidence on it, which whether it is met may choose."""

    text: str
    found: str | Callable[[bool, Facts], str] = ""


@dataclass(frozen=True)
class Premise:
    """An assumption as it is found on a model."""

    name: str
    met: bool
    facts: Facts = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The assumption."""
        return _filled(PREMISES[self.name].text, self.facts)

    @property
    def found(self) -> str:
        """Evidence on the model, with its number; may be empty."""
        found = PREMISES[self.name].found
        return found(self.met, self.facts) if callable(found) else _filled(found, self.facts)


@dataclass(frozen=True, eq=False)
class Verdict:
    """A claim with what its experiment found, on random instances or on one model."""

    name: str
    """`paper/item`."""
    finding: Finding
    broken: bool = False
    """True if an assumption was violated on purpose."""
    premises: tuple[Premise, ...] | None = None
    """On a model: the claim's assumptions as found there; None on random instances, which are drawn to meet them."""

    @property
    def claim(self) -> Any:
        """The claim as published."""
        return CLAIMS[self.name]

    @property
    def met(self) -> bool:
        """True if the model meets every premise."""
        return all(premise.met for premise in self.premises or ())

    @property
    def verdict(self) -> str:
        """holds, holds with a correction, or fails as stated; on a model holds or fails.

        If a model does not meet the premises, it says what the statement did all the same.
        """
        if self.premises is None:
            return self.finding.outcome
        outcome = "holds" if self.finding.as_stated else "fails"
        return outcome if self.met else f"premises not met ({outcome} all the same)"

    @property
    def computed(self) -> str:
        """Description of the value."""
        return self._filled("computed")

    @property
    def sharper(self) -> str:
        """The correction, or a stronger fact, with its numbers; may be empty."""
        return self._filled("sharper")

    @property
    def value(self) -> str:
        """The number that decides, as text."""
        return f"{self.finding.value:.4g}" if math.isfinite(self.finding.value) else MISSING

    def _filled(self, name: str) -> str:
        words, numbers = self.claim if self.premises is None else MODEL_CLAIMS[self.name], self.finding.numbers
        return _filled(getattr(words, name), {**numbers, **words.phrases(numbers)})

    def as_record(self) -> dict[str, Any]:
        """Names and numbers alone, and the labels of the evidence; its curves are kept apart."""
        figure, facts = self.finding.figure, vars(self.finding)
        labels = {name: getattr(figure, name) for name in ("x_label", "y_label", "log_axes")}
        stems = [f"{EVIDENCE}/{self.name}/{number}" for number in range(len(figure.curves))]
        curves = [{"label": curve.name, "arrays": stem} for curve, stem in zip(figure.curves, stems, strict=True)]
        premises = None if self.premises is None else [dict(vars(premise)) for premise in self.premises]
        own = {"claim": self.name, "broken": self.broken, "premises": premises}
        return {**own, **facts, "figure": {**labels, "curves": curves}}

    @classmethod
    def of_record(cls, entry: Mapping[str, Any], record: Record) -> "Verdict":
        """The verdict that `as_record` stored, with its curves from the record's arrays."""
        stored = entry["figure"]
        curves = [
            Curve(curve["label"], record.arrays[f"{curve['arrays']}/x"], record.arrays[f"{curve['arrays']}/y"], stroke)
            for curve, stroke in zip(stored["curves"], RUNS, strict=False)
        ]
        figure = Figure(EVIDENCE, "", stored["x_label"], stored["y_label"], tuple(curves), log_axes=stored["log_axes"])
        value = math.nan if entry["value"] is None else entry["value"]
        finding = {**entry, "figure": figure, "value": value}
        return from_stored(cls, {**entry, "name": entry["claim"], "finding": finding})

    def as_dict(self) -> dict[str, Any]:
        """Names, numbers and the words on them, as plain values for JSON."""
        claim, finding = self.claim, self.finding
        document: dict[str, Any] = {
            "claim": self.name,
            "paper": claim.paper,
            "source": claim.source,
            "statement": claim.statement,
            "assumptions": list(claim.assumptions),
            "broken": claim.broken_by if self.broken else "",
            "computed": self.computed,
            "value": float(finding.value),
            "verdict": self.verdict,
            "sharper": self.sharper,
            "numbers": dict(finding.numbers),
            "instances": int(finding.instances),
        }
        if self.premises is not None:
            document["assumptions"] = [premise.text for premise in self.premises]
            document["premises"] = [
                {"premise": premise.text, "met": premise.met, "found": premise.found} for premise in self.premises
            ]
        return document

    def as_text(self) -> str:
        """Name and verdict, where it is stated, the statement, the number, premises on a model, the sharper fact."""
        paragraphs = [self.claim.statement, f"computed {self.value}: {self.computed}"]
        for premise in self.premises or ():
            evidence = f" ({premise.found})" if premise.found else ""
            paragraphs.append(f"premise {'met' if premise.met else 'NOT MET'}: {premise.text}{evidence}")
        paragraphs += [f"sharper: {self.sharper}"] if self.sharper else []
        wrap = TextWrapper(TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")
        head = [f"{self.name}: {self.verdict.upper()}", f"  {self.claim.source} of {self.claim.paper}"]
        return "\n".join(head + [wrap.fill(paragraph) for paragraph in paragraphs])


@RESULTS.register("verify")
@dataclass(frozen=True, eq=False, repr=False)
class ClaimsRun(Result):
    """Verdicts on published claims, as stored."""

    record: InstanceOf[Record]
    title: str = TITLE
    verdicts: tuple[Verdict, ...] = ()

    @classmethod
    def from_record(cls, record: Record) -> "ClaimsRun":
        """The verdicts that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        verdicts = tuple(Verdict.of_record(entry, record) for entry in record.scalars["verdicts"])
        return cls(record, record.resolved.get("title", TITLE), verdicts)

    def shown(self) -> Shown:
        """The verdicts as facts; each has curves of its own, on the page."""
        return Shown(self.title, facts={verdict.name: verdict.verdict for verdict in self.verdicts})


@REPORTS.register("verify")
def claims_report(run: ClaimsRun) -> Report:
    """How many claims hold, and every claim, what fails first, with its number and the curves behind it."""
    verdicts = sorted(run.verdicts, key=lambda entry: -list(PREDICATES).index(entry.verdict))
    first = verdicts[0]
    picture = replace(first.finding.figure, slug="verdict", title=f"{first.name}: {first.verdict}")
    cells = [[entry.name, entry.verdict, entry.value, entry.computed] for entry in verdicts]
    return Report(
        run.title,
        kicker="posbias · published statements on position bias as numerical experiments",
        verdict=_told(verdicts),
        picture=[picture],
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=[_claim(entry, number) for number, entry in enumerate(verdicts)],
        record=run.record,
    )


def _told(verdicts: Sequence[Verdict]) -> list[str]:
    """How many hold, and what the first one that fails says."""
    counts = Counter(entry.verdict for entry in verdicts)
    parts = [f"{counts[each]} {PREDICATES[each][counts[each] > 1]}" for each in PREDICATES if counts[each]]
    told = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    said = [f"Of {len(verdicts)} published statement{'' if len(verdicts) == 1 else 's'}: {told}."]
    if len(verdicts) > 1 and counts["holds"] == len(verdicts):
        return [f"All {len(verdicts)} published statements hold."]
    failed = [entry for entry in verdicts if MARKS.get(entry.verdict) == "fails"]
    if failed:
        said.append(f"Fails: {failed[0].claim.statement}")
    return said


def _claim(entry: Verdict, number: int) -> Section:
    instances = f"{entry.finding.instances} instance{'' if entry.finding.instances == 1 else 's'}"
    note = f"Assumes: {'; '.join(entry.claim.assumptions)}."
    note += f" Broken on purpose: {entry.claim.broken_by}." if entry.broken else ""
    if entry.premises is not None:
        premises = [
            f"{each.text} – {'met' if each.met else 'not met'}" + (f" ({each.found})" if each.found else "")
            for each in entry.premises
        ]
        note = f"Premises on this model: {'; '.join(premises)}."
    return Section(
        entry.name,
        anchor=f"claim-{number}",
        badge=entry.verdict,
        mark=MARKS.get(entry.verdict, "correction"),
        source=f"{entry.claim.paper}; {entry.claim.source}",
        texts=[entry.claim.statement, f"{entry.computed}: {entry.value}; {instances}."],
        statements=[entry.sharper] if entry.sharper else [],
        figures=[entry.finding.figure],
        pictures=False,
        note=note,
    )
