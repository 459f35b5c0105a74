"""Published experiments by the name of their paper, and their results: sentences, rows, tables and figures.

Each is registered in its paper's folder; its record keeps all of them, for the page (pages/reproduce.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from posbias.display.figures import Figure
from posbias.errors import UsageError
from posbias.report.tables import Table
from posbias.runs.records import Record, plain
from posbias_papers.pages.reproduce import CURVE_PARTS, PAPERS, Facts, Rows


@dataclass(frozen=True, eq=False)
class Reproduction:
    """A published experiment, run again."""

    experiment: str
    """Its name in `PAPERS`."""
    title: str
    rows: Rows
    """One row per comparison, plain JSON values."""
    statements: Sequence[str]
    """Outcomes, one or two sentences each, with their numbers."""
    tables: Sequence[Table]
    figures: Sequence[Figure]
    facts: Facts = field(default_factory=dict)
    """Other numbers behind its sentences."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Profiles and mixing by slash-separated name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)


Columns = Mapping[str, Callable[[Any], str]]
"""What a table says of a row, by the name of its column."""


def tabled(title: str, rows: Sequence[Any], columns: Columns) -> Table:
    """A table with a line for each row."""
    return Table(title, list(columns), [[told(row) for told in columns.values()] for row in rows])


def reproduction_record(reproduction: Reproduction, arguments: Mapping[str, Any], *, command: str = "") -> Record:
    """The reproduction as a record of verb "reproduce".

    Returns:
        Scalars `experiment`, `rows`, `facts`, `statements`, `tables` and `figures` (labels and array names); the curves
        are arrays `figures/<slug>/<number>/x`, `/y` and, where there is a band, `/low` and `/high`.
    """
    record = Record(
        verb="reproduce",
        arguments=dict(arguments),
        resolved={"title": reproduction.title, "command": command, **plain(reproduction.settings)},
        seeds=dict(reproduction.seeds),
        arrays=dict(reproduction.arrays),
    )
    record.scalars = {
        "experiment": reproduction.experiment,
        "rows": plain(reproduction.rows),
        "facts": plain(reproduction.facts),
        "statements": list(reproduction.statements),
        "tables": [plain(vars(table)) for table in reproduction.tables],
        "figures": [store_figure(figure, record.arrays) for figure in reproduction.figures],
    }
    return record


def store_figure(figure: Figure, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A figure as plain values, its curves put into `arrays`; pages/reproduce.py reads it back."""
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


class Experiment(ABC):
    """A published experiment that can be run again, registered under the name of its paper."""

    name: ClassVar[str]
    paper: ClassVar[str]
    """Title of the paper."""
    settings: ClassVar[type | None] = None
    """The class of its settings; None: everything is as published."""

    def check(self, settings: Any) -> Any:
        """Refuse settings that the experiment does not take.

        Returns:
            The settings, or their defaults if they are None.
        """
        if self.settings is None:
            if settings is not None:
                raise UsageError(f"{self.name} has no settings: its models, length and text are those published")
            return None
        chosen = self.settings() if settings is None else settings
        if not isinstance(chosen, self.settings):
            raise UsageError(f"{self.name} takes {self.settings.__name__}, got {type(chosen).__name__}")
        return chosen

    @abstractmethod
    def run(self, settings: Any) -> Reproduction:
        """Run it again with settings that `check` has seen.

        Raises:
            RunError: a measurement fails, or a file cannot be written.
        """


def reproduce(paper: str, *, settings: Any = None) -> Reproduction:
    """Run a published experiment again.

    Args:
        paper: A name in `PAPERS`.
        settings: An object of the experiment's own class (`BirthSettings` for birth-2603.10123); None: its defaults.

    Returns:
        Rows, tables, figures and the sentences on them; `posbias_papers.reproduction_record` makes a record of it.

    Raises:
        UsageError: unknown paper, or settings it does not take.
        RunError: a measurement fails, or a file cannot be written.
    """
    experiment: Experiment = PAPERS[paper]()
    return experiment.run(experiment.check(settings))
