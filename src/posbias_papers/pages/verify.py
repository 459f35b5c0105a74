"""Published claims put to the test: how many hold, what fails, a table of all verdicts, and each with its numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import InstanceOf

from posbias.display.showing import Shown
from posbias.report.page import REPORTS, Report, Section
from posbias.report.tables import Table
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result
from posbias.statistics import MISSING
from posbias_papers.claims import TITLE, listed

Entry = Mapping[str, Any]
"""A verdict as `Verdict.as_dict` gives it."""
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

    record: InstanceOf[Record]
    title: str = TITLE
    verdicts: tuple[Mapping[str, Any], ...] = ()
    """As `Verdict.as_dict` gives them."""

    @classmethod
    def from_record(cls, record: Record) -> "ClaimsRun":
        """The verdicts that a record holds; none if the run failed."""
        if record.status != "done":
            return cls(record)
        return cls(record, record.resolved.get("title", TITLE), tuple(record.scalars["verdicts"]))

    def shown(self) -> Shown:
        """The verdicts as facts."""
        return Shown(self.title, facts={entry["claim"]: entry["verdict"] for entry in self.verdicts})


@REPORTS.register("verify")
def claims_report(run: ClaimsRun) -> Report:
    """How many claims hold, and every claim, what fails first, with the numbers behind it."""
    verdicts = sorted(run.verdicts, key=lambda entry: -list(PREDICATES).index(entry["verdict"]))
    cells = [[entry["claim"], entry["verdict"], _value(entry), entry["computed"]] for entry in verdicts]
    return Report(
        run.title,
        kicker="posbias · published statements on position bias as numerical experiments",
        verdict=_told(verdicts),
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=[_claim(entry, number) for number, entry in enumerate(verdicts)],
        record=run.record,
    )


def _told(verdicts: Sequence[Entry]) -> list[str]:
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


def _claim(entry: Entry, number: int) -> Section:
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
        anchor=f"claim-{number}",
        badge=entry["verdict"],
        mark=MARKS.get(entry["verdict"], "correction"),
        source=f"{entry['paper']}; {entry['source']}",
        texts=[entry["statement"], f"{entry['computed']}: {_value(entry)}; {instances}."],
        statements=[entry["sharper"]] if entry["sharper"] else [],
        note=note,
        tables=[Table("Numbers behind it", ["number", "value"], cells)] if cells else [],
    )


def _value(entry: Entry) -> str:
    return _text(entry["value"])


def _text(fact: Any) -> str:
    """A number, the word on one, or positions."""
    if isinstance(fact, list):
        return listed(fact)
    return MISSING if fact is None else fact if isinstance(fact, str) else f"{fact:.4g}"
