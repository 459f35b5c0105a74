"""The experiments that can be reproduced, by name, and what one hands over: sentences, rows, tables and figures.

Each is registered in its paper's folder, and imported when run. The page is drawn from the record alone
(report/published.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posbias.display.figures import Figure
from posbias.registry import Registry
from posbias.report.published import CURVE_PARTS
from posbias.report.tables import Table
from posbias.runs.records import Record, plain


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
        "figures": [store_figure(figure, record.arrays) for figure in reproduction.figures],
    }
    return record


def store_figure(figure: Figure, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A figure as plain values, its curves put into `arrays`; report/published.py reads it back."""
    curves = []
    for number, curve in enumerate(figure.curves):
        stem = f"figures/{figure.slug}/{number}"
        arrays.update(
            {f"{stem}/{part}": values for part in CURVE_PARTS if (values := getattr(curve, part)) is not None}
        )
        look = {"colour": curve.stroke.colour, "dash": curve.stroke.dash, "emphasis": curve.emphasis}
        curves.append({"name": curve.name, "arrays": stem, **look})
    names = ("slug", "title", "x_label", "y_label", "log_range", "linear_range", "rows")
    return {**{name: plain(getattr(figure, name)) for name in names}, "curves": curves}


PAPERS: Registry[Callable[[Any], Reproduction]] = Registry("paper")


def reproduce(paper: str, *, settings: Any = None) -> Reproduction:
    """Run a published experiment again.

    Args:
        paper: A name in `PAPERS`.
        settings: Of that experiment (`BirthSettings` for birth-2603.10123), or None for its defaults.

    Returns:
        Sentences, rows, tables and figures; `posbias.papers.reproduction.reproduction_record` makes a record of it.

    Raises:
        UsageError: unknown paper, or settings it does not take.
        RunError: a measurement failed.
    """
    run: Callable[[Any], Reproduction] = PAPERS[paper]
    return run(settings)
