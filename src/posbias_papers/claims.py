"""Published claims: a statement, its assumptions, an experiment that returns numbers and a verdict, and their page.

A claim examines instances and reports whether the statement held as printed, and if not whether its corrected form
did; the verdict follows from those two comparisons and from nothing else. With `broken=True` an assumption is violated
on purpose, and the verdict has to change. The words stand with the claims, as templates over their numbers.
"""

import math
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import TextWrapper
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import InstanceOf

from posbias.checks import Natural, checked
from posbias.errors import UsageError
from posbias.progress import track
from posbias.registry import Registry
from posbias.results.page import Report, Section, first_of
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.results.tables import Table
from posbias.statistics import MISSING

CLAIMS: Registry[Any] = Registry("claim")
"""Published claims, each with the words on its numbers: `computed` and `sharper`."""
MODEL_CLAIMS: Registry[Any] = Registry("claim on a model")
"""Their forms on one model, likewise."""

Outcome = Literal["holds", "holds with a correction", "fails as stated"]

PAPERS_OF_CLAIMS = {
    "birth-2603.10123": "Lost in the Middle at Birth, arXiv 2603.10123",
    "rollout-2602.16837": "A Structural Theory of Position Bias in Transformers, arXiv 2602.16837",
    "wu2025": "Wu et al. 2025, On the Emergence of Position Bias in Transformers, arXiv 2502.01951",
}
"""Title of each paper, by the first part of its claims' names."""


@dataclass(frozen=True, eq=False)
class Finding:
    """Numbers of an experiment that a verdict follows from."""

    value: float
    """The one number that decides."""
    as_stated: bool
    """True if the statement held as printed on every instance."""
    corrected: bool = False
    """True if the corrected statement held although the printed one did not."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Numbers by name, also names and lists of positions."""
    instances: int = 1
    """Number of random instances that were examined."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """What the templates take beside the numbers."""

    @property
    def outcome(self) -> Outcome:
        """The verdict that follows from the comparisons."""
        if self.as_stated:
            return "holds"
        return "holds with a correction" if self.corrected else "fails as stated"


@dataclass(frozen=True)
class Premise:
    """An assumption as it is found on a model."""

    text: str
    """The assumption."""
    met: bool
    found: str = ""
    """Evidence on the model, with its number; may be empty."""


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
    def paper(self) -> str:
        """Title of the paper that states it."""
        return PAPERS_OF_CLAIMS[self.name.split("/")[0]]

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

    def _filled(self, name: str) -> str:
        """A template with the facts that it names; a number that could not be stored is NaN."""
        words = self.claim if self.premises is None else MODEL_CLAIMS[self.name]
        facts = {**self.finding.numbers, **self.finding.words}
        texts = {name: first_of(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}
        template: str = getattr(words, name)
        return template.format(**{name: math.nan if fact is None else fact for name, fact in texts.items()})

    def as_dict(self) -> dict[str, Any]:
        """Names, numbers and the words on them, as plain values for JSON and for a record."""
        claim, finding = self.claim, self.finding
        document: dict[str, Any] = {
            "claim": self.name,
            "paper": self.paper,
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
        value = f"{self.finding.value:.4g}" if math.isfinite(self.finding.value) else MISSING
        paragraphs = [self.claim.statement, f"computed {value}: {self.computed}"]
        for premise in self.premises or ():
            evidence = f" ({premise.found})" if premise.found else ""
            paragraphs.append(f"premise {'met' if premise.met else 'NOT MET'}: {premise.text}{evidence}")
        paragraphs += [f"sharper: {self.sharper}"] if self.sharper else []
        wrap = TextWrapper(112, initial_indent="  ", subsequent_indent="    ")
        head = [f"{self.name}: {self.verdict.upper()}", f"  {self.claim.source} of {self.paper}"]
        return "\n".join(head + [wrap.fill(paragraph) for paragraph in paragraphs])


class Claim(ABC):
    """A published statement that can be put to the test."""

    name: ClassVar[str]
    """`paper/item`, set by the registry."""
    source: ClassVar[str]
    """Section or theorem that states it."""
    statement: ClassVar[str]
    """One line in plain words; positions 0-based."""
    assumptions: ClassVar[tuple[str, ...]]
    broken_by: ClassVar[str]
    """The assumption that `broken=True` violates, and the way it does."""
    computed: ClassVar[str]
    """Name of the finding's value, a template over its numbers, which a record does not hold."""
    sharper: ClassVar[str] = ""
    """The correction, or a stronger fact, likewise; may be empty."""

    @abstractmethod
    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Run the experiment on random instances; with `broken`, on instances that violate an assumption."""

    def check(self, generator: np.random.Generator, *, broken: bool = False) -> Verdict:
        """The verdict on instances drawn with `generator`."""
        return Verdict(self.name, self.examine(generator, broken=broken), broken)


@checked
def verify(selection: str | None = None, *, seed: Natural = 0) -> list[Verdict]:
    """Put claims to the test.

    Args:
        selection: A claim (`wu2025/theorem-4.1`), a paper (`wu2025`), or None for every claim.
        seed: Each claim draws from its own stream of this seed, so that a verdict does not depend on the selection.

    Returns:
        One verdict per claim, papers in alphabetical order, items in the order of their names.

    Raises:
        UsageError: unknown claim or paper, or a negative seed.
    """
    names = selected(selection)
    return [CLAIMS[name]().check(claim_generator(name, seed)) for name in track(names, "claims")]


def selected(selection: str | None) -> list[str]:
    """The names a selection stands for.

    Raises:
        UsageError: unknown claim or paper; the message lists the known papers, or the paper's claims.
    """
    if selection is None or selection in CLAIMS:
        return list(CLAIMS) if selection is None else [selection]
    papers = sorted({name.split("/")[0] for name in CLAIMS})
    prefix = selection.rstrip("/").split("/")[0]
    of_paper = [name for name in CLAIMS if name.split("/")[0] == prefix]
    if not of_paper:
        raise UsageError(f"unknown claim or paper {selection!r}; known papers: {', '.join(papers)}")
    if "/" in selection.rstrip("/"):
        raise UsageError(f"unknown claim {selection!r}; known: {', '.join(of_paper)}")
    return of_paper


def claim_generator(name: str, seed: int) -> np.random.Generator:
    """The random stream of one claim."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def claims_record(verdicts: Sequence[Verdict], *, seed: int, read: Mapping[str, Any] | None = None) -> Record:
    """Verdicts with the numbers behind them.

    Args:
        verdicts: On random instances, or on one model.
        seed: Of the instances, or of the prompts.
        read: Of a model: `model` and `prompts` as they describe themselves.

    Returns:
        A record of verb "verify": `scalars["verdicts"]` is the list of verdicts, names, numbers and words.
    """
    subject = f" on {read['model'].get('source', 'a model')}" if read and "model" in read else ""
    resolved = {"title": f"Published claims put to the test{subject}", **(read or {})}
    scalars = {"verdicts": plain([verdict.as_dict() for verdict in verdicts])}
    return Record("verify", {}, resolved, scalars, seeds={"claims": seed})


def tally(verdicts: Sequence[str], *, on_model: bool = False) -> str:
    """One line that counts the verdicts of each kind."""
    kinds = ["holds", "holds with a correction", "fails as stated"]
    if on_model:
        kinds = list(dict.fromkeys(["holds", "fails", *sorted(verdicts)]))
    return f"claims: {len(verdicts)}; " + ", ".join(f"{kind}: {verdicts.count(kind)}" for kind in kinds)


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


@RESULTS.register("verify")
@dataclass(frozen=True, eq=False, repr=False)
class ClaimsRun(Result):
    """Verdicts on published claims, as stored."""

    drawn_by: ClassVar = "posbias_papers.claims:claims_report"
    record: InstanceOf[Record]
    title: str
    verdicts: tuple[Mapping[str, Any], ...]
    """As `Verdict.as_dict` gives them."""

    def shown(self) -> Shown:
        """The title; the verdicts are on the page."""
        return Shown(self.title)


def claims_report(run: ClaimsRun) -> Report:
    """How many claims hold, and every claim, what fails first, with the numbers behind it."""
    verdicts = sorted(run.verdicts, key=lambda entry: -list(PREDICATES).index(entry["verdict"]))
    cells = [[entry["claim"], entry["verdict"], _text(entry["value"]), entry["computed"]] for entry in verdicts]
    return Report(
        kicker="posbias · published statements on position bias as numerical experiments",
        verdict=_told(verdicts),
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=list(map(_claim, verdicts)),
    )


def _told(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many hold, and what the first one that fails says."""
    counts = Counter(entry["verdict"] for entry in verdicts)
    parts = [f"{counts[each]} {PREDICATES[each][counts[each] > 1]}" for each in PREDICATES if counts[each]]
    told = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    said = [f"Of {len(verdicts)} published statement{'' if len(verdicts) == 1 else 's'}: {told}."]
    if len(verdicts) > 1 and counts["holds"] == len(verdicts):
        return [f"All {len(verdicts)} published statements hold."]
    failed = [entry for entry in verdicts if MARKS.get(entry["verdict"]) == "fails"]
    if failed:
        said.append(f"Fails: {failed[0]['statement']}")
    return said


def _claim(entry: Mapping[str, Any]) -> Section:
    instances = f"{entry['instances']} instance{'' if entry['instances'] == 1 else 's'}"
    note = f"Assumes: {'; '.join(entry['assumptions'])}."
    note += f" Broken on purpose: {entry['broken']}." if entry["broken"] else ""
    if "premises" in entry:
        premises = [
            f"{each['premise']} – {'met' if each['met'] else 'not met'}"
            + (f" ({each['found']})" if each["found"] else "")
            for each in entry["premises"]
        ]
        note = f"Premises on this model: {'; '.join(premises)}."
    cells = [[name.replace("_", " "), _text(fact)] for name, fact in entry["numbers"].items()]
    return Section(
        entry["claim"],
        badge=entry["verdict"],
        mark=MARKS.get(entry["verdict"], "correction"),
        source=f"{entry['paper']}; {entry['source']}",
        texts=[entry["statement"], f"{entry['computed']}: {_text(entry['value'])}; {instances}."],
        statements=[entry["sharper"]] if entry["sharper"] else [],
        note=note,
        tables=[Table("Numbers behind it", ["number", "value"], cells)] if cells else [],
    )


def _text(fact: Any) -> str:
    """A number, the word on one, or positions."""
    if isinstance(fact, list):
        return first_of(fact)
    return MISSING if fact is None else fact if isinstance(fact, str) else f"{fact:.4g}"
