"""Figures drawn by matplotlib without a display: as PNG, PDF or SVG for papers, and as SVG within a page.

On a page ink is `currentColor` and the other colours are mixed with white in the dark; texts stay texts, in the page's
font; a pointer is told the values at every place.
"""

import html
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from posbias.display.figures import DRAWN_POSITIONS, FAINT, GRID, INK, Curve, Figure, HeatMap, log_steps

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
INCHES_PER_ROW = 0.27
DOTS_PER_INCH, POINTS_PER_INCH = 150, 72
NOTE = "#555555"
"""Colour of words that say how an axis runs."""
TITLE_CHARACTERS = 104
"""A bold title line that fits the width of a picture."""
EDGE = 0.04
"""Inches around a picture on a page."""
MOST_HEIGHT = 700
"""Pixels of a picture on a page."""
TOLD_PLACES, TOLD_CELLS = 32, 400
"""Most places of a picture on a page at which a pointer is told the values; most cells of a heat map that are told."""
LETTER_SHARE = 0.0145
"""Width of a letter above a stretch, as a share of one of two panels."""
STYLE: Any = {
    "font.size": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.family": "DejaVu Sans",
}
METADATA: dict[str, Callable[[str, str], Any]] = {
    "png": lambda title, about: {"Software": PICTURE_SOFTWARE},
    "pdf": lambda title, about: {"Title": title, "Subject": about, "Creator": PICTURE_SOFTWARE, "CreationDate": None},
    "svg": lambda title, about: {"Title": title, "Description": about, "Creator": PICTURE_SOFTWARE, "Date": None},
}
"""What a picture of each sort says of itself."""
ON_PAGE: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
COLOURS = {
    INK: "currentColor",
    NOTE: "var(--soft, #555555)",
    FAINT: "var(--soft, #8a8a8a)",
    GRID: "var(--line, #e6e6e6)",
}
"""Colours that follow the page's; any other is mixed with white as much as the page wants."""


@dataclass(frozen=True)
class Sheet:
    """Space that a figure is drawn on."""

    width: float
    """Inches."""
    height: float
    characters: int
    """Characters that fit the width, in the legend and below an axis."""
    columns: int
    """Panels of a heat map side by side."""
    row_characters: int
    """Characters of a line of the name of a row, and of an upright axis."""
    both_scales: bool
    """True draws profiles on a logarithmic and on a linear axis, else on the first alone."""


PICTURE = Sheet(11.0, 4.9, 134, 3, 60, both_scales=True)
PAGE = Sheet(5.4, 3.1, 61, 2, 26, both_scales=False)
"""So narrow that its texts can be read on a phone, too."""

Told = tuple[Float[np.ndarray, "2"], Float[np.ndarray, "2"], str]
"""Opposite corners of a rectangle, in points, and what a pointer is told there."""


def image_of(figure: Figure | HeatMap, sort: str = "png", *, about: str = "") -> bytes:
    """The figure as a PNG, PDF or SVG: profiles on a logarithmic and a linear axis side by side, the rest on one.

    `about` says how the figure was made.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(dpi=DOTS_PER_INCH, layout="constrained")
        _draw(canvas, figure, PICTURE)
        title = _literal(fill(figure.title, TITLE_CHARACTERS))
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


def fragment_of(figure: Figure | HeatMap, *, anchor: str, most: int = DRAWN_POSITIONS) -> str:
    """The figure as HTML: its title, and an SVG with at most so many points of a curve that follows the page's colours.

    Args:
        figure: What is drawn; a profile on its logarithmic axis alone.
        anchor: Id of the element, unique on the page.
        most: Points that a curve keeps.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    if isinstance(figure, Figure):
        figure = replace(figure, curves=tuple(curve.thinned(most) for curve in figure.curves))
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, **ON_PAGE, "svg.hashsalt": anchor}):
        canvas = Canvas(dpi=POINTS_PER_INCH, layout="constrained")
        writer = FigureCanvasSVG(canvas)
        told = _draw(canvas, figure, PAGE)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.get_layout_engine().execute(canvas)  # type: ignore[union-attr]
        canvas.set_layout_engine("none")
        for paper in (canvas, *canvas.axes):
            paper.patch.set_visible(False)  # type: ignore[attr-defined]
        writer.print_svg(buffer, metadata=nothing)  # type: ignore[no-untyped-call]  # savefig would draw twice
        # The layout misses what gets longer when ticks are placed anew, so the view takes in all that was drawn.
        inches = canvas.get_tightbbox().padded(EDGE)
    height = canvas.get_size_inches()[1] * POINTS_PER_INCH
    left, bottom, right, top = inches.extents * POINTS_PER_INCH
    view = f"{left:.1f} {height - top:.1f} {right - left:.1f} {top - bottom:.1f}"
    # A picture of many rows is not taller than a screen, as long as its letters stay as large as those of tables.
    tallest = f"max-height:max({MOST_HEIGHT}px,{1.1 * (top - bottom):.0f}px)"
    title, (drawn, colours) = html.escape(figure.title), _inlined(buffer.getvalue())
    return (
        f'<figure class="chart" id="{html.escape(anchor)}"><figcaption>{title}</figcaption>'
        f'<svg viewBox="{view}" role="img" aria-label="{title}" style="{tallest};{colours}">{drawn}'
        f'<g class="told" fill="none" pointer-events="all">{_rectangles(told(), height)}</g></svg></figure>'
    )


def _inlined(svg: str) -> tuple[str, str]:
    """What matplotlib drew, in few bytes and in the page's colours and font, and the style that defines its colours."""
    mixed: dict[str, str] = {}

    def coloured(found: re.Match[str]) -> str:
        return COLOURS.get(found[0]) or f"var({mixed.setdefault(found[0], f'--c{len(mixed)}')})"

    def placed(found: re.Match[str]) -> str:
        return re.sub(r"(\.\d)\d+", r"\1", found[0]).replace(" \n", "")

    def marked(found: re.Match[str]) -> str:  # what it refers to has the other parts of the style
        kept = "; ".join(re.findall('fill[^;"]+', found[0]))
        return f' style="{kept}"'

    drawn = svg.partition("</style>")[2].partition("</defs>")[2].rpartition("</svg>")[0]
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
    drawn = re.sub(r' style="[^"]*"', lambda found: re.sub("#[0-9a-f]{6}", coloured, found[0]), drawn)
    drawn = re.sub(r' (d|x|y)="[^"]*"', placed, drawn)
    drawn = re.sub(r' transform="rotate\(-0 [^"]*"| ?font-family: [^;"]*;?', "", drawn)
    drawn = re.sub(r'(?<=<use xlink:href="#m)[^>]*', lambda found: re.sub(r' style="[^"]*"', marked, found[0]), drawn)
    colours = (f"{name}: color-mix(in srgb, {colour} var(--keep, 100%), white)" for colour, name in mixed.items())
    return re.sub(r">\s+<", "><", drawn), "; ".join(colours)


def _rectangles(told: Iterator[Told], height: float) -> str:
    """Rectangles with a title each, which browsers show beside a pointer."""
    made = []
    for one, other, words in told:
        (left, bottom), (right, top) = np.minimum(one, other), np.maximum(one, other)
        place = f'x="{left:.1f}" y="{height - top:.1f}" width="{right - left:.1f}" height="{top - bottom:.1f}"'
        made.append(f"<rect {place}><title>{html.escape(words)}</title></rect>")
    return "".join(made)


def _draw(canvas: "Canvas", figure: Figure | HeatMap, sheet: Sheet) -> Callable[[], Iterator[Told]]:
    """Draw, and return what tells the places at which a pointer is told something, once all is laid out."""
    if isinstance(figure, HeatMap):
        return _draw_heat_map(canvas, figure, sheet)
    return draw_curves(canvas, figure, sheet)


def draw_curves(canvas: "Canvas", figure: Figure, sheet: Sheet = PICTURE) -> Callable[[], Iterator[Told]]:
    """Draw curves, or rows, and the legend below them."""
    names = [fill(_literal(curve.name), sheet.characters - 8) for curve in figure.curves]
    # Columns of the legend that fit the width of the picture, for names and the strokes before them.
    widest = max(min(len(name), sheet.characters) for name in names) + 7
    columns = max(1, min(len(names), sheet.characters // widest))
    lines = -(-sum(name.count("\n") + 1 for name in names) // columns)
    rows = [fill(name, sheet.row_characters) for name in figure.rows]
    below = INCHES_PER_ROW * max(0, lines - (4 if sheet.both_scales else 1))
    of_rows = INCHES_PER_ROW * sum(max(1.0, 0.7 * (name.count("\n") + 1)) for name in rows)
    canvas.set_size_inches(sheet.width, max(sheet.height + below, 1.3 + INCHES_PER_ROW * lines + of_rows))
    scales = ("log", "linear") if figure.log_range else ("linear",)
    panels = canvas.subplots(1, len(scales) if sheet.both_scales else 1, squeeze=False)[0]
    for panel, scale in zip(panels, scales, strict=False):
        if figure.rows:
            _draw_rows(panel, figure, rows)
        else:
            _draw_lines(panel, figure, scale)
        panel.set_xlabel(fill(panel.get_xlabel(), sheet.characters // len(panels)))
        panel.set_ylabel(fill(panel.get_ylabel(), sheet.row_characters))
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    handles, _ = panels[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2)
    return lambda: (_told_rows if figure.rows else _told_lines)(panels[0], figure)


def _told_lines(panel: "Axes", figure: Figure) -> Iterator[Told]:
    """The values of all curves near every place, in upright strips as wide as there is room."""
    by_distance = figure.by_distance and panel.get_xscale() == "log"
    along = [curve.from_end if by_distance and curve.from_end is not None else curve.x for curve in figure.curves]
    (left, bottom), (right, top) = panel.bbox.min, panel.bbox.max
    across = [panel.transData.transform(np.stack([x, np.ones_like(x)], axis=1))[:, 0] for x in along]
    centres = np.unique(np.concatenate(across).round(1))
    if centres.size > TOLD_PLACES:
        half = (right - left) / TOLD_PLACES / 2
        centres = np.linspace(left + half, right - half, TOLD_PLACES)
    edges = np.concatenate([[left], (centres[1:] + centres[:-1]) / 2, [right]])
    for number, centre in enumerate(centres):
        from_left, to_right = edges[number : number + 2]
        lines, place = [], np.nan
        for curve, x, pixels in zip(figure.curves, along, across, strict=True):
            nearest = int(np.abs(pixels - centre).argmin())
            level = curve.x.size == 2 and curve.y[0] == curve.y[1]
            if level or from_left - 1 <= pixels[nearest] <= to_right + 1:
                lines.append(_told_value(curve, nearest))
                place = place if level or np.isfinite(place) else x[nearest]
        if np.isfinite(place):
            axis = figure.axis_names[by_distance].partition(";")[0]
            corners = np.array([[from_left, bottom], [to_right, top]])
            yield corners[0], corners[1], "\n".join([f"{axis}: {place:.7g}", *lines])


def _told_rows(panel: "Axes", figure: Figure) -> Iterator[Told]:
    """The values of every row, over the width of the picture."""
    (left, _), (right, _) = panel.bbox.min, panel.bbox.max
    for number, name in enumerate(figure.rows, 1):
        ends = panel.transData.transform([[0.0, number + 0.5], [0.0, number - 0.5]])[:, 1]
        of_row = [(curve, index) for curve in figure.curves for index in np.flatnonzero(curve.x == number)]
        if of_row:
            words = "\n".join([name, *(_told_value(curve, int(index)) for curve, index in of_row)])
            yield np.array([left, ends[0]]), np.array([right, ends[1]]), words


def _told_value(curve: Curve, index: int) -> str:
    ends = ""
    if curve.low is not None and curve.high is not None and curve.low[index] < curve.high[index]:
        ends = f" [{curve.low[index]:.4g}, {curve.high[index]:.4g}]"
    return f"{curve.name}: {curve.y[index]:.4g}{ends}"


def _draw_lines(panel: "Axes", figure: Figure, scale: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")
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
        panel.xaxis.set_major_formatter(plain)
        panel.set_xlim(1.08 * figure.farthest, 0.92)  # the last position on the right, as on the other axis
    _draw_stretches(panel, figure, by_distance=by_distance)
    if figure.log_range is not None:
        panel.set_ylim(figure.log_range if scale == "log" else figure.linear_range)  # first: curves may reach 0
        panel.set_yscale(scale)
        cut = f", {figure.cut_note}" if scale == "linear" and figure.cut_note else ""
        panel.set_title(f"{scale} scale{cut}", loc="right", fontsize=9.5, color=NOTE)
        if scale == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=log_steps(figure.log_range)))
            panel.yaxis.set_major_formatter(plain)
            panel.yaxis.set_minor_locator(NullLocator())
    elif not figure.log_axes and all(float(curve.y.min()) >= 0 for curve in figure.curves):
        panel.set_ylim(bottom=0)
    for name in figure.log_axes:
        panel.set(**{f"{name}scale": "log"})
        getattr(panel, f"{name}axis").set_major_formatter(plain)
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


def _draw_rows(panel: "Axes", figure: Figure, names: list[str]) -> None:
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
    panel.set_yticks(range(1, len(names) + 1), list(map(_literal, names)))
    panel.set_ylim(len(figure.rows) + 0.6, 0.4)
    panel.set_xlabel(figure.y_label)


def _draw_heat_map(canvas: "Canvas", figure: HeatMap, sheet: Sheet) -> Callable[[], Iterator[Told]]:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    columns = min(sheet.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    canvas.set_size_inches(sheet.width, 1.4 + 0.6 * sheet.height * rows)
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
            interpolation="none",  # cells keep sharp edges at any size
        )
        axis.set_title(panel.name, fontsize=10)
        if figure.rows:
            axis.set_yticks(range(1, len(figure.rows) + 1), [_literal(name) for name in figure.rows])
        if width <= 12:  # every column has its number
            axis.set_xticks(np.linspace(left, right, width))
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(fill(figure.x_label, sheet.characters // (columns + 1)))
    for axis in axes[:, 0]:
        axis.set_ylabel(fill(figure.y_label, sheet.row_characters))
    bar = canvas.colorbar(image, ax=axes, label=figure.value_label, aspect=30, pad=0.01)
    bar.solids.set_rasterized(True)  # type: ignore[union-attr]
    if figure.scale == "logarithmic":
        bar.locator = MaxNLocator(integer=True)
        bar.formatter = FuncFormatter(lambda value, _: f"{10.0**value:g}")
        bar.update_ticks()
    return lambda: _told_cells(list(axes.flat), figure)


def _told_cells(axes: "list[Axes]", figure: HeatMap) -> Iterator[Told]:
    """The number of every cell, or the words about it; nothing for maps of very many cells."""
    rows, columns = figure.panels[0].values.shape
    if rows * columns * len(figure.panels) > TOLD_CELLS:
        return
    for axis, panel in zip(axes, figure.panels, strict=False):
        corner, opposite = np.array(axis.bbox.min), np.array(axis.bbox.max)
        size = (opposite - corner) / (columns, rows)
        for row, column in np.ndindex(rows, columns):
            x, y = (
                np.linspace(*ends, count)[at]
                for ends, count, at in ((figure.x, columns, column), (figure.y, rows, row))
            )
            named = figure.rows[row] if figure.rows else f"{y:.4g}"
            value = f"{figure.value_label}: {panel.values[row, column]:.4g}"
            words = f"{figure.x_label}: {x:.4g}\n{figure.y_label}: {named}\n{value}"
            begin = corner + size * (column, rows - 1 - row)
            yield begin, begin + size, figure.words[row * columns + column] if figure.words else words


def _literal(text: str) -> str:
    """Text as it is: a dollar sign would start a formula."""
    return text.replace("$", r"\$")
