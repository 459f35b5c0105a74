"""Figures as PNG, PDF or SVG, drawn by matplotlib without a display, for papers and terminals without a browser."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.display.figures import FAINT, GRID, INK, Figure, HeatMap, log_steps, title_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PICTURE_SOFTWARE = "posbias"
"""What every picture names as its software, by which an older run's pictures are known."""
DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.6)),
    "dashdot": (0, (5, 1.6, 1, 1.6)),
    "longdash": (0, (9, 2)),
    "longdashdot": (0, (9, 2, 1, 2)),
}
ROW_MARKERS = {"solid": "o", "dash": "s", "dot": "o", "dashdot": "D", "longdash": "^", "longdashdot": "v"}
"""Markers of points that lie in rows, by the dash of their stroke; that of a dot is hollow."""
INCHES = (11.0, 4.9)
INCHES_PER_ROW = 0.27
DOTS_PER_INCH = 150
LEGEND_CHARACTERS = 134
"""Characters that fit the width of the picture in a row of the legend."""
LETTER_SHARE = 0.0145
"""Width of a letter above a stretch, as a share of one of two panels."""
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "font.family": "DejaVu Sans",
}
METADATA: dict[str, Callable[[str, str], Any]] = {
    "png": lambda title, about: {"Software": PICTURE_SOFTWARE},
    "pdf": lambda title, about: {"Title": title, "Subject": about, "Creator": PICTURE_SOFTWARE, "CreationDate": None},
    "svg": lambda title, about: {"Title": title, "Description": about, "Creator": PICTURE_SOFTWARE, "Date": None},
}
"""What a picture of each sort says of itself."""


def image_of(figure: Figure | HeatMap, sort: str = "png", *, about: str = "") -> bytes:
    """The figure as a PNG, PDF or SVG: profiles on a logarithmic and a linear axis side by side, the rest on one.

    `about` says how the figure was made.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(canvas)
        if isinstance(figure, HeatMap):
            _draw_heat_map(canvas, figure)
        else:
            _draw_curves(canvas, figure)
        title = _literal("\n".join(title_lines(figure.title)))
        canvas.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return bytes_of(canvas, sort, title=figure.title, about=about)


def bytes_of(canvas: "Canvas", sort: str, *, title: str, about: str) -> bytes:
    """The content of a picture's file.

    A PDF and an SVG carry the title, and how the figure was made (`about`), in their metadata, and no date: the same
    figure gives the same bytes.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": PICTURE_SOFTWARE}):
        canvas.savefig(buffer, format=sort, metadata=METADATA[sort](title, about))
    return buffer.getvalue()


def _draw_curves(canvas: "Canvas", figure: Figure) -> None:
    # Columns of the legend that fit the width of the picture, for names and the strokes before them.
    widest = max(len(curve.name) for curve in figure.curves) + 9
    columns = max(1, min(len(figure.curves), LEGEND_CHARACTERS // widest))
    lines = -(-len(figure.curves) // columns)
    height = max(INCHES[1] + INCHES_PER_ROW * max(0, lines - 4), 1.6 + INCHES_PER_ROW * len(figure.rows))
    canvas.set_size_inches(INCHES[0], height)
    scales = ("log", "linear") if figure.log_range else ("linear",)
    panels = canvas.subplots(1, len(scales), squeeze=False)[0]
    for panel, scale in zip(panels, scales, strict=True):
        if figure.rows:
            _draw_rows(panel, figure)
        else:
            _draw_lines(panel, figure, scale)
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2)


def _draw_lines(panel: "Axes", figure: Figure, scale: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    by_distance = figure.by_distance and scale == "log"
    for curve in figure.curves:
        x = curve.from_end if by_distance and curve.from_end is not None else curve.x
        if curve.low is not None and curve.high is not None:
            logarithmic = figure.log_range is not None or "y" in figure.log_axes
            low = np.maximum(curve.low, np.finfo(np.float64).tiny) if logarithmic else curve.low
            panel.fill_between(x, low, curve.high, color=curve.stroke.colour, alpha=0.16, linewidth=0)
        panel.plot(
            x,
            curve.y,
            label=_literal(curve.name),
            color=curve.stroke.colour,
            linestyle=DASHES[curve.stroke.dash] if figure.lines else "none",
            linewidth=1.2 if curve.emphasis else 1.6,
            marker="o" if figure.markers else None,
            markersize=3.5 if figure.lines else 6.0,
        )
    panel.set_xlabel(figure.axis_names[by_distance])
    panel.set_ylabel(figure.y_label)
    panel.margins(x=0.01)
    if by_distance:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_xlim(1.08 * figure.farthest, 0.92)  # the last position on the right, as on the other axis
    _draw_stretches(panel, figure, by_distance=by_distance)
    if figure.log_range is not None:
        panel.set_yscale(scale)
        panel.set_ylim(figure.log_range if scale == "log" else figure.linear_range)
        cut = f", {figure.cut_note}" if scale == "linear" and figure.cut_note else ""
        panel.set_title(f"{scale} scale{cut}", loc="right", fontsize=9.5, color="#555555")
        if scale == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=log_steps(figure.log_range)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
    elif not figure.log_axes and all(float(curve.y.min()) >= 0 for curve in figure.curves):
        panel.set_ylim(bottom=0)
    for name in figure.log_axes:
        panel.set(**{f"{name}scale": "log"})
    if "y" in figure.log_axes:  # an interval that reaches 0 ends at the foot
        ends = [values for curve in figure.curves for values in (curve.y, curve.low, curve.high) if values is not None]
        positive = np.concatenate([values[np.isfinite(values) & (values > 0)] for values in ends])
        if positive.size:
            panel.set_ylim(positive.min() / 1.5, positive.max() * 1.5)


def _draw_stretches(panel: "Axes", figure: Figure, *, by_distance: bool) -> None:
    """Shades, each under its words; those without room beside a wider stretch's are left out."""
    stretches = [
        (figure.farthest - begin, max(figure.farthest - end, 1.0)) if by_distance else (begin, end)
        for begin, end, _ in figure.stretches
    ]
    for ends in stretches:
        panel.axvspan(*ends, color=FAINT, alpha=0.12, linewidth=0)
    panel.get_xlim()  # ranges are settled when they are asked for, not before
    to_share = panel.transData + panel.transAxes.inverted()
    spans: list[tuple[float, float, str]] = []
    for ends, (_, _, words) in zip(stretches, figure.stretches, strict=True):
        start, stop = (float(to_share.transform((end, 1.0))[0]) for end in ends)
        spans.append((start, stop, words))
    labelled: list[tuple[float, float]] = []
    for start, stop, words in sorted(spans, key=lambda span: span[0] - span[1]):
        half = LETTER_SHARE * (len(words) + 0.5) / 2
        middle = min(max((start + stop) / 2, half), 1 - half)
        if all(abs(middle - centre) >= half + beside for centre, beside in labelled):
            labelled.append((middle, half))
            panel.text(middle, 0.985, words, transform=panel.transAxes, ha="center", va="top", fontsize=8.5)


def _draw_rows(panel: "Axes", figure: Figure) -> None:
    for number, curve in enumerate(figure.curves):
        panel.errorbar(
            curve.y,
            curve.x + figure.row_offset(number),
            xerr=None if curve.low is None or curve.high is None else [curve.y - curve.low, curve.high - curve.y],
            label=_literal(curve.name),
            color=curve.stroke.colour,
            linestyle="none",
            elinewidth=0.9,
            marker=ROW_MARKERS[curve.stroke.dash],
            markersize=3.5,
            markerfacecolor="white" if curve.stroke.dash == "dot" else curve.stroke.colour,
        )
    panel.axvline(0, color=INK, linewidth=0.8)
    panel.set_yticks(range(1, len(figure.rows) + 1), [_literal(name) for name in figure.rows])
    panel.set_ylim(len(figure.rows) + 0.6, 0.4)
    panel.set_xlabel(figure.y_label)


def _draw_heat_map(canvas: "Canvas", figure: HeatMap) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rows, columns = figure.grid
    canvas.set_size_inches(INCHES[0], 1.4 + 3.0 * rows)
    axes = canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    height, width = figure.panels[0].values.shape
    (left, right), (top, bottom) = figure.x, figure.y
    beside, above = ((right - left) / max(width - 1, 1) / 2 or 0.5), ((bottom - top) / max(height - 1, 1) / 2 or 0.5)
    low, high = figure.limits
    for axis, panel in zip(axes.flat, figure.panels, strict=False):
        image = axis.imshow(
            figure.shown(panel),
            cmap=figure.colours,
            vmin=low,
            vmax=high,
            extent=(left - beside, right + beside, bottom + above, top - above),
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_title(panel.name, fontsize=10)
        if figure.rows:
            axis.set_yticks(range(1, len(figure.rows) + 1), [_literal(name) for name in figure.rows])
        if width <= 12:  # every column has its number
            axis.set_xticks(np.linspace(left, right, width))
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(figure.x_label)
    for axis in axes[:, 0]:
        axis.set_ylabel(figure.y_label)
    bar = canvas.colorbar(image, ax=axes, label=figure.value_label, aspect=30, pad=0.01)
    if figure.scale == "logarithmic":
        bar.locator = MaxNLocator(integer=True)
        bar.formatter = FuncFormatter(lambda value, _: f"{10.0**value:g}")
        bar.update_ticks()


def _literal(text: str) -> str:
    """Text as it is: a dollar sign would start a formula."""
    return text.replace("$", r"\$")
