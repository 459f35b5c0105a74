"""Figures on a page: each is an HTML fragment with its numbers, drawn as SVG by `chart.js`, which a page holds once.

Every number and text travels as JSON in which no tag can begin; the script puts texts in as text. Values have few
digits, which no picture shows.
"""

import base64
import html
import json
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Num

from posbias.display.figures import DRAWN_POSITIONS, Curve, Figure, HeatMap, Panel

DIGITS = 4
"""Significant digits of a value: all that is told of it."""
MISSING = 65535
"""Level of a cell of a heat map without a value; the others are 0 to 65534 between the ends of the colour scale."""
STOPS = {
    "viridis": "#440154 #482475 #414487 #355f8d #2a788e #21918c #22a884 #44bf70 #7ad151 #bddf26 #fde725",
    "RdBu_r": "#053061 #2166ac #4393c3 #92c5de #d1e5f0 #f7f7f7 #fddbc7 #f4a582 #d6604d #b2182b #67001f",
}
"""Colour maps, by the names that figures give them: colours at even steps, between which the script interpolates."""


def chart_script() -> str:
    """The script that draws all charts of a page, to be inlined once after them."""
    return files("posbias.display").joinpath("chart.js").read_text(encoding="utf-8")


def interactive(figure: Figure | HeatMap, *, anchor: str, most: int = DRAWN_POSITIONS) -> str:
    """The figure as an HTML fragment, with at most so many points of a curve; `anchor` becomes the id of its element
    and must be unique on the page."""
    data = _heat_map(figure) if isinstance(figure, HeatMap) else _lines(figure, most)
    text = json.dumps({"title": figure.title, **data}, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart" id="{html.escape(anchor)}"><figcaption>{html.escape(figure.title)}</figcaption>'
        '<div class="controls"></div><div class="plot"></div><div class="legend"></div>'
        f'<script type="application/json">{text}</script></figure>'
    )


def _lines(figure: Figure, most: int) -> dict[str, Any]:
    by_distance = all(curve.from_end is not None for curve in figure.curves)
    x_label, from_end = figure.axis_names
    places: list[dict[str, Any]] = []
    curves = [
        _curve(curve.thinned(most), figure.row_offset(number), places) for number, curve in enumerate(figure.curves)
    ]
    return {
        "x_label": x_label,
        "y_label": figure.y_label,
        "places": places,
        "curves": curves,
        "markers": figure.markers,
        "lines": figure.lines,
        "rows": list(figure.rows) or None,
        "log": figure.log_range,
        "linear": figure.linear_range,
        "cut": figure.cut_note,
        "log_axes": figure.log_axes,
        "by_distance": figure.by_distance,
        "farthest": figure.farthest if by_distance else None,
        "from_end": from_end,
        "stretches": list(figure.stretches),
    }


def _curve(curve: Curve, offset: float, places: list[dict[str, Any]]) -> dict[str, Any]:
    """A curve without what its number of points tells: that x counts them, or that they are as far from the end.

    Otherwise these are added to `places`, which curves at the same ones share, and the curve holds their index.
    """
    count = np.arange(curve.y.size)
    entry: dict[str, Any] = {"name": curve.name, "colour": curve.stroke.colour, "dash": curve.stroke.dash}
    entry |= {"bold": curve.emphasis, "offset": offset, "y": _rounded(curve.y)}
    place = {}
    if not np.array_equal(curve.x, count):
        place["x"] = _rounded(curve.x, digits=7)
    if curve.from_end is not None and not np.array_equal(curve.from_end, count.size - count):
        place["end"] = _rounded(curve.from_end, digits=7)
    if place:
        if place not in places:
            places.append(place)
        entry["place"] = places.index(place)
    if curve.low is not None and curve.high is not None:
        entry |= {"low": _rounded(curve.low), "high": _rounded(curve.high)}
    return entry


def _heat_map(figure: HeatMap) -> dict[str, Any]:
    return {
        **{
            name: getattr(figure, name)
            for name in ("x_label", "y_label", "value_label", "x", "y", "limits", "rows", "words")
        },
        "columns": figure.grid[1],
        "logarithmic": figure.scale == "logarithmic",
        "stops": STOPS[figure.colours].split(),
        "panels": [_panel(figure, panel) for panel in figure.panels],
    }


def _panel(figure: HeatMap, panel: Panel) -> dict[str, Any]:
    low, high = figure.limits
    share = (figure.shown(panel) - low) / (high - low)
    levels = np.where(np.isfinite(share), np.round(np.clip(share, 0, 1) * (MISSING - 1)), MISSING)
    rows, columns = panel.values.shape
    values = base64.b64encode(levels.astype("<u2").tobytes()).decode()
    return {"name": panel.name, "rows": rows, "columns": columns, "values": values}


def _rounded(values: Num[np.ndarray, "n_points"], *, digits: int = DIGITS) -> list[float | int | None]:
    """Values in few digits, which keep the page small; a gap for what is no number."""
    rounded = (float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist())
    return [int(value) if value is not None and value == int(value) else value for value in rounded]
