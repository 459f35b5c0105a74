"""A reproduced experiment, from its record alone: sentences, tables and figures as the experiment made them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.records import Record, plain
from posbias.report.figures import Curve, Figure
from posbias.report.page import REPORTS, Report
from posbias.report.palette import Stroke
from posbias.report.tables import Table

_PARTS = ("x", "y", "low", "high")


@REPORTS.register("reproduce")
def reproduction_report(record: Record) -> Report:
    """What the paper reports, and what came out."""
    found = record.scalars
    return Report(
        kicker=f"posbias · a published experiment, run again · {found['paper']}",
        title=record.resolved["title"],
        statements=found["statements"],
        figures=stored_figures(record),
        tables=[Table(table["title"], table["header"], table["cells"]) for table in found["tables"]],
    )


def stored_figures(record: Record) -> list[Figure]:
    """The figures of a reproduction's record."""
    return [
        Figure(
            slug=stored["slug"],
            title=stored["title"],
            x_label=stored["x_label"],
            y_label=stored["y_label"],
            curves=tuple(_stored_curve(curve, record.arrays) for curve in stored["curves"]),
            log_range=_pair(stored["log_range"]),
            linear_range=_pair(stored["linear_range"]),
            rows=tuple(stored.get("rows", ())),
        )
        for stored in record.scalars["figures"]
    ]


def store_figure(figure: Figure, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A figure as plain values, its curves put into `arrays`; `stored_figures` reads it back."""
    curves = []
    for number, curve in enumerate(figure.curves):
        stem = f"figures/{figure.slug}/{number}"
        arrays.update({f"{stem}/{part}": values for part in _PARTS if (values := getattr(curve, part)) is not None})
        look = {"colour": curve.stroke.colour, "dash": curve.stroke.dash, "emphasis": curve.emphasis}
        curves.append({"name": curve.name, "arrays": stem, **look})
    names = ("slug", "title", "x_label", "y_label", "log_range", "linear_range", "rows")
    return {**{name: plain(getattr(figure, name)) for name in names}, "curves": curves}


def _stored_curve(stored: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Curve:
    parts = {part: arrays.get(f"{stored['arrays']}/{part}") for part in _PARTS}
    if parts["x"] is None or parts["y"] is None:
        raise UsageError(f"the record has no curve {stored['arrays']}")
    return Curve(
        name=stored["name"],
        x=parts["x"],
        y=parts["y"],
        stroke=Stroke(stored["colour"], stored["dash"]),
        low=parts["low"],
        high=parts["high"],
        emphasis=stored["emphasis"],
    )


def _pair(stored: Sequence[float] | None) -> tuple[float, float] | None:
    return None if stored is None else (float(stored[0]), float(stored[1]))
