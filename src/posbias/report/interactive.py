"""Figures as interactive plotly charts: hover for values, buttons for a logarithmic or linear axis, click to hide.

Every text is escaped before it reaches plotly, which reads a little HTML in labels. The chart is an HTML fragment
without plotly itself; the page inlines the library once (report/page.py).
"""

import html
import math
from typing import Any

import numpy as np

from posbias.report.figures import Curve, Figure, offset
from posbias.report.palette import GRID, INK, clear_title

BAND_OPACITY = 0.16
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"],
}
"""No button that would send the data anywhere."""
TITLE_CHARACTERS = 104
"""A title line that stays clear of the toolbar on a page of normal width."""
PIXELS_PER_ROW = 26
ROW_SYMBOLS = {
    "solid": "circle",
    "dash": "square",
    "dot": "circle-open",
    "dashdot": "diamond",
    "longdash": "triangle-up",
    "longdashdot": "triangle-down",
}
"""Where points lie in rows, a dash becomes a marker."""
FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"


def interactive(figure: Figure, *, anchor: str) -> str:
    """The figure as an HTML fragment; `anchor` becomes the id of its element and must be unique on the page."""
    import plotly.graph_objects as graph

    chart = graph.Figure()
    for number, curve in enumerate(figure.curves):
        if figure.rows:
            chart.add_trace(_row_trace(curve, figure.rows, offset(number, len(figure.curves))))
            continue
        for trace in _traces(curve, figure):
            chart.add_trace(trace)
    chart.update_layout(_layout(figure))
    fragment: str = chart.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=anchor,
        default_height=f"{max(480, 230 + PIXELS_PER_ROW * len(figure.rows))}px",
        config=CONFIG,
    )
    return fragment


def plotly_source() -> str:
    """The plotly library itself, to be inlined once."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def _traces(curve: Curve, figure: Figure) -> list[dict[str, Any]]:
    positive = figure.log_range is not None
    name = html.escape(curve.name)
    mode = "+".join([*(["lines"] if figure.lines else []), *(["markers"] if figure.markers else [])])
    line = {"color": curve.stroke.colour, "dash": curve.stroke.dash, "width": 1.6 if curve.emphasis else 2.2}
    main = {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "legendgroup": name,
        "x": curve.x,
        "y": curve.y,
        "line": line,
        "hovertemplate": "%{y:.3g}",
    }
    if curve.low is None or curve.high is None:
        return [main]
    outline = np.concatenate([curve.high, curve.low[::-1]])
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": np.concatenate([curve.x, curve.x[::-1]]),
        "y": np.maximum(outline, np.finfo(np.float64).tiny) if positive else outline,
        "fill": "toself",
        "fillcolor": _translucent(curve.stroke.colour),
        "line": {"width": 0},
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
        "name": name,
    }
    return [band, main]


def _row_trace(curve: Curve, rows: tuple[str, ...], shift: float) -> dict[str, Any]:
    """Points in named rows, with their intervals."""
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": html.escape(curve.name),
        "x": curve.y,
        "y": curve.x + shift,
        "text": [html.escape(rows[round(place) - 1]) for place in curve.x.tolist()],
        "marker": {"color": curve.stroke.colour, "symbol": ROW_SYMBOLS[curve.stroke.dash], "size": 7},
        "hovertemplate": "%{text}: %{x:.3g}",
    }
    if curve.low is not None and curve.high is not None:
        ends = {"array": curve.high - curve.y, "arrayminus": curve.y - curve.low}
        trace["error_x"] = {**ends, "thickness": 1, "width": 0}
    return trace


def _layout(figure: Figure) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "ticks": "outside", "showline": True}
    title = "<br>".join(html.escape(line) for line in clear_title(figure.title, TITLE_CHARACTERS))
    layout: dict[str, Any] = {
        "title": {
            "text": f"<b>{title}</b>",
            "x": 0,
            "xref": "paper",
            "font": {"size": 15},
            "yanchor": "top",
            "y": 0.97,
        },
        "font": {"family": FONT, "color": INK, "size": 13},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "x unified",
        "margin": {"l": 70, "r": 20, "t": 84, "b": 110},
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        "xaxis": {**axis, "title": {"text": figure.x_label}},
        "yaxis": {**axis, "title": {"text": figure.y_label}, "rangemode": "tozero"},
    }
    for name in figure.log_axes:
        layout[f"{name}axis"] |= {"type": "log", "exponentformat": "power", "rangemode": "normal"}
    if figure.rows:
        count = len(figure.rows)
        layout["hovermode"] = "closest"
        layout["xaxis"] |= {"title": {"text": figure.y_label}, "zeroline": True, "zerolinecolor": INK}
        layout["yaxis"] = {
            **axis,
            "range": [count + 0.6, 0.4],
            "automargin": True,
            "tickvals": list(range(1, count + 1)),
        }
        layout["yaxis"]["ticktext"] = [html.escape(name) for name in figure.rows]
        layout["legend"] |= {"yref": "container", "y": 0.01, "yanchor": "bottom"}
    if figure.log_range is not None:
        logarithmic = [math.log10(end) for end in figure.log_range]
        layout["yaxis"] |= {
            "type": "log",
            "range": logarithmic,
            "dtick": _log_ticks(logarithmic),
            "minor": {"showgrid": False},
        }
        layout["updatemenus"] = [_axis_buttons(logarithmic, figure)]
    return layout


def _axis_buttons(logarithmic: list[float], figure: Figure) -> dict[str, Any]:
    linear = list(figure.linear_range) if figure.linear_range is not None else None
    cut = f" ({figure.cut_note})" if figure.cut_note else ""
    buttons = [
        {
            "label": "log scale",
            "method": "relayout",
            "args": [{"yaxis.type": "log", "yaxis.range": logarithmic, "yaxis.tickmode": "array"}],
        },
        {
            "label": f"linear scale{cut}",
            "method": "relayout",
            "args": [{"yaxis.type": "linear", "yaxis.range": linear, "yaxis.tickmode": "auto"}],
        },
    ]
    place = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}
    return {"type": "buttons", "direction": "right", "showactive": True, "buttons": buttons, **place}


def _log_ticks(logarithmic: list[float]) -> dict[str, Any]:
    """1, 2, 5, 10 ... over a few decades, powers of ten over many, written as numbers."""
    steps = (1, 2, 5) if logarithmic[1] - logarithmic[0] < 2.5 else (1,)
    values = [step * 10.0**decade for decade in range(-12, 13) for step in steps]
    return {"tickmode": "array", "tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def _translucent(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"
