"""Verdicts on published claims, from the record of `verify` alone: a table of all, then each with its evidence."""

from collections.abc import Mapping
from typing import Any

from posbias.records import Record
from posbias.report.figures import Curve, Figure
from posbias.report.page import REPORTS, Report, Section
from posbias.report.palette import RUNS
from posbias.report.tables import Table
from posbias.statistics.intervals import MISSING

MARKS = {"holds": "holds", "fails": "fails", "fails as stated": "fails"}
"""Colours of verdicts; the others lie between."""

Stored = Mapping[str, Any]


@REPORTS.register("verify")
def claims_report(record: Record) -> Report:
    """Every claim with its verdict, its number and the curves behind it."""
    verdicts = record.scalars["verdicts"]
    cells = [[entry["claim"], entry["verdict"], _value(entry), entry["computed"]] for entry in verdicts]
    return Report(
        kicker="posbias · published statements on position bias as numerical experiments",
        title=record.resolved.get("title", "Published claims put to the test"),
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=[_section(record, entry, number) for number, entry in enumerate(verdicts)],
    )


def _section(record: Record, entry: Stored, number: int) -> Section:
    instances = f"{entry['instances']} instance{'' if entry['instances'] == 1 else 's'}"
    return Section(
        title=entry["claim"],
        verdict=entry["verdict"],
        mark=MARKS.get(entry["verdict"], "correction"),
        source=f"{entry['paper']}; {entry['source']}",
        texts=[entry["statement"], f"{entry['computed']}: {_value(entry)}; {instances}."],
        finding=entry["sharper"],
        figure=_figure(record, entry["figure"], f"claim-{number}"),
        note=_assumptions(entry),
    )


def _assumptions(entry: Stored) -> str:
    if "premises" in entry:
        return f"Premises on this model: {'; '.join(map(_premise, entry['premises']))}."
    broken = f" Broken on purpose: {entry['broken']}." if entry["broken"] else ""
    return f"Assumes: {'; '.join(entry['assumptions'])}.{broken}"


def _premise(stored: Stored) -> str:
    found = f" ({stored['found']})" if stored["found"] else ""
    return f"{stored['premise']} – {'met' if stored['met'] else 'not met'}{found}"


def _value(entry: Stored) -> str:
    return MISSING if entry["value"] is None else f"{entry['value']:.4g}"


def _figure(record: Record, stored: Stored, slug: str) -> Figure:
    curves = [
        Curve(curve["label"], record.arrays[f"{curve['arrays']}/x"], record.arrays[f"{curve['arrays']}/y"], stroke)
        for curve, stroke in zip(stored["curves"], RUNS, strict=False)
    ]
    axes = "".join(name for name in "xy" if stored[f"log_{name}"])
    return Figure(slug, "", stored["x_label"], stored["y_label"], tuple(curves), log_axes=axes)
