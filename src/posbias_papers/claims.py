"""Published claims: a statement, its assumptions, and an experiment that returns numbers and a verdict.

A claim examines instances and reports whether the statement held as printed, and if not whether its corrected form
did; the verdict follows from those two comparisons and from nothing else. With `broken=True` an assumption is violated
on purpose, and the verdict has to change.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from posbias.checks import check_seed
from posbias.display.figures import RUNS, Curve, Figure
from posbias.errors import UsageError
from posbias.progress import track
from posbias.runs.records import Record
from posbias_papers.pages.verify import CLAIMS, EVIDENCE, TITLE, Finding, Verdict, Words


class Claim(Words, ABC):
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
        return Verdict(self.name, self.examine(generator, broken=broken), broken)


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


def evidence(
    x_label: str, y_label: str, lines: Sequence[tuple[str, Any, Any]], *, log_x: bool = False, log_y: bool = False
) -> Figure:
    """A claim's figure: lines by label, x and y, from anything array-like."""
    curves = [
        Curve(label, np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), stroke)
        for (label, x, y), stroke in zip(lines, RUNS, strict=False)
    ]
    return Figure(EVIDENCE, "", x_label, y_label, tuple(curves), log_axes="x" * log_x + "y" * log_y)


def curves(
    x_label: str, y_label: str, x: Any, lines: Mapping[str, Any], *, log_x: bool = False, log_y: bool = False
) -> Figure:
    """A claim's figure of lines over one x, by label."""
    return evidence(x_label, y_label, [(label, x, y) for label, y in lines.items()], log_x=log_x, log_y=log_y)


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
        A record of verb "verify": `scalars["verdicts"]` is the list of verdicts as names and numbers, each with its
        `figure` (labels and array names); the curves are arrays `evidence/<claim>/<number>/x` and `/y`.
    """
    record = Record(
        verb="verify",
        arguments=dict(arguments),
        resolved={"title": _title(read or {}), "command": command, **(read or {})},
        scalars={"verdicts": [verdict.as_record() for verdict in verdicts]},
        seeds={"claims": seed},
    )
    for verdict in verdicts:
        for number, curve in enumerate(verdict.finding.figure.curves):
            stem = f"{EVIDENCE}/{verdict.name}/{number}"
            record.arrays[f"{stem}/x"], record.arrays[f"{stem}/y"] = curve.x, curve.y
    return record


def tally(verdicts: Sequence[str], *, on_model: bool = False) -> str:
    """One line that counts the verdicts of each kind."""
    kinds = ["holds", "holds with a correction", "fails as stated"]
    if on_model:
        kinds = list(dict.fromkeys(["holds", "fails", *sorted(verdicts)]))
    return f"claims: {len(verdicts)}; " + ", ".join(f"{kind}: {verdicts.count(kind)}" for kind in kinds)


def _title(read: Mapping[str, Any]) -> str:
    return f"{TITLE} on {read['model'].get('source', 'a model')}" if "model" in read else TITLE
