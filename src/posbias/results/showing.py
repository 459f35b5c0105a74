"""How results show themselves: each names its curves once, and its picture, table and pandas follow from that.

`repr` is one line; a notebook shows the answer, a small table and a picture (`_repr_html_`). matplotlib and pandas are
imported when they are asked for; pandas comes with `pip install 'posbias[notebook]'`.
"""

import base64
import csv
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.errors import UsageError, printable
from posbias.files import write_file
from posbias.results.drawing import draw_lines, image_of
from posbias.results.figures import RUNS, Curve, Figure, profile_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

INFLUENCE = "influence"
PICTURES = (".png", ".svg", ".pdf")
FILES = (".csv", ".html", *PICTURES)
ENDING = re.compile(r"\.[a-z][a-z0-9]{0,6}")
"""What is meant as the ending of a file, unlike the end of "llama-3.1" or "qwen2-0.5b"."""
PAGE = '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n{body}\n</html>\n'
"""The page of a result saved as .html, which a browser would otherwise read in whatever encoding its system has."""
LEFT = 'style="text-align:left;vertical-align:top"'
"""Notebooks set cells to the right, where sentences are hard to read."""


@dataclass(frozen=True, eq=False)
class Shown:
    """The content that a result shows: a line, numbers, and curves over the same places."""

    title: str
    """One line, without the name of the class."""
    curves: tuple[Curve, ...] = ()
    """Over the same places."""
    quantity: str = INFLUENCE
    """The quantity on the vertical axis; influence is drawn in multiples of the flat line, 1 / N."""
    axis: str = "position"
    unit: str = ""
    """Unit of the curves' values; "" if they have none."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """First rows, by name: answers, and numbers with their intervals."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", printable(self.title))

    @property
    def x(self) -> np.ndarray:
        """The places of the points."""
        return self.curves[0].x

    @property
    def scale(self) -> float:
        """Factor by which values are multiplied when they are drawn or written out."""
        return float(len(self.x)) if self.quantity == INFLUENCE else 1.0

    @property
    def label(self) -> str:
        """The quantity with its unit, as it is drawn or written out."""
        unit = "flat line = 1" if self.quantity == INFLUENCE else self.unit
        return f"{self.quantity} ({unit})" if unit else self.quantity

    def figure(self) -> Figure:
        """The drawn curves, influence beside the flat line."""
        curves = [curve for curve in self.curves if curve.drawn]
        if self.quantity == INFLUENCE:
            return replace(profile_figure("result", self.title, curves, x_label=self.axis), by_distance=False)
        return Figure("result", self.title, self.axis, self.label, tuple(curves), markers=True)


class Showing(ABC):
    """A result that shows itself: as one line, in a notebook, as picture, table and file.

    Every result of posbias is one: profiles, predictions, measurements, attention statistics,
    comparisons, curves, evaluations, designs, decompositions, audits and records.
    """

    @abstractmethod
    def shown(self) -> Shown:
        """The line, the facts and the curves, from which all its forms are made."""

    def facts(self) -> Mapping[str, str]:
        """The first rows in a notebook: answers, and numbers with their intervals, by name."""
        return self.shown().facts

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown().title})"

    def _repr_html_(self) -> str:
        view, facts = self.shown(), self.facts()
        parts = [f"<p><b>{escape(type(self).__name__)}</b>: {escape(view.title)}</p>"]
        if facts:
            parts.append(_rows(list(facts.items())))
        if view.curves:
            places = sorted({0, len(view.x) // 2, len(view.x) - 1})
            head = [view.label, *(f"{view.axis} {view.x[place]}" for place in places)]
            scaled = [curve.scaled(view.scale) for curve in view.curves]
            rows = [[curve.name, *(curve.text(place, ".3g") for place in places)] for curve in scaled]
            picture = base64.b64encode(image_of(view.figure(), titled=False)).decode()
            parts.append(_rows(rows, head))
            parts.append(f'<img alt="{escape(view.title)}" src="data:image/png;base64,{picture}">')
        return f"<div>{''.join(parts)}</div>"

    def as_run(self) -> Any:
        """The record that `save` writes into a directory; None for a result that is no run."""
        return getattr(self, "record", None)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the curves with their intervals; influence in multiples of the flat line, which stands beside it.

        Axes on which several results are drawn hold the flat line once, and show the range of all of them; a curve goes
        by the name that it has in its own result.

        Args:
            ax: Axes of matplotlib to draw on; None: new ones of pyplot, 6.4 by 2.8 inches large.

        Returns:
            The axes, to change at will.

        Raises:
            UsageError: the result holds no curves.
        """
        view = self._with_curves()
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(6.4, 2.8), layout="constrained")
        lines = ax.get_lines()
        if lines:  # strokes after those that are used already
            after = zip(view.curves, islice(cycle(RUNS), len(lines), None), strict=False)
            view = replace(view, curves=tuple(replace(curve, stroke=stroke) for curve, stroke in after))
        figure, shown = view.figure(), ax.get_ylim()
        # Another result may have drawn it; a prediction that is called so has a point for every position.
        if any(line.get_label() == "flat line" and np.size(line.get_xdata()) == 2 for line in lines):
            figure = replace(figure, curves=figure.curves[:-1])
        draw_lines(ax, figure, "log")
        if lines:
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, shown[0]), max(high, shown[1]))
        if len(ax.get_lines()) > 1:
            ax.legend(frameon=False)
        return ax

    def to_pandas(self) -> "DataFrame":
        """A row for every point: `position` and `influence` (or what else is shown), `low` and `high`.

        If there are several curves, a column `curve` names them. Ends of intervals that are not known are NaN.
        """
        columns = _columns(self._with_curves())
        try:
            from pandas import DataFrame
        except ImportError:
            raise UsageError("pandas is not installed; pip install 'posbias[notebook]'") from None
        return DataFrame(columns)

    def to_csv(self, path: str | Path) -> Path:
        """Write the table of `to_pandas` as CSV; what is not known is empty. `design` takes one profile as a target."""
        columns = _columns(self._with_curves())
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
        writer.writerows(["" if entry != entry else entry for entry in row] for row in rows)
        return write_file(Path(path), text.getvalue().encode())

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write to a file by its ending: .csv, a picture (.png, .svg, .pdf), or .html as a notebook shows it.

        An .svg and a .pdf hold a caption and a run's command in their metadata, and no date: the same result gives the
        same bytes.
        Without an ending, or if the path is a directory, a run (a prediction, a measurement, an evaluation, a
        decomposition, an audit, a record) becomes a directory, which `load_record` and the command line read; it is
        written atomically. `overwrite`: another finished run there, with its report, is replaced.

        Raises:
            UsageError: another ending; a directory for what is no run, or one with another finished run; or no curves
                to draw.
            RunError: the file or directory cannot be written, or the disk is full; nothing half-written stays.
        """
        named, path = str(path), Path(path)
        ending, whole = path.suffix.lower(), path.is_dir() or named.endswith(("/", os.sep))
        if ending == ".csv" and not whole:
            return self.to_csv(path)
        if ending == ".html" and not whole:
            page = PAGE.format(title=escape(self.shown().title), body=self._repr_html_())
            return write_file(path, page.encode())
        run = self.as_run()
        if whole and run is None:
            raise UsageError(f"cannot save to {path.name!r}, a directory")
        if run is not None and (whole or not ENDING.fullmatch(ending)):
            written: Path = run.save(path, overwrite=overwrite)
            return written
        if ending in PICTURES:
            about = "" if run is None else printable(run.command)
            return write_file(path, image_of(self._with_curves().figure(), ending.removeprefix("."), about=about))
        also = "" if run is None else "; a directory with such a name ends in a slash"
        raise UsageError(f"cannot save to {path.name!r}; the ending must be one of {', '.join(FILES)}{also}")

    def _with_curves(self) -> Shown:
        view = self.shown()
        if not view.curves:
            raise UsageError(f"{type(self).__name__}({view.title}) holds no curves over positions")
        return view


def _columns(view: Shown) -> dict[str, Any]:
    """One row per curve and point, by column."""
    low, high = (np.concatenate(ends) for ends in zip(*(curve.ends for curve in view.curves), strict=True))
    points = {
        view.axis: np.tile(view.x, len(view.curves)),
        view.quantity: np.concatenate([curve.y for curve in view.curves]),
        "low": low,
        "high": high,
    }
    names = np.repeat([curve.name for curve in view.curves], len(view.x))
    return points if len(view.curves) == 1 else {"curve": names, **points}


def _rows(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of a table as HTML, line breaks kept."""
    told = ""
    for tag, cells in [*([("th", head)] if head else []), *(("td", cells) for cells in rows)]:
        lines = ("<br>".join(escape(printable(line)) for line in cell.split("\n")) for cell in cells)
        told += f"<tr>{''.join(f'<{tag} {LEFT}>{line}</{tag}>' for line in lines)}</tr>"
    return f"<table>{told}</table>"
