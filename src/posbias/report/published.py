"""Published claims put to the test and published experiments run again, each from its record alone.

Of claims how many hold, what fails and a table of all verdicts, then each with its evidence; of an experiment the
sentences, tables and figures as it made them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.display.figures import RUNS, Curve, Figure, Stroke
from posbias.errors import UsageError
from posbias.report.page import REPORTS, Report, Section
from posbias.report.tables import Table
from posbias.runs.records import Record
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
LONGEST_CELL = 60
"""Characters of a cell that is no sentence."""
CURVE_PARTS = ("x", "y", "low", "high")
"""Arrays of a stored curve; the last two where it has a band."""

Stored = Mapping[str, Any]


@REPORTS.register("verify")
def claims_report(record: Record) -> Report:
    """How many claims hold, and every claim, what fails first, with its number and the curves behind it."""
    verdicts = sorted(record.scalars["verdicts"], key=lambda entry: -list(PREDICATES).index(entry["verdict"]))
    first = verdicts[0]
    picture = replace(_evidence(record, first), slug="verdict", title=f"{first['claim']}: {first['verdict']}")
    cells = [[entry["claim"], entry["verdict"], _value(entry), entry["computed"]] for entry in verdicts]
    return Report(
        record.resolved.get("title", "Published claims put to the test"),
        kicker="posbias · published statements on position bias as numerical experiments",
        verdict=_told(verdicts),
        picture=[picture],
        summary=[Table("Verdicts", ["claim", "verdict", "value", "what was computed"], cells, prose=True)],
        sections=[_claim(record, entry, number) for number, entry in enumerate(verdicts)],
        record=record,
    )


def _told(verdicts: Sequence[Stored]) -> list[str]:
    """How many hold; what the first one that fails says, and what was found."""
    counts = Counter(entry["verdict"] for entry in verdicts)
    parts = [f"{counts[each]} {PREDICATES[each][counts[each] > 1]}" for each in PREDICATES if counts[each]]
    told = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    said = [f"Of {len(verdicts)} published statement{'' if len(verdicts) == 1 else 's'}: {told}."]
    if len(verdicts) > 1 and counts["holds"] == len(verdicts):
        return [f"All {len(verdicts)} published statements hold."]
    failed = [entry for entry in verdicts if MARKS.get(entry["verdict"]) == "fails"]
    if failed:
        said.append(f"What fails{', first' * (len(failed) > 1)}: {failed[0]['statement']}")
        said += [f"What was found: {failed[0]['sharper']}."] if failed[0]["sharper"] else []
    return said


def _claim(record: Record, entry: Stored, number: int) -> Section:
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
    return Section(
        entry["claim"],
        anchor=f"claim-{number}",
        badge=entry["verdict"],
        mark=MARKS.get(entry["verdict"], "correction"),
        source=f"{entry['paper']}; {entry['source']}",
        texts=[entry["statement"], f"{entry['computed']}: {_value(entry)}; {instances}."],
        statements=[entry["sharper"]] if entry["sharper"] else [],
        figures=[_evidence(record, entry)],
        pictures=False,
        note=note,
    )


def _evidence(record: Record, entry: Stored) -> Figure:
    """The curves behind a verdict."""
    stored = entry["figure"]
    curves = [
        Curve(curve["label"], record.arrays[f"{curve['arrays']}/x"], record.arrays[f"{curve['arrays']}/y"], stroke)
        for curve, stroke in zip(stored["curves"], RUNS, strict=False)
    ]
    axes = "".join(name for name in "xy" if stored[f"log_{name}"])
    return Figure("evidence", "", stored["x_label"], stored["y_label"], tuple(curves), log_axes=axes)


def _value(entry: Stored) -> str:
    return MISSING if entry["value"] is None else f"{entry['value']:.4g}"


@REPORTS.register("reproduce")
def reproduction_report(record: Record) -> Report:
    """What the paper reports, and what came out."""
    found, figures = record.scalars, stored_figures(record)
    said = found["statements"]  # among them the count of verdicts, "Of 13 published findings: ..."
    tables = [_stored_table(table) for table in found["tables"]]
    return Report(
        record.resolved["title"],
        kicker=f"posbias · a published experiment, run again · {found['paper']}",
        verdict=[next((text for text in said if text.startswith("Of ")), said[0])] if said else [],
        picture=figures[:1],
        summary=tables[:1],
        statements=said,
        figures=figures[1:],
        tables=tables[1:],
        record=record,
    )


def _stored_table(stored: Stored) -> Table:
    """A table as it was made; one with sentences is broken into lines, its verdicts first."""
    prose = any(len(cell) > LONGEST_CELL for row in stored["cells"] for cell in row)
    rows = [stored["header"], *stored["cells"]]
    if prose and "verdict" in stored["header"]:
        place = stored["header"].index("verdict")
        rows = [[row[place], *row[:place], *row[place + 1 :]] for row in rows]
    return Table(stored["title"], rows[0], rows[1:], prose=prose)


def stored_figures(record: Record) -> list[Figure]:
    """The figures of a reproduction's record."""
    return [
        Figure(
            **{name: stored[name] for name in ("slug", "title", "x_label", "y_label")},
            curves=tuple(_stored_curve(curve, record.arrays) for curve in stored["curves"]),
            log_range=stored["log_range"] and tuple(stored["log_range"]),
            linear_range=stored["linear_range"] and tuple(stored["linear_range"]),
            rows=tuple(stored.get("rows", ())),
        )
        for stored in record.scalars["figures"]
    ]


def _stored_curve(stored: Stored, arrays: Mapping[str, np.ndarray]) -> Curve:
    parts: dict[str, Any] = {part: arrays.get(f"{stored['arrays']}/{part}") for part in CURVE_PARTS}
    if parts["x"] is None or parts["y"] is None:
        raise UsageError(f"the record has no curve {stored['arrays']}")
    stroke = Stroke(stored["colour"], stored["dash"])
    return Curve(stored["name"], stroke=stroke, emphasis=stored["emphasis"], **parts)
