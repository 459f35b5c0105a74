"""Bars of the shift of each mass, measured beside every theory, with intervals: for the page and as a PNG.

One panel per mass, one group of bars per intervention, one colour per source; the measurement is black.
"""

import html
import io
from collections.abc import Mapping
from typing import Any

from posbias.records import PICTURE_SOFTWARE, Record
from posbias.report.interactive import CONFIG, FONT
from posbias.report.palette import GRID, INK, MEASURED, theory_strokes
from posbias.report.static import DOTS_PER_INCH, STYLE
from posbias.report.wording import KINDS, STATISTICS, label

SOURCE_NAMES = {
    "measured": "measured",
    "rollout_content": "architecture: residual rollout with content",
    "attention_rollout": "own attention rolled out, replaced",
    "power_rollout": "power rollout, replaced",
    "power_rollout_rerun": "power rollout, run again",
}
"""Replaced: on the unchanged model's activations. Run again: on the changed model's own."""
BAR = 0.8
"""Height of a group of bars, as a share of the distance between groups."""
PIXELS_PER_GROUP = 92

Bars = dict[str, dict[str, dict[str, Mapping[str, Any]]]]
"""By mass, source and intervention, a stored interval of a shift."""


def bars_of(record: Record, kind: str) -> Bars:
    """Every stored shift of one kind of influence, the sources in their order."""
    bars: Bars = {}
    order = record.scalars["sources"]
    for shift in sorted(record.scalars["shifts"], key=lambda stored: order.index(stored["source"])):
        if shift["kind"] == kind:
            by_source = bars.setdefault(shift["mass"], {})
            by_source.setdefault(shift["source"], {})[shift["intervention"]] = shift["shift"]
    return bars


def shift_chart(record: Record, kind: str, *, anchor: str) -> str:
    """The bars as an HTML fragment; `anchor` becomes the id of its element and must be unique on the page."""
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    bars, names = bars_of(record, kind), _names(record)
    titles = [label(STATISTICS, mass) for mass in bars]
    chart = make_subplots(rows=1, cols=len(bars), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    colours = _colours(bars)
    for column, by_source in enumerate(bars.values(), start=1):
        for source, stored in by_source.items():
            trace = graph.Bar(_trace(source, stored, names, colours[source], first=column == 1))
            chart.add_trace(trace, row=1, col=column)
    chart.update_layout(
        title={"text": html.escape(_title(kind)), "x": 0, "font": {"size": 16}},
        font={"family": FONT, "color": INK, "size": 13},
        paper_bgcolor="white",
        plot_bgcolor="white",
        barmode="group",
        bargap=1 - BAR,
        margin={"l": 10, "r": 20, "t": 80, "b": 110},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
    )
    chart.update_xaxes(gridcolor=GRID, zeroline=True, zerolinecolor=INK, title={"text": "percentage points"})
    chart.update_yaxes(autorange="reversed", automargin=True)
    fragment: str = chart.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=anchor,
        default_height=f"{230 + PIXELS_PER_GROUP * len(names)}px",
        config=CONFIG,
    )
    return fragment


def shift_png(record: Record, kind: str) -> bytes:
    """The same bars as a PNG."""
    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    bars, names = bars_of(record, kind), _names(record)
    colours = _colours(bars)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(12.0, 2.0 + 0.85 * len(names)), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(canvas)
        panels = canvas.subplots(1, len(bars), squeeze=False, sharey=True)[0]
        for panel, (mass, by_source) in zip(panels, bars.items(), strict=True):
            for slot, (source, stored) in enumerate(by_source.items()):
                height = BAR / len(by_source)
                rows = [index for index, name in enumerate(names) if name in stored]
                places = np.array(rows) + (slot - (len(by_source) - 1) / 2) * height
                values, below, above = _ends([stored[names[row]] for row in rows])
                style = {"color": colours[source], "label": SOURCE_NAMES.get(source, source), "ecolor": "#777777"}
                panel.barh(places, values, 0.92 * height, xerr=[below, above], error_kw={"lw": 1}, **style)
            panel.axvline(0, color=INK, linewidth=0.8)
            panel.set_title(label(STATISTICS, mass), loc="left", fontsize=10.5)
            panel.set_xlabel("percentage points")
            panel.grid(axis="x", color=GRID, linewidth=0.8)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        canvas.suptitle(_title(kind), x=0.01, ha="left", fontsize=12, fontweight="bold")
        handles, labels = panels[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", metadata={"Software": PICTURE_SOFTWARE})
    return buffer.getvalue()


def _trace(
    source: str, stored: Mapping[str, Mapping[str, Any]], names: list[str], colour: str, *, first: bool
) -> dict[str, Any]:
    """One source's bars in one panel."""
    shown = [name for name in names if name in stored]
    values, below, above = _ends([stored[name] for name in shown])
    return {
        "orientation": "h",
        "name": html.escape(SOURCE_NAMES.get(source, source)),
        "legendgroup": source,
        "showlegend": first,
        "y": [html.escape(name) for name in shown],
        "x": values,
        "marker": {"color": colour},
        "error_x": {"array": above, "arrayminus": below, "thickness": 1.2, "width": 3, "color": "#777777"},
        "hovertemplate": "%{x:+.1f} points",
    }


def _ends(stored: list[Mapping[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Values and how far their intervals reach below and above, in points; nothing where an end is infinite."""
    values = [100 * entry["value"] for entry in stored]
    below = [0.0 if entry["low"] is None else 100 * (entry["value"] - entry["low"]) for entry in stored]
    above = [0.0 if entry["high"] is None else 100 * (entry["high"] - entry["value"]) for entry in stored]
    return values, below, above


def _names(record: Record) -> list[str]:
    """Interventions with any shift, in their order."""
    shown = {shift["intervention"] for shift in record.scalars["shifts"]}
    return [entry["name"] for entry in record.scalars["interventions"] if entry["name"] in shown]


def _colours(bars: Bars) -> dict[str, str]:
    theories = list(
        dict.fromkeys(source for by_source in bars.values() for source in by_source if source != "measured")
    )
    strokes = theory_strokes(theories)
    return {"measured": MEASURED.colour, **{name: strokes[name].colour for name in theories}}


def _title(kind: str) -> str:
    return f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})"
