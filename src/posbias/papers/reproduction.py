"""A reproduced experiment as a record, on the terminal, and as one offline HTML page with its figures.

A `Reproduction` is what an experiment hands over: sentences, rows of numbers, tables, figures. The page is drawn from
the record alone: texts and tables from its scalars, curves from its arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.errors import UsageError
from posbias.records import Record, plain
from posbias.report.conditions import conditions_of
from posbias.report.figures import Curve, Figure
from posbias.report.files import page_template, write_page
from posbias.report.interactive import interactive, plotly_source
from posbias.report.palette import Stroke
from posbias.report.static import png
from posbias.report.tables import Table, print_tables
from posbias.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATE = "reproduction.html.jinja"
_PARTS = ("x", "y", "low", "high")


@dataclass(frozen=True, eq=False)
class Reproduction:
    """A published experiment, run again."""

    paper: str
    """Which paper, in words."""
    title: str
    statements: Sequence[str]
    """What came out, one sentence or two each, with the numbers in it."""
    rows: Sequence[Mapping[str, Any]]
    """One row per comparison, plain JSON values."""
    tables: Sequence[Table]
    figures: Sequence[Figure]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Profiles and mixing by slash-separated name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)


def reproduction_record(reproduction: Reproduction, arguments: Mapping[str, Any], *, command: str = "") -> Record:
    """The reproduction as a record of verb "reproduce".

    Returns:
        Scalars `paper`, `statements`, `rows`, `tables` and `figures` (labels and array names); the curves are arrays
        `figures/<slug>/<number>/x`, `/y` and, where there is a band, `/low` and `/high`.
    """
    record = Record(
        verb="reproduce",
        arguments=dict(arguments),
        resolved={"title": reproduction.title, "command": command, **plain(reproduction.settings)},
        seeds=dict(reproduction.seeds),
        arrays=dict(reproduction.arrays),
    )
    record.scalars = {
        "paper": reproduction.paper,
        "statements": list(reproduction.statements),
        "rows": [plain(row) for row in reproduction.rows],
        "tables": [plain(vars(table)) for table in reproduction.tables],
        "figures": [_store_figure(figure, record.arrays) for figure in reproduction.figures],
    }
    return record


def write_reproduction_report(record: Record, out: Path) -> Path:
    """Write `report.html` and a PNG per figure into `out`, each atomically.

    Raises:
        UsageError: the record is not one of a reproduction.
        RunError: the files cannot be written.
    """
    if record.verb != "reproduce" or "statements" not in record.scalars:
        raise UsageError(f"a reproduction's report needs a finished record of verb 'reproduce', got {record.verb!r}")
    figures = stored_figures(record)
    pictures = {f"{figure.slug}.png": png(figure) for figure in figures}
    return write_page(render_reproduction(record, figures), out, pictures=pictures)


def render_reproduction(record: Record, figures: Sequence[Figure]) -> str:
    """The page as text."""
    return page_template(TEMPLATE).render(
        title=record.resolved["title"],
        kicker=f"a published experiment, run again · {record.scalars['paper']}",
        statements=record.scalars["statements"],
        tables=record.scalars["tables"],
        charts=[interactive(figure, anchor=f"figure-{figure.slug}") for figure in figures],
        command=record.resolved.get("command", ""),
        conditions=conditions_of(record),
        plotly=plotly_source(),
        version=__version__,
    )


def show_reproduction(record: Record, console: "Console") -> None:
    """Print tables and sentences: ruled on a terminal, aligned plain columns into a pipe or a file."""
    tables = record.scalars["tables"]
    print_tables(((table["title"], table["header"], table["cells"]) for table in tables), console)
    for statement in record.scalars["statements"]:
        console.print(f"- {statement}", highlight=False, markup=False)


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


def _store_figure(figure: Figure, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
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
