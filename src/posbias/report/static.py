"""The same figures as PNG, drawn by matplotlib without a display, for papers and terminals without a browser."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.records import PICTURE_SOFTWARE
from posbias.report.figures import Curve, Figure, offset
from posbias.report.palette import GRID, INK, clear_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.6)),
    "dashdot": (0, (5, 1.6, 1, 1.6)),
    "longdash": (0, (9, 2)),
    "longdashdot": (0, (9, 2, 1, 2)),
}
ROW_MARKERS = {
    "solid": ("o", False),
    "dash": ("s", False),
    "dot": ("o", True),
    "dashdot": ("D", False),
    "longdash": ("^", False),
    "longdashdot": ("v", False),
}
"""Where points lie in rows, a dash becomes a marker: its shape, and whether it is hollow."""
INCHES = (11.0, 4.9)
DOTS_PER_INCH = 150
TITLE_CHARACTERS = 104
LEGEND_CHARACTERS = 134
"""Characters that fit the width of the picture, in the title and in a row of the legend."""
INCHES_PER_ROW = 0.27
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "font.family": "DejaVu Sans",
}


def png(figure: Figure) -> bytes:
    """The figure as a PNG: profiles on a logarithmic and a linear axis side by side, the rest on one."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        columns = _legend_columns([curve.name for curve in figure.curves])
        entries = -(-len(figure.curves) // columns)
        height = max(INCHES[1] + INCHES_PER_ROW * max(0, entries - 4), 1.6 + INCHES_PER_ROW * len(figure.rows))
        canvas = Canvas(figsize=(INCHES[0], height), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(canvas)
        panels = canvas.subplots(1, 2 if figure.log_range else 1, squeeze=False)[0]
        for panel, scale in zip(panels, ("log", "linear") if figure.log_range else ("linear",), strict=True):
            if figure.rows:
                _draw_rows(panel, figure)
            else:
                _draw(panel, figure, scale)
        canvas.suptitle(
            _literal("\n".join(clear_title(figure.title, TITLE_CHARACTERS))),
            x=0.01,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        handles, labels = panels[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", metadata={"Software": PICTURE_SOFTWARE})
    return buffer.getvalue()


def _legend_columns(names: Sequence[str]) -> int:
    """Columns of the legend that fit the width of the picture, for names and the strokes before them."""
    return max(1, min(len(names), LEGEND_CHARACTERS // (max(map(len, names)) + 9)))


def _draw(panel: "Axes", figure: Figure, scale: str) -> None:
    for curve in figure.curves:
        _draw_curve(panel, curve, figure)
    panel.set_xlabel(figure.x_label)
    panel.set_ylabel(figure.y_label)
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.01)
    if figure.log_range is not None:
        panel.set_yscale(scale)
        panel.set_ylim(figure.log_range if scale == "log" else figure.linear_range)
        cut = f", {figure.cut_note}" if scale == "linear" and figure.cut_note else ""
        panel.set_title(f"{scale} scale{cut}", loc="right", fontsize=9.5, color="#555555")
        if scale == "log":
            _plain_ticks(panel, figure.log_range)
    elif not figure.log_axes and all(float(curve.y.min()) >= 0 for curve in figure.curves):
        panel.set_ylim(bottom=0)
    for name in figure.log_axes:
        panel.set(**{f"{name}scale": "log"})


def _draw_rows(panel: "Axes", figure: Figure) -> None:
    for number, curve in enumerate(figure.curves):
        panel.errorbar(
            curve.y,
            curve.x + offset(number, len(figure.curves)),
            xerr=None if curve.low is None or curve.high is None else [curve.y - curve.low, curve.high - curve.y],
            label=_literal(curve.name),
            color=curve.stroke.colour,
            linestyle="none",
            elinewidth=0.9,
            marker=ROW_MARKERS[curve.stroke.dash][0],
            markersize=3.5,
            markerfacecolor="white" if ROW_MARKERS[curve.stroke.dash][1] else curve.stroke.colour,
        )
    panel.axvline(0, color=INK, linewidth=0.8)
    panel.set_yticks(range(1, len(figure.rows) + 1), [_literal(name) for name in figure.rows])
    panel.set_ylim(len(figure.rows) + 0.6, 0.4)
    panel.set_xlabel(figure.y_label)
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _plain_ticks(panel: "Axes", log_range: tuple[float, float]) -> None:
    """1, 2, 5, 10 ... over a few decades, powers of ten over many, written as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    steps = (1.0, 2.0, 5.0) if log_range[1] / log_range[0] < 300 else (1.0,)
    panel.yaxis.set_major_locator(LogLocator(subs=steps))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _draw_curve(panel: "Axes", curve: Curve, figure: Figure) -> None:
    positive = figure.log_range is not None
    if curve.low is not None and curve.high is not None:
        low = np.maximum(curve.low, np.finfo(np.float64).tiny) if positive else curve.low
        panel.fill_between(curve.x, low, curve.high, color=curve.stroke.colour, alpha=0.16, linewidth=0)
    panel.plot(
        curve.x,
        curve.y,
        label=_literal(curve.name),
        color=curve.stroke.colour,
        linestyle=DASHES[curve.stroke.dash] if figure.lines else "none",
        linewidth=1.2 if curve.emphasis else 1.6,
        marker="o" if figure.markers else None,
        markersize=3.5 if figure.lines else 6.0,
    )


def _literal(text: str) -> str:
    """Text as it is: a dollar sign would start a formula."""
    return text.replace("$", r"\$")
