"""Published claims: a statement, its assumptions, and an experiment that returns numbers and a verdict.

A claim examines instances and reports whether the statement held as printed, and if not whether its corrected form
did; the verdict follows from those two comparisons and from nothing else. With `broken=True` an assumption is violated
on purpose, and the verdict has to change.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import TextWrapper
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float64

from posbias.checks import check_seed
from posbias.errors import UsageError
from posbias.progress import track
from posbias.registry import Registry
from posbias.runs.records import Record

CLAIMS: Registry["Claim"] = Registry("claim")

TEXT_WIDTH = 112
"""Characters of a line of a verdict as text."""

Outcome = Literal["holds", "holds with a correction", "fails as stated"]


@dataclass(frozen=True, eq=False)
class Series:
    """One curve of a claim's figure."""

    label: str
    x: Float64[np.ndarray, "n"]
    y: Float64[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class Figure:
    """The evidence for a verdict as curves."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, eq=False)
class Finding:
    """Numbers of an experiment that a verdict follows from."""

    computed: str
    """Description of `value`."""
    value: float
    """The one number that decides."""
    as_stated: bool
    """True if the statement held as printed on every instance."""
    figure: Figure
    corrected: bool = False
    """True if the corrected statement (in `sharper`) held although the printed one did not."""
    sharper: str = ""
    """The correction, or a stronger fact, with its numbers; may be empty."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    instances: int = 1
    """Number of random instances that were examined."""

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
    met: bool
    found: str = ""
    """Evidence on the model, with its number."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """A claim with what its experiment found, on random instances or on one model."""

    claim: "Claim"
    """The claim as published."""
    finding: Finding
    broken: bool = False
    """True if an assumption was violated on purpose."""
    premises: tuple[Premise, ...] | None = None
    """On a model: the claim's assumptions as found there; None on random instances, which are drawn to meet them."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for a record; the evidence arrays are kept apart."""
        document: dict[str, Any] = {
            "claim": self.claim.name,
            "paper": self.claim.paper,
            "source": self.claim.source,
            "statement": self.claim.statement,
            "assumptions": list(self.claim.assumptions),
            "broken": self.claim.broken_by if self.broken else "",
            "computed": self.finding.computed,
            "value": float(self.finding.value),
            "verdict": self.verdict,
            "sharper": self.finding.sharper,
            "numbers": {name: float(number) for name, number in self.finding.numbers.items()},
            "instances": int(self.finding.instances),
        }
        if self.premises is not None:
            document["assumptions"] = [premise.text for premise in self.premises]
            document["premises"] = [
                {"premise": premise.text, "met": premise.met, "found": premise.found} for premise in self.premises
            ]
        return document

    def as_text(self) -> str:
        """Name and verdict, where it is stated, the statement, the number, premises on a model, the sharper fact."""
        claim, finding = self.claim, self.finding
        paragraphs = [claim.statement, f"computed {finding.value:.4g}: {finding.computed}"]
        for premise in self.premises or ():
            evidence = f" ({premise.found})" if premise.found else ""
            paragraphs.append(f"premise {'met' if premise.met else 'NOT MET'}: {premise.text}{evidence}")
        paragraphs += [f"sharper: {finding.sharper}"] if finding.sharper else []
        wrap = TextWrapper(TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")
        head = [f"{claim.name}: {self.verdict.upper()}", f"  {claim.source} of {claim.paper}"]
        return "\n".join(head + [wrap.fill(paragraph) for paragraph in paragraphs])


class Claim(ABC):
    """A published statement that can be put to the test."""

    name: ClassVar[str]
    """`paper/item`, set by the registry."""
    paper: ClassVar[str]
    source: ClassVar[str]
    """Section or theorem that states it."""
    statement: ClassVar[str]
    """One line in plain words; positions 0-based."""
    assumptions: ClassVar[tuple[str, ...]]
    broken_by: ClassVar[str]
    """The assumption that `broken=True` violates, and the way it does."""

    @abstractmethod
    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Run the experiment on random instances; with `broken`, on instances that violate an assumption."""

    def check(self, generator: np.random.Generator, *, broken: bool = False) -> Verdict:
        """The verdict on instances drawn with `generator`."""
        return Verdict(self, self.examine(generator, broken=broken), broken)


def verify(selection: str | None = None, *, seed: int = 0) -> list[Verdict]:
    """Put claims to the test.

    Args:
        selection: A claim (`wu2025/theorem-4.1`), a paper (`wu2025`), or None for every claim.
        seed: Each claim draws from its own stream of this seed, so that a verdict does not depend on the selection.

    Returns:
        One verdict per claim, papers in alphabetical order, items in the order of their names.

    Raises:
        UsageError: unknown claim or paper, or a negative seed.
    """
    check_seed(seed)
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


def curve(label: str, x: Any, y: Any) -> Series:
    """A series from anything array-like."""
    return Series(label, np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))


def curves(
    x_label: str, y_label: str, x: Any, lines: Mapping[str, Any], *, log_x: bool = False, log_y: bool = False
) -> Figure:
    """A figure of lines over one x, by label."""
    return Figure(x_label, y_label, [curve(label, x, y) for label, y in lines.items()], log_x, log_y)


def claims_record(
    verdicts: Sequence[Verdict],
    arguments: Mapping[str, Any],
    *,
    seed: int,
    command: str = "",
    read: Mapping[str, Any] | None = None,
) -> Record:
    """Verdicts with the evidence behind them.

    Args:
        verdicts: On random instances, or on one model.
        arguments: What the user passed.
        seed: Of the instances, or of the prompts.
        command: What repeats it in a shell.
        read: Of a model: `model` and `prompts` as they describe themselves.

    Returns:
        A record of verb "verify": `scalars["verdicts"]` is the list of verdicts, each with its `figure` (labels and
        array names); the curves are arrays `evidence/<claim>/<number>/x` and `/y`.
    """
    record = Record(
        verb="verify",
        arguments=dict(arguments),
        resolved={"title": _title(read or {}), "command": command, **(read or {})},
        seeds={"claims": seed},
    )
    entries = []
    for verdict in verdicts:
        figure = verdict.finding.figure
        stems = [f"evidence/{verdict.claim.name}/{number}" for number in range(len(figure.series))]
        for stem, series in zip(stems, figure.series, strict=True):
            record.arrays[f"{stem}/x"], record.arrays[f"{stem}/y"] = series.x, series.y
        described = {
            "x_label": figure.x_label,
            "y_label": figure.y_label,
            "log_x": figure.log_x,
            "log_y": figure.log_y,
            "curves": [
                {"label": series.label, "arrays": stem} for stem, series in zip(stems, figure.series, strict=True)
            ],
        }
        entries.append({**verdict.as_dict(), "figure": described})
    record.scalars["verdicts"] = entries
    return record


def tally(verdicts: Sequence[str], *, on_model: bool = False) -> str:
    """One line that counts the verdicts of each kind."""
    kinds = ["holds", "holds with a correction", "fails as stated"]
    if on_model:
        kinds = list(dict.fromkeys(["holds", "fails", *sorted(verdicts)]))
    return f"claims: {len(verdicts)}; " + ", ".join(f"{kind}: {verdicts.count(kind)}" for kind in kinds)


def _title(read: Mapping[str, Any]) -> str:
    tested = "Published claims put to the test"
    return f"{tested} on {read['model'].get('source', 'a model')}" if "model" in read else tested
