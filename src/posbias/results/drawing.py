"""Figures drawn by matplotlib: as PNG, PDF or SVG in a file, as SVG within a page, and on axes that a user has.

On a page ink is `currentColor` and the other colours are mixed with white in the dark; texts stay texts, in the page's
font; a pointer is told the values at every place. Axes have a size of their own and texts stand around them: a picture
is as large as all that was drawn, which costs no layout engine.
"""

import html
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.errors import printable
from posbias.results.figures import FAINT, FLAT, GRID, INK, MEASURED, NOTE, Figure, HeatMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.6)),
    "dashdot": (0, (5, 1.6, 1, 1.6)),
    "longdash": (0, (9, 2)),
    "longdashdot": (0, (9, 2, 1, 2)),
}
WIDTH, HEIGHT, ROW_WIDTH = 4.7, 2.15, 3.4
"""Inches of the axes, and their width beside the names of rows: so narrow that texts can be read on a phone, too."""
INCHES_PER_ROW, INCHES_PER_LINE = 0.27, 0.17
LEFT, RIGHT, TOP = 2.3, 1.0, 0.4
"""Inches for what stands around the axes, of which a picture takes as much as it needs."""
PANELS, PANEL_HEIGHT = 2, 1.75
"""Panels of a heat map side by side, and their height in inches."""
CHARACTERS, ROW_CHARACTERS, TITLE_CHARACTERS = 61, 26, 70
"""Characters that fit the width of a picture, a line of the name of a row or an upright axis, and the title."""
POINTS_PER_INCH = 72
EDGE = 0.04
"""Inches around a picture."""
FROM_END = "distance from the end (1 is the last)"
TOLD_PLACES = 16
"""Most places of a picture on a page at which a pointer is told the values of curves."""
STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.family": "DejaVu Sans",
}
ON_PAGE: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "path.simplify_threshold": 0.3}
COLOURS = {
    INK.lower(): "currentColor",
    NOTE.lower(): f"var(--soft, {NOTE})",
    FAINT.lower(): f"var(--soft, {FAINT})",
    GRID.lower(): f"var(--line, {GRID})",
}
"""Colours that follow the page's; any other is mixed with white as much as the page wants."""


def image_of(figure: Figure | HeatMap, sort: str = "png", *, about: str = "", titled: bool = True) -> bytes:
    """The content of a file with the figure, a profile on its logarithmic axis.

    A PDF and an SVG carry the title, and how the figure was made (`about`), in their metadata, and no date: the same
    figure gives the same bytes.

    Args:
        figure: What is drawn.
        sort: "png", "pdf" or "svg".
        about: The command that made it.
        titled: True draws the title above it.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "posbias"}):
        canvas = _drawn(_thinned(figure), "log")
        if titled:
            left, top = canvas.axes[0].get_position().corners()[1]
            title = _literal(fill(figure.title, TITLE_CHARACTERS))
            canvas.text(left - 0.08, top + 0.08, title, va="bottom", fontweight="bold")
        said: dict[str, str | None] = {"Title": printable(figure.title), "Creator": "posbias"}
        said |= {"Subject": about, "CreationDate": None} if sort == "pdf" else {"Description": about, "Date": None}
        said = {"Software": "posbias"} if sort == "png" else said
        canvas.savefig(buffer, format=sort, dpi=200, bbox_inches="tight", pad_inches=EDGE, metadata=said)
    return buffer.getvalue()


def fragment_of(figure: Figure | HeatMap, *, switched: bool = False) -> str:
    """The figure as HTML: its title, and an SVG that follows the page's colours.

    Args:
        figure: What is drawn; a profile on its logarithmic axis.
        switched: True: it is one of those seen first. A profile is there on its linear axis, too, with a switch between
            them, which needs no script; and a pointer is told the values of curves.
    """
    title, anchor = html.escape(printable(figure.title)), html.escape(f"figure-{figure.slug}")
    figure = _thinned(figure)
    drawn = _svg(figure, "log", anchor, told=switched)
    if switched and isinstance(figure, Figure) and figure.log_range is not None:
        switch = f'<input type="checkbox" id="{anchor}-linear"><label for="{anchor}-linear">linear scale</label>'
        drawn = f"{switch}{drawn}{_svg(figure, 'linear', anchor, told=True)}"
    return f'<figure class="chart" id="{anchor}"><figcaption>{title}</figcaption>{drawn}</figure>'


def _svg(figure: Figure | HeatMap, scale: str, anchor: str, *, told: bool) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, **ON_PAGE, "svg.hashsalt": f"{anchor}-{scale}"}):
        canvas = _drawn(figure, scale)
        for paper in (canvas, *canvas.axes):
            paper.patch.set_visible(False)  # type: ignore[attr-defined]
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(canvas).print_svg(buffer, metadata=nothing)  # type: ignore[no-untyped-call]
        inches = canvas.get_tightbbox().padded(EDGE)
    height = canvas.get_size_inches()[1] * POINTS_PER_INCH
    left, bottom, right, top = inches.extents * POINTS_PER_INCH
    view = f"{left:.1f} {height - top:.1f} {right - left:.1f} {top - bottom:.1f}"
    # A picture of many rows is not taller than a screen, as long as its letters stay as large as those of tables.
    tallest = f"max-height:max(700px,{1.1 * (top - bottom):.0f}px)"
    drawn, colours = _inlined(buffer.getvalue())
    rectangles = ""
    if told and isinstance(figure, Figure) and not figure.rows:
        rectangles = f'<g class="told">{"".join(_rectangles(canvas.axes[0], figure, height))}</g>'
    return (
        f'<svg class="{scale}" viewBox="{view}" role="img" aria-label="{html.escape(printable(figure.title))}" '
        f'style="{tallest};{colours}">{drawn}{rectangles}</svg>'
    )


def _inlined(svg: str) -> tuple[str, str]:
    """What matplotlib drew, in few bytes and in the page's colours and font, and the style that defines its colours."""
    mixed: dict[str, str] = {}

    def coloured(found: re.Match[str]) -> str:
        return COLOURS.get(found[0]) or f"var({mixed.setdefault(found[0], f'--c{len(mixed)}')})"

    def styled(found: re.Match[str]) -> str:
        kept = re.sub("#[0-9a-f]{6}", coloured, found[0].replace("; ", ";").replace(": ", ":"))
        kept = re.sub('font-size:10px;|font-family:[^;"]*;?|;fill:currentColor(?=")', "", kept)
        if kept.startswith(' style="fill:none;stroke:var(--line'):
            return ' class="grid"'
        return re.sub(' style="text-anchor:([a-z]*)"', r' text-anchor="\1"', kept)

    drawn = svg.partition("</style>")[2].partition("</defs>")[2].rpartition("</svg>")[0]
    drawn = re.sub(r' style="[^"]*"', styled, re.sub(r'<g id="[^"]*"', "<g", drawn))
    drawn = re.sub(r' d="([^"C]*)"', _stepped, drawn)
    drawn = re.sub(r' (d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), drawn)
    drawn = re.sub(r">\s+<", "><", drawn)
    colours = (f"{name}: color-mix(in srgb, {colour} var(--keep, 100%), white)" for colour, name in mixed.items())
    return drawn, "; ".join(colours)


def _stepped(found: re.Match[str]) -> str:
    """The straight lines of a path as steps in tenths of a point: half the bytes, and no error that adds up."""
    steps, before = "", (0, 0)
    for command, *place in re.findall(r"([ML]) (\S+) (\S+)", found[1]):
        x, y = round(10 * float(place[0])), round(10 * float(place[1]))
        across, up = (x, y) if command == "M" else (x - before[0], y - before[1])
        # What follows "l" are further steps; a minus parts numbers, too.
        steps += command if command == "M" else "l" if steps[-1:] != "" and "l" not in steps.rpartition("M")[2] else " "
        steps += f"{across / 10:g} {up / 10:g}"
        before = x, y
    steps = re.sub(r"\b0\.", ".", steps).replace(" -", "-")
    return f' d="{steps}{"z" * found[1].rstrip().endswith("z")}"'


def _drawn(figure: Figure | HeatMap, scale: str) -> "Canvas":
    """The picture."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(dpi=POINTS_PER_INCH)
    if isinstance(figure, HeatMap):
        _draw_heat_map(canvas, figure)
        return canvas
    rows = [fill(name, ROW_CHARACTERS) for name in figure.rows]
    names = [fill(curve.name, CHARACTERS - 8) for curve in figure.curves]
    lines = max([1.0, *(0.7 * (name.count("\n") + 1) for name in rows)])
    width, height = (ROW_WIDTH, INCHES_PER_ROW * lines * len(rows)) if rows else (WIDTH, HEIGHT)
    panel = canvas.add_axes(_placed(canvas, width, height, below=1.0 + INCHES_PER_LINE * "\n".join(names).count("\n")))
    if rows:
        beside = np.linspace(-0.35, 0.35, len(figure.curves)) if len(figure.curves) > 1 else [0.0]  # within a row
        for offset, curve in zip(beside, figure.curves, strict=True):
            low, high = curve.ends
            look: dict[str, Any] = {"fmt": "o", "color": curve.stroke.colour, "elinewidth": 0.9, "markersize": 3.5}
            look |= {"markerfacecolor": "white"} if curve.stroke.dash == "dot" else {}
            xerr = [curve.y - low, high - curve.y]
            panel.errorbar(curve.y, curve.x + offset, xerr=xerr, label=_literal(curve.name), **look)
        panel.axvline(0, color=INK, linewidth=0.8)
        panel.set_yticks(range(1, len(rows) + 1), list(map(_literal, rows)))
        panel.set_ylim(len(rows) + 0.6, 0.4)
        panel.set_xlabel(figure.y_label)
    else:
        draw_lines(panel, figure, scale)
    panel.set_xlabel(fill(panel.get_xlabel(), CHARACTERS))
    panel.set_ylabel(fill(panel.get_ylabel(), ROW_CHARACTERS))
    panel.grid(color=GRID, linewidth=0.8, clip_on=False)
    panel.tick_params(which="both", length=0, pad=6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    # Columns of the legend that fit the width of the picture, for names and the strokes before them.
    widest = max((min(len(name), CHARACTERS) for name in names), default=0) + 7
    below = 0.34 + INCHES_PER_LINE * (panel.get_xlabel().count("\n") + 1)
    panel.legend(
        panel.get_legend_handles_labels()[0],
        [_literal(name) for name in names],
        loc="upper left",
        bbox_to_anchor=((width - WIDTH - 0.6) / width, -below / height),
        ncols=max(1, min(len(names), CHARACTERS // widest)),
        frameon=False,
        handlelength=3.2,
        borderaxespad=0,
        borderpad=0,
    )
    return canvas


def _placed(canvas: "Canvas", width: float, height: float, *, below: float) -> tuple[float, float, float, float]:
    """The place of axes of so many inches on a picture that is made large enough for what stands around them."""
    whole = np.array([LEFT + width + RIGHT, below + height + TOP])
    canvas.set_size_inches(*whole)
    (left, bottom), (across, up) = np.array([LEFT, below]) / whole, np.array([width, height]) / whole
    return float(left), float(bottom), float(across), float(up)


def _apart(figure: Figure) -> list[float]:
    """How far each curve is moved sideways: more than two at the same 2 to 8 places, whose bands would hide one
    another, have whiskers beside each other; else nothing moves."""
    banded = [curve for curve in figure.curves if curve.low is not None]
    few = len(banded) > 2 and all(1 < curve.x.size <= 8 for curve in figure.curves)
    if not few:
        return [0.0] * len(figure.curves)
    gap = min(float(np.diff(np.sort(curve.x)).min()) for curve in figure.curves)
    return list(np.linspace(-0.12, 0.12, len(figure.curves)) * gap)


def draw_lines(panel: "Axes", figure: Figure, scale: str) -> None:
    """Draw curves with their bands on axes, by position or, on a "log" scale of a long context, from its end."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    by_distance = figure.by_distance and scale == "log"
    apart = _apart(figure)
    for step, curve in zip(apart, figure.curves, strict=True):
        x = figure.n_positions - curve.x if by_distance else curve.x + step
        # An unknown end lies on the line: a band without width cannot be seen.
        low, high = (np.where(np.isfinite(end), end, curve.y) for end in curve.ends)
        if any(apart):
            panel.errorbar(
                x, curve.y, [curve.y - low, high - curve.y], fmt="none", ecolor=curve.stroke.colour, elinewidth=1
            )
        elif np.any(low < high):
            low = low if figure.log_range is None else np.maximum(low, figure.log_range[0] / 10)
            panel.fill_between(x, low, high, color=curve.stroke.colour, alpha=0.16, linewidth=0)
        panel.plot(
            x,
            curve.y,
            label=_literal(curve.name),
            color=curve.stroke.colour,
            linestyle=DASHES[curve.stroke.dash],
            linewidth=1.2 if curve.stroke == MEASURED else 1.6,
            marker="o" if figure.markers and curve.x.size <= 24 else None,
            markersize=3.5,
        )
    shaded = f"; shaded: {figure.stretches_are}" if figure.stretches_are else ""
    panel.set_xlabel(f"{FROM_END if by_distance else figure.x_label}{shaded}")
    panel.set_ylabel(figure.y_label)
    panel.margins(x=0.01)
    if by_distance:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(plain)
        panel.set_xlim(1.08 * figure.n_positions, 0.92)  # the last position on the right, as on the other axis
    elif all(np.array_equal(curve.x, np.round(curve.x)) for curve in figure.curves):  # places are counted
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    for begin, end, words in figure.stretches:
        ends = (figure.n_positions - begin, max(figure.n_positions - end, 1.0)) if by_distance else (begin, end)
        panel.axvspan(*ends, color=FAINT, alpha=0.12, linewidth=0)
        if not by_distance:  # where the first two would lie on one another
            place: dict[str, Any] = {"transform": panel.get_xaxis_transform(), "ha": "center", "va": "top"}
            panel.text((begin + end) / 2, 0.985, words, fontsize=8.5, **place)
    if figure.log_range is not None:
        panel.set_ylim(figure.log_range if scale == "log" else figure.linear_range)  # first: curves may reach 0
        panel.set_yscale(scale)
        if scale == "log":
            few = figure.log_range[1] / figure.log_range[0] < 300  # 1, 2 and 5 are named over a few decades
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
            panel.yaxis.set_major_formatter(plain)
            panel.yaxis.set_minor_locator(NullLocator())
        elif figure.linear_range and (top := max(curve.y.max() for curve in figure.curves)) > figure.linear_range[1]:
            cut = f"spikes to {top:{'.0f' if top >= 10 else '.2g'}} cut"
            panel.set_title(cut, loc="right", fontsize=9, color=NOTE)
    elif all(float(curve.y.min()) >= 0 for curve in figure.curves):
        panel.set_ylim(bottom=0)


def _draw_heat_map(canvas: "Canvas", figure: HeatMap) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter

    columns = min(PANELS, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    x, y, across, up = _placed(canvas, WIDTH, PANEL_HEIGHT * rows, below=1.0)
    spaces = {"left": x, "right": x + across, "bottom": y, "top": y + up, "wspace": 0.06, "hspace": 0.16}
    axes = canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True, gridspec_kw=spaces)
    height, width = next(iter(figure.panels.values())).shape
    (left, right), (top, bottom) = figure.x, figure.y
    beside, above = ((right - left) / max(width - 1, 1) / 2 or 0.5), ((bottom - top) / max(height - 1, 1) / 2 or 0.5)
    norm = (LogNorm if figure.logarithmic else Normalize)(*figure.ends)
    for axis, (name, values) in zip(axes.flat, figure.panels.items(), strict=False):
        image = axis.imshow(
            np.clip(values, *figure.ends),
            norm=norm,
            extent=(left - beside, right + beside, bottom + above, top - above),
            aspect="auto",
            interpolation="none",  # cells keep sharp edges at any size
        )
        axis.set_title(_literal(name), fontsize=10)
        axis.tick_params(which="both", length=0, pad=6)
        if figure.rows:
            axis.set_yticks(range(1, len(figure.rows) + 1), [_literal(name) for name in figure.rows])
        if width <= 12:  # every column has its number
            axis.set_xticks(np.linspace(left, right, width))
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(fill(figure.x_label, CHARACTERS // (columns + 1)))
    for axis in axes[:, 0]:
        axis.set_ylabel(fill(figure.y_label, ROW_CHARACTERS))
    bar = canvas.colorbar(
        image, cax=canvas.add_axes((x + 1.03 * across, y, 0.025 * across, up)), label=figure.value_label
    )
    bar.solids.set_rasterized(True)  # type: ignore[union-attr]
    bar.minorticks_off()
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")


def _rectangles(panel: "Axes", figure: Figure, height: float) -> Iterator[str]:
    """Upright strips, as wide as there is room, which tell a pointer the values of all curves near their place."""
    by_distance = figure.by_distance and panel.get_yscale() == "log"
    along = [figure.n_positions - curve.x if by_distance else curve.x for curve in figure.curves]
    (left, bottom), (right, top) = panel.bbox.min, panel.bbox.max
    across = [panel.transData.transform(np.stack([x, np.ones_like(x)], axis=1))[:, 0] for x in along]
    centres = np.unique(np.concatenate(across).round(1))
    if centres.size > TOLD_PLACES:
        half = (right - left) / TOLD_PLACES / 2
        centres = np.linspace(left + half, right - half, TOLD_PLACES)
    edges = np.concatenate([[left], (centres[1:] + centres[:-1]) / 2, [right]])
    axis = (FROM_END if by_distance else figure.x_label).partition(" ")[0]
    for begin, centre, end in zip(edges[:-1], centres, edges[1:], strict=True):
        lines, place = [], None
        for curve, x, pixels in zip(figure.curves, along, across, strict=True):
            nearest = int(np.abs(pixels - centre).argmin())
            if begin - 1 <= pixels[nearest] <= end + 1 and curve.stroke != FLAT:
                lines.append(f"{curve.name}: {curve.text(nearest, '.4g')}")
                place = x[nearest] if place is None else place
        if place is not None:
            words = html.escape("\n".join(map(printable, [f"{axis}: {place:.7g}", *lines])))
            size = f'width="{end - begin:.0f}" height="{top - bottom:.0f}"'
            yield f'<rect x="{begin:.0f}" y="{height - top:.0f}" {size}><title>{words}</title></rect>'


def _thinned(figure: Figure | HeatMap) -> Figure | HeatMap:
    """The figure with no more points than are seen."""
    if isinstance(figure, HeatMap):
        return figure
    return replace(figure, curves=tuple(curve.thinned() for curve in figure.curves))


def _literal(text: str) -> str:
    """Text as it is: a dollar sign would start a formula, and nothing in it steers what shows it."""
    return "\n".join(map(printable, text.split("\n"))).replace("$", r"\$")
