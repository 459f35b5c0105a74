"""A published experiment, run again: its sentences, tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import InstanceOf

from posbias.display.figures import Curve, Figure, Stroke
from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.registry import Registry
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored

LONGEST_CELL = 60
"""Characters of a cell that is no sentence."""
CURVE_PARTS = ("x", "y", "low", "high")
"""Arrays of a stored curve; the last two if it has a band."""

Stored = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
Facts = Mapping[str, Any]
PAPERS: Registry[Any] = Registry("paper")
"""Published experiments by the name of their paper."""


@RESULTS.register("reproduce")
@dataclass(frozen=True, eq=False, repr=False)
class ReproductionRun(Result):
    """A published experiment that was run again, as stored."""

    record: InstanceOf[Record]
    title: str = ""
    experiment: str = ""
    """Its name in `PAPERS`; empty if the run failed."""
    rows: Rows = ()
    """One row per comparison."""
    statements: tuple[str, ...] = ()
    """Outcomes, one or two sentences each, with their numbers; none if the run failed."""
    tables: tuple[InstanceOf[Table], ...] = ()
    figures: tuple[InstanceOf[Figure], ...] = ()

    @classmethod
    def from_record(cls, record: Record) -> "ReproductionRun":
        """The experiment that a record holds; nothing but the record if it failed."""
        if record.status != "done":
            return cls(record)
        read = {
            **{name: record.scalars[name] for name in ("experiment", "rows", "statements")},
            "record": record,
            "title": record.resolved["title"],
            "tables": [
                _laid_out(Table(table["title"], table["header"], table["cells"])) for table in record.scalars["tables"]
            ],
            "figures": [_stored_figure(figure, record.arrays) for figure in record.scalars["figures"]],
        }
        return from_stored(cls, read)

    def shown(self) -> Shown:
        """The outcomes as facts; the figures are on the page."""
        facts = {f"outcome {number}": text for number, text in enumerate(self.statements, 1)}
        return Shown(self.title or self.record.line, facts=facts)


@REPORTS.register("reproduce")
def reproduction_report(run: ReproductionRun) -> Report:
    """Numbers of the paper beside the new ones."""
    said, tables = run.statements, run.tables  # among them the count of verdicts, "Of 13 published findings: ..."
    return Report(
        run.title,
        kicker=f"posbias · a published experiment, run again · {PAPERS[run.experiment].paper}",
        verdict=[next((text for text in said if text.startswith("Of ")), said[0])] if said else [],
        picture=run.figures[:1],
        summary=tables[:1],
        statements=said,
        figures=run.figures[1:],
        tables=tables[1:],
        record=run.record,
    )


def _laid_out(table: Table) -> Table:
    """A table with sentences is broken into lines, its verdicts first."""
    prose = any(len(cell) > LONGEST_CELL for row in table.cells for cell in row)
    rows = [table.header, *table.cells]
    if prose and "verdict" in table.header:
        place = table.header.index("verdict")
        rows = [[row[place], *row[:place], *row[place + 1 :]] for row in rows]
    return Table(table.title, rows[0], rows[1:], prose=prose)


def _stored_figure(stored: Stored, arrays: Mapping[str, np.ndarray]) -> Figure:
    return Figure(
        **{name: stored[name] for name in ("slug", "title", "x_label", "y_label")},
        curves=tuple(_stored_curve(curve, arrays) for curve in stored["curves"]),
        log_range=stored["log_range"] and tuple(stored["log_range"]),
        linear_range=stored["linear_range"] and tuple(stored["linear_range"]),
        rows=tuple(stored.get("rows", ())),
    )


def _stored_curve(stored: Stored, arrays: Mapping[str, np.ndarray]) -> Curve:
    parts: dict[str, Any] = {part: arrays.get(f"{stored['arrays']}/{part}") for part in CURVE_PARTS}
    if parts["x"] is None or parts["y"] is None:
        raise UsageError(f"the record has no curve {stored['arrays']}")
    stroke = Stroke(stored["colour"], stored["dash"])
    return Curve(stored["name"], stroke=stroke, emphasis=stored["emphasis"], **parts)
