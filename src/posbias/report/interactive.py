"""Figures as interactive plotly charts: hover for values, buttons for a logarithmic or linear axis, click to hide.

Every text is escaped before it reaches plotly, which reads a little HTML in labels. A chart is an HTML fragment without
plotly itself; the page inlines the library once (report/page.py).
"""

import html
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from posbias.report.figures import FROM_END, GRID, INK, Curve, Figure, HeatMap, log_steps, title_lines

BAND_OPACITY = 0.16
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"],
}
"""No button that would send the data anywhere."""
PIXELS_PER_ROW = 26
PIXELS_PER_PANEL = 330
LEGEND_CHARACTERS = 150
"""Of a line of the legend, strokes included, on a page of normal width."""
MENU_PIXELS = 36
"""Between two rows of buttons."""
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
DIGITS = 4
"""Significant digits of a heat map's values: all that a hover text shows."""

Plotly = dict[str, Any]


def interactive(figure: Figure | HeatMap, *, anchor: str) -> str:
    """The figure as an HTML fragment; `anchor` becomes the id of its element and must be unique on the page."""
    if isinstance(figure, HeatMap):
        chart, height = _heat_map(figure), 150 + PIXELS_PER_PANEL * figure.grid[0]
    else:
        chart, height = drawn(figure), _height(figure)
    fragment: str = chart.to_html(
        full_html=False, include_plotlyjs=False, div_id=anchor, default_height=f"{height}px", config=CONFIG
    )
    return fragment


def _height(figure: Figure) -> int:
    """In pixels: room for rows, a second row of buttons, and the lines of a long legend on a page of normal width."""
    columns = max(1, LEGEND_CHARACTERS // (max(len(curve.name) for curve in figure.curves) + 8))
    lines = -(-len(figure.curves) // columns)
    plain = 480 + MENU_PIXELS * figure.by_distance + PIXELS_PER_ROW * max(0, lines - 2)
    return max(plain, 230 + PIXELS_PER_ROW * len(figure.rows))


def plotly_source() -> str:
    """The plotly library itself, to be inlined once."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def _look(title: str, top: float) -> Plotly:
    """Title, font and colours of every chart; the title begins at `top` of its height."""
    text = "<br>".join(html.escape(line) for line in title_lines(title))
    return {
        "title": {"text": f"<b>{text}</b>", "x": 0, "xref": "paper", "font": {"size": 15}, "yanchor": "top", "y": top},
        "font": {"family": FONT, "color": INK, "size": 13},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
    }


def drawn(figure: Figure) -> Any:
    """A figure of curves as a plotly chart."""
    import plotly.graph_objects as graph

    chart = graph.Figure()
    for number, curve in enumerate(figure.curves):
        if figure.rows:
            chart.add_trace(_row_trace(curve, figure.rows, figure.row_offset(number)))
        else:
            chart.add_traces(_line_traces(curve, figure))
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "ticks": "outside", "showline": True}
    layout = {
        **_look(figure.title, 0.97),
        "hovermode": "x unified",
        "margin": {"l": 70, "r": 20, "t": 84, "b": 110},
        "legend": {"orientation": "h", "y": -0.25 if figure.by_distance else -0.2, "yanchor": "top", "x": 0},
        "xaxis": {**axis, "title": {"text": figure.x_label}},
        "yaxis": {**axis, "title": {"text": figure.y_label}, "rangemode": "tozero"},
    }
    for name in figure.log_axes:
        layout[f"{name}axis"] |= {"type": "log", "exponentformat": "power", "rangemode": "normal"}
    if figure.rows:
        layout["hovermode"] = "closest"
        layout["xaxis"] |= {"title": {"text": figure.y_label}, "zeroline": True, "zerolinecolor": INK}
        layout["yaxis"] = {
            **axis,
            "range": [len(figure.rows) + 0.6, 0.4],
            "automargin": True,
            "tickvals": list(range(1, len(figure.rows) + 1)),
            "ticktext": [html.escape(name) for name in figure.rows],
        }
        layout["legend"] |= {"yref": "container", "y": 0.01, "yanchor": "bottom"}
    if figure.log_range is not None:
        layout |= _log_or_linear(figure, figure.log_range, layout["yaxis"])
    if figure.by_distance:
        _by_distance(figure, layout)
    chart.update_layout(layout)
    return chart


def _by_distance(figure: Figure, layout: Plotly) -> None:
    """The axis of distances from the end in place of positions, and buttons above the others that choose between them.

    Positions keep their order: the last one is on the right of either.
    """
    ends = [float(np.log10(1.08 * figure.farthest)), float(np.log10(0.92))]
    ticks = [10.0**decade for decade in range(13)]
    distance = {"type": "log", "range": ends, "tickmode": "array", "title.text": FROM_END}
    whole = [0.0, max(float(curve.x.max()) for curve in figure.curves)]
    position = {"type": "linear", "range": whole, "tickmode": "auto", "title.text": figure.x_label}
    buttons = [
        {
            "label": label,
            "method": "update",
            "args": [{"x": _all_x(figure, distances)}, {f"xaxis.{name}": value for name, value in axis.items()}],
        }
        for label, distances, axis in (
            ("by distance from the end", True, distance),
            ("by position", False, position),
        )
    ]
    layout["xaxis"] |= {name: value for name, value in distance.items() if name != "title.text"}
    layout["xaxis"] |= {
        "title": {"text": FROM_END, "font": {"size": 14}},
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }
    (menu,) = layout["updatemenus"]
    layout["updatemenus"] = [{**menu, "buttons": buttons, "pad": {"b": MENU_PIXELS}}, menu]
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] + MENU_PIXELS}


def _all_x(figure: Figure, by_distance: bool) -> list[list[float]]:
    """Where the points of every trace lie, bands included."""
    shown = replace(figure, by_distance=by_distance)
    traces = [trace for curve in figure.curves for trace in _line_traces(curve, shown)]
    return [[float(f"{value:.6g}") for value in trace["x"].tolist()] for trace in traces]


def _line_traces(curve: Curve, figure: Figure) -> list[Plotly]:
    """A curve, and behind it its band."""
    name = html.escape(curve.name)
    x = curve.from_end if figure.by_distance and curve.from_end is not None else curve.x
    main = {
        "type": "scatter",
        "mode": "+".join(["lines"] * figure.lines + ["markers"] * figure.markers),
        "name": name,
        "legendgroup": name,
        "x": x,
        "y": curve.y,
        "line": {"color": curve.stroke.colour, "dash": curve.stroke.dash, "width": 1.6 if curve.emphasis else 2.2},
        "hovertemplate": "%{y:.3g}",
    }
    if curve.low is None or curve.high is None:
        return [main]
    outline = np.concatenate([curve.high, curve.low[::-1]])
    red, green, blue = (int(curve.stroke.colour[start : start + 2], 16) for start in (1, 3, 5))
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": np.concatenate([x, x[::-1]]),
        "y": np.maximum(outline, np.finfo(np.float64).tiny) if figure.log_range is not None else outline,
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{BAND_OPACITY})",
        "line": {"width": 0},
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
        "name": name,
    }
    return [band, main]


def _row_trace(curve: Curve, rows: tuple[str, ...], shift: float) -> Plotly:
    """Points in named rows, with their intervals."""
    trace: Plotly = {
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


def _log_or_linear(figure: Figure, log_range: tuple[float, float], axis: Plotly) -> Plotly:
    """The logarithmic axis, and two buttons that choose between it and the linear one."""
    ends = [float(np.log10(end)) for end in log_range]
    values = [step * 10.0**decade for decade in range(-12, 13) for step in log_steps(log_range)]
    ticks = {"tickmode": "array", "tickvals": values, "ticktext": [f"{value:g}" for value in values]}
    linear = {"yaxis.type": "linear", "yaxis.range": figure.linear_range, "yaxis.tickmode": "auto"}
    buttons = [
        ("log scale", {"yaxis.type": "log", "yaxis.range": ends, "yaxis.tickmode": "array"}),
        (f"linear scale ({figure.cut_note})" if figure.cut_note else "linear scale", linear),
    ]
    menu = {
        "type": "buttons",
        "direction": "right",
        "showactive": True,
        "font": {"size": 11},
        "buttons": [{"label": label, "method": "relayout", "args": [changes]} for label, changes in buttons],
        "x": 1,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
    }
    logarithmic = {"type": "log", "range": ends, "minor": {"showgrid": False}, **ticks}
    return {"yaxis": {**axis, **logarithmic}, "updatemenus": [menu]}


def _heat_map(figure: HeatMap) -> Any:
    from plotly.subplots import make_subplots

    rows, columns = figure.grid
    chart = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[html.escape(panel.name) for panel in figure.panels],
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.12 / rows,
    )
    for index, panel in enumerate(figure.panels):
        height, width = panel.values.shape
        trace = {
            "type": "heatmap",
            "x": np.linspace(*figure.x, width),
            "y": np.linspace(*figure.y, height),
            "z": _rounded(figure.shown(panel)),
            "customdata": _rounded(panel.values),
            "coloraxis": "coloraxis",
            "hovertemplate": "%{y:.0f}, %{x:.0f}: %{customdata:.3g}<extra></extra>",
            "hoverongaps": False,
        }
        chart.add_trace(trace, row=index // columns + 1, col=index % columns + 1)
    low, high = figure.limits
    bar: Plotly = {"title": {"text": html.escape(figure.value_label), "side": "right"}, "thickness": 14}
    if figure.scale == "logarithmic":
        ticks = list(range(int(np.ceil(low)), int(np.floor(high)) + 1))
        bar |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    chart.update_layout(
        **_look(figure.title, 0.98),
        margin={"l": 70, "r": 20, "t": 104 if figure.panels[0].name else 70, "b": 60},
        coloraxis={"colorscale": figure.colours, "cmin": low, "cmax": high, "colorbar": bar},
    )
    chart.update_xaxes(constrain="domain", ticks="outside")
    chart.update_yaxes(autorange="reversed", ticks="outside")
    chart.update_annotations(font={"size": 13})
    chart.update_xaxes(title_text=figure.x_label, row=rows)
    chart.update_yaxes(title_text=figure.y_label, col=1)
    return chart


def _rounded(values: Float[np.ndarray, "rows columns"]) -> list[list[float | None]]:
    """Few digits, which keep the page small; a gap where there is no number."""
    return [[float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in row] for row in values]
