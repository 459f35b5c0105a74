"""Published claims put to the test: how many hold, what fails, a table of all verdicts, and each with its evidence."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import InstanceOf

from posbias.display.figures import RUNS, Curve, Figure
from posbias.display.showing import Shown
from posbias.report.page import REPORTS, Report, Section
from posbias.report.tables import Table
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import MISSING

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


@dataclass(frozen=True)
class StoredPremise:
    """An assumption of a claim as it was found on a model."""

    premise: str
    met: bool
    found: str


@dataclass(frozen=True)
class EvidenceCurve:
    """Label of a curve, and the name below which its arrays lie."""

    label: str
    arrays: str


@dataclass(frozen=True)
class StoredEvidence:
    """The figure behind a verdict."""

    x_label: str
    y_label: str
    log_x: bool
    log_y: bool
    curves: tuple[EvidenceCurve, ...]


@dataclass(frozen=True)
class StoredVerdict:
    """What became of one claim."""

    claim: str
    paper: str
    source: str
    statement: str
    assumptions: tuple[str, ...]
    broken: str
    computed: str
    value: float | None
    verdict: str
    sharper: str
    instances: int
    figure: StoredEvidence
    premises: tuple[StoredPremise, ...] | None = None
    """On a model: its assumptions as found there."""


@RESULTS.register("verify")
@dataclass(frozen=True, eq=False, repr=False)
class ClaimsRun(Result):
    """Verdicts on published claims, as stored."""

    record: InstanceOf[Record]
    title: str = "Published claims put to the test"
    verdicts: tuple[StoredVerdict, ...] = ()

    @classmethod
    def from_record(cls, record: Record) -> "ClaimsRun":
        """The verdicts that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        titled = {name: record.resolved[name] for name in ("title",) if name in record.resolved}
        return from_stored(cls, {**titled, "record": record, "verdicts": record.scalars["verdicts"]})

    def shown(self) -> Shown:
        """The verdicts as facts; each has curves of its own, on the page."""
        return Shown(self.title, facts={verdict.claim: verdict.verdict for verdict in self.verdicts})


@REPORTS.register("verify")
def claims_report(run: ClaimsRun) -> Report:
    """How many claims hold, and every claim, what fails first, with its number and the curves behind it."""
    verdicts = sorted(run.verdicts, key=lambda entry: -list(PREDICATES).index(entry.verdict))
    first = verdicts[0]
    picture = replace(_evidence(run.record, first), slug="verdict", title=f"{first.claim}: {first.verdict}")
    cells = [[entry.claim, entry.verdict, _value(entry), entry.computed] for entry in verdicts]
    return Report(
        run.title,
        kicker="posbias · published statements on position bias as numerical experiments",
        verdict=_told(verdicts),
        picture=[picture],
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=[_claim(run.record, entry, number) for number, entry in enumerate(verdicts)],
        record=run.record,
    )


def _told(verdicts: Sequence[StoredVerdict]) -> list[str]:
    """How many hold; what the first one that fails says, and what was found."""
    counts = Counter(entry.verdict for entry in verdicts)
    parts = [f"{counts[each]} {PREDICATES[each][counts[each] > 1]}" for each in PREDICATES if counts[each]]
    told = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    said = [f"Of {len(verdicts)} published statement{'' if len(verdicts) == 1 else 's'}: {told}."]
    if len(verdicts) > 1 and counts["holds"] == len(verdicts):
        return [f"All {len(verdicts)} published statements hold."]
    failed = [entry for entry in verdicts if MARKS.get(entry.verdict) == "fails"]
    if failed:
        said.append(f"What fails{', first' * (len(failed) > 1)}: {failed[0].statement}")
        said += [f"What was found: {failed[0].sharper}."] if failed[0].sharper else []
    return said


def _claim(record: Record, entry: StoredVerdict, number: int) -> Section:
    instances = f"{entry.instances} instance{'' if entry.instances == 1 else 's'}"
    note = f"Assumes: {'; '.join(entry.assumptions)}."
    note += f" Broken on purpose: {entry.broken}." if entry.broken else ""
    if entry.premises is not None:
        premises = [
            f"{each.premise} – {'met' if each.met else 'not met'}" + (f" ({each.found})" if each.found else "")
            for each in entry.premises
        ]
        note = f"Premises on this model: {'; '.join(premises)}."
    return Section(
        entry.claim,
        anchor=f"claim-{number}",
        badge=entry.verdict,
        mark=MARKS.get(entry.verdict, "correction"),
        source=f"{entry.paper}; {entry.source}",
        texts=[entry.statement, f"{entry.computed}: {_value(entry)}; {instances}."],
        statements=[entry.sharper] if entry.sharper else [],
        figures=[_evidence(record, entry)],
        pictures=False,
        note=note,
    )


def _evidence(record: Record, entry: StoredVerdict) -> Figure:
    """The curves behind a verdict."""
    stored = entry.figure
    curves = [
        Curve(curve.label, record.arrays[f"{curve.arrays}/x"], record.arrays[f"{curve.arrays}/y"], stroke)
        for curve, stroke in zip(stored.curves, RUNS, strict=False)
    ]
    axes = "".join(name for name in "xy" if getattr(stored, f"log_{name}"))
    return Figure("evidence", "", stored.x_label, stored.y_label, tuple(curves), log_axes=axes)


def _value(entry: StoredVerdict) -> str:
    return MISSING if entry.value is None else f"{entry.value:.4g}"
