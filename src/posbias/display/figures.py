"""Figures, apart from how they are drawn: curves with their bands, matrices, strokes, ranges and titles.

`static.py` draws them, on a page, in a file and on axes of a notebook alike.
Measurements are black, the flat line grey; each theory keeps its colour (Okabe and Ito, safe for the colour-blind) and
its dash, for print, in every figure of every report.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64

from posbias.errors import UsageError
from posbias.statistics import Interval

INK = "#1a1a1a"
FAINT = "#8a8a8a"
GRID = "#e6e6e6"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#B8A800",
)
DRAWN_POINTS = 256
"""Most points of a curve in a picture, which is hardly more pixels wide on a page."""
LONG_CONTEXT = 2048
"""Positions from which a profile is shown by the logarithm of the distance from the end: what lies at the end would
otherwise be a line at the edge of the picture."""
LOG_DECADES = 4.0
"""Decades a logarithmic axis shows below its largest value if no measurement sets the range; one more if the last
position of a long context rises that far above the rest."""
LINE_WIDTH = 0.006
"""Width of a line as a share of a picture's height."""


@dataclass(frozen=True)
class Stroke:
    """How a curve is drawn."""

    colour: str
    dash: str
    """One of "solid", "dash", "dot", "dashdot", "longdash", "longdashdot"."""


MEASURED = Stroke(INK, "solid")
FLAT = Stroke(FAINT, "dot")
_THEORIES = {
    "power_rollout": Stroke(BLUE, "solid"),
    "rollout": Stroke(VERMILION, "dash"),
    "attention_only": Stroke(ORANGE, "dashdot"),
    "attention_rollout": Stroke(PURPLE, "longdash"),
    "rollout_content": Stroke(YELLOW, "dash"),
    "closed_form": Stroke(GREEN, "dash"),
    "continuous": Stroke(SKY, "dashdot"),
    "mean_field": Stroke(GREEN, "solid"),
}
_OTHERS = [Stroke(colour, dash) for dash in ("dot", "longdashdot") for colour in (GREEN, PURPLE, SKY, YELLOW, BLUE)]
RUNS = tuple(
    Stroke(colour, dash)
    for dash in ("solid", "dash", "dot", "dashdot")
    for colour in (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
)
"""Strokes of runs that are drawn side by side, in order."""


def ramp(count: int) -> list[Stroke]:
    """Strokes of an ordered sequence, from pale to dark."""
    pale, dark = np.array([170, 205, 235]), np.array([10, 30, 80])
    shades = [pale + (dark - pale) * step / max(count - 1, 1) for step in range(count)]
    return [Stroke("#" + "".join(f"{round(float(part)):02x}" for part in shade), "solid") for shade in shades]


def theory_strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """A stroke for every theory; those without one of their own get what is left, in order."""
    unlisted = list(dict.fromkeys(name for name in names if name not in _THEORIES))
    return {
        name: _THEORIES[name] if name in _THEORIES else _OTHERS[unlisted.index(name) % len(_OTHERS)] for name in names
    }


def run_strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """A stroke for every one of several runs or predictions, in order."""
    return {name: RUNS[number % len(RUNS)] for number, name in enumerate(names)}


@runtime_checkable
class Influence(Protocol):
    """The part of a `Profile` that is drawn; the class itself stands above this room."""

    @property
    def influence(self) -> Float64[np.ndarray, "n_positions"]:
        """Share of every position; sums to 1."""

    @property
    def low(self) -> Float64[np.ndarray, "n_positions"] | None:
        """Lower ends of pointwise intervals, if there are any."""

    @property
    def high(self) -> Float64[np.ndarray, "n_positions"] | None:
        """Upper ends."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One line of a figure."""

    name: str
    x: Float64[np.ndarray, "n_points"]
    y: Float64[np.ndarray, "n_points"]
    stroke: Stroke
    low: Float64[np.ndarray, "n_points"] | None = None
    high: Float64[np.ndarray, "n_points"] | None = None
    emphasis: bool = False
    """Drawn thicker: the measurement among theories."""
    from_end: Float64[np.ndarray, "n_points"] | None = None
    """Distance of every point from the end, for a profile over N positions: N - j, from N to 1."""

    def __post_init__(self) -> None:
        if self.low is None or self.high is None:
            return
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        for name, end in (("low", self.low), ("high", self.high)):
            # An unknown end lies on the line: a band without width cannot be seen.
            object.__setattr__(self, name, np.where(finite, end, self.y) if finite.any() else None)

    def covers(self, other: "Curve", within: float) -> bool:
        """True if both have the same points to `within`, so that only the one drawn last is seen."""
        same = self.x.shape == other.x.shape and np.array_equal(self.x, other.x)
        return bool(same and np.abs(self.y - other.y).max(initial=0.0) <= within)

    def thinned(self) -> "Curve":
        """The curve at no more points than a picture shows: of many some evenly, and more at both ends."""
        if self.y.size <= DRAWN_POINTS:
            return self
        even, from_end = np.linspace(0, 1, DRAWN_POINTS // 2), np.geomspace(1, self.y.size, DRAWN_POINTS // 4) - 1
        at = np.concatenate([even * (self.y.size - 1), from_end, self.y.size - 1 - from_end]).astype(np.int64)
        parts = ("x", "y", "low", "high", "from_end")
        return replace(
            self, **{part: values[np.unique(at)] for part in parts if (values := getattr(self, part)) is not None}
        )


def dashed(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """The curves in the order in which they are drawn, a solid one that covers an earlier one dashed."""
    heights = np.concatenate([np.zeros(0), *(curve.y[np.isfinite(curve.y)] for curve in curves)])
    within = LINE_WIDTH * float(np.ptp(heights)) if heights.size else 0.0
    seen: list[Curve] = []
    for curve in curves:
        if curve.stroke.dash == "solid" and any(curve.covers(below, within) for below in seen):
            curve = replace(curve, stroke=replace(curve.stroke, dash="dash"))
        seen.append(curve)
    return tuple(seen)


@dataclass(frozen=True, eq=False)
class Figure:
    """A titled set of curves over one axis."""

    slug: str
    """Short name for files and anchors: lower case, digits, hyphens."""
    title: str
    """A sentence that says what is seen."""
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    """Curves, in the order in which they are drawn; a solid one that covers an earlier one is dashed."""
    markers: bool = False
    lines: bool = True
    """True joins the points of a curve."""
    log_range: tuple[float, float] | None = None
    """Range of the logarithmic axis, in data units, of a figure that has both; None: it has a linear one alone."""
    linear_range: tuple[float, float] | None = None
    """Range of the linear axis; spikes of the first and last position may be cut. None: everything."""
    by_distance: bool = False
    """Shown by the logarithm of the curves' `from_end` first; `x` stands beside it, or is to be chosen."""
    rows: tuple[str, ...] = ()
    """Names of x = 1, 2 ...: drawn lying, one row for each, points with their intervals. Empty: x is a number."""
    stretches: tuple[tuple[float, float, str], ...] = ()
    """Ranges of x that are shaded, each under a few words; of a profile by distance from the end, too."""
    stretches_are: str = ""
    """Words for the shaded ranges, which stand beside the name of the axis of x."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", dashed(self.curves))

    @property
    def cut_note(self) -> str:
        """Words for the part that the linear axis cuts off; empty if it shows all."""
        top = max(float(curve.y.max()) for curve in self.curves)
        if self.linear_range is None or top <= self.linear_range[1]:
            return ""
        return f"spikes to {top:.0f} cut" if top >= 10 else f"spikes to {top:.2g} cut"

    @property
    def axis_names(self) -> tuple[str, str]:
        """Labels of the axis of x, and of that of the distance from the end."""
        shaded = f"; shaded: {self.stretches_are}" if self.stretches_are else ""
        return f"{self.x_label}{shaded}", f"{FROM_END}{shaded}"

    @property
    def farthest(self) -> float:
        """The largest distance from the end, in positions."""
        return max((float(curve.from_end.max()) for curve in self.curves if curve.from_end is not None), default=1.0)

    def row_offset(self, number: int) -> float:
        """Vertical offset of a curve's points within their row, from -0.35 to 0.35."""
        return 0.0 if len(self.curves) == 1 else 0.7 * (number / (len(self.curves) - 1) - 0.5)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Panels over the same axes and one colour scale."""

    slug: str
    title: str
    x_label: str
    y_label: str
    value_label: str
    panels: Mapping[str, Float[np.ndarray, "rows columns"]]
    """Values by name, which is empty for a single panel; row 0 is drawn on top, and what is not a number is not."""
    x: tuple[float, float]
    """Centres of the first and last column."""
    y: tuple[float, float]
    rows: tuple[str, ...] = ()
    """Names of the rows in place of numbers on the axis; `y` is then (1, number of rows)."""
    ends: tuple[float, float] | None = None
    """Ends of the colour scale; None: those of the values."""
    floor: float | None = None
    """Smallest value, > 0, of a logarithmic scale, whose colour smaller ones take; None: the scale is linear."""

    def __post_init__(self) -> None:
        if not self.panels:
            raise UsageError("a heat map needs at least 1 panel")
        if self.floor is not None and self.floor <= 0:
            raise UsageError(f"a logarithmic heat map needs a floor > 0, got {self.floor}")

    def shown(self, name: str) -> Float[np.ndarray, "rows columns"]:
        """Numbers of a panel that are coloured: the values, or their decimal logarithms."""
        values = self.panels[name].astype(np.float64)
        return values if self.floor is None else np.log10(np.maximum(values, self.floor))

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the colour scale, in what is coloured."""
        if self.ends is not None:
            return self.ends
        values = np.concatenate([self.shown(name).ravel() for name in self.panels])
        values = values[np.isfinite(values)]
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        return (low, high) if high > low else (low - 0.5, high + 0.5)


FROM_END = "distance from the end (1 is the last)"


def log_steps(log_range: tuple[float, float]) -> tuple[int, ...]:
    """Multiples of powers of ten that a logarithmic axis names: 1, 2 and 5 over a few decades, 1 over many."""
    return (1, 2, 5) if log_range[1] / log_range[0] < 300 else (1,)


def interval_curves(
    name: str, places: Sequence[float], intervals: Sequence[Interval], stroke: Stroke, *, unit: float = 1.0
) -> tuple[Curve, ...]:
    """Intervals over places, in multiples of `unit`, at places that have a value; no curve if none has one."""
    known = [index for index, interval in enumerate(intervals) if np.isfinite(interval.value)]
    value, low, high = (
        np.array([getattr(intervals[index], end) for index in known], dtype=np.float64) / unit
        for end in ("value", "low", "high")
    )
    x = np.array([places[index] for index in known], dtype=np.float64)
    return (Curve(name, x, value, stroke, low, high, emphasis=True),) if known else ()


def profile_curve(
    name: str, profile: Influence, stroke: Stroke, *, relative: bool = False, emphasis: bool = False
) -> Curve:
    """Influence in multiples of the flat line; `relative`: over positions as fractions of the context."""
    n_positions = profile.influence.size
    positions = np.arange(n_positions, dtype=np.float64)
    x = positions / max(n_positions - 1, 1) if relative else positions
    low, high = (None if end is None else end * n_positions for end in (profile.low, profile.high))
    return Curve(name, x, profile.influence * n_positions, stroke, low, high, emphasis, n_positions - positions)


def profile_figure(
    slug: str,
    title: str,
    curves: Sequence[Curve],
    *,
    measured: Sequence[Curve] = (),
    x_label: str = "position in the context",
) -> Figure:
    """Curves of `profile_curve` beside the flat line, on two axes whose range `measured` (by default all) set.

    If one of them belongs to a long context, they are shown by distance from the end, too.
    """
    main = measured or curves
    farthest = max(1.0 if curve.from_end is None else float(curve.from_end[0]) for curve in curves)
    by_distance = farthest >= LONG_CONTEXT and all(curve.from_end is not None for curve in curves)
    ends = np.array([0.0, max(curve.x[-1] for curve in curves)])
    flat = Curve("flat line", ends, np.ones(2), FLAT, from_end=np.array([farthest, 1.0]))
    # From zero to above everything between the first and the last position, whose spikes would flatten the rest.
    inside = [curve.y[1:-1] if curve.y.size > 2 else curve.y for curve in main]
    return Figure(
        "".join(character if character.isalnum() else "-" for character in slug.lower()).strip("-"),
        title,
        x_label,
        "influence (flat line = 1)",
        (*curves, flat),
        log_range=_log_range(main, everything=curves, decades=LOG_DECADES + by_distance),
        linear_range=(0.0, max(1.25 * float(np.concatenate(inside).max()), 1.5)),
        by_distance=by_distance,
    )


def profiles_figure(
    slug: str,
    title: str,
    theories: Mapping[str, tuple[Influence, Stroke]],
    *,
    measured: Mapping[str, Influence] | None = None,
) -> Figure:
    """Theories' profiles by their names in the legend, and measurements in black, which set the range of the axes."""
    measured_curves = [
        profile_curve(name, profile, MEASURED, emphasis=True) for name, profile in (measured or {}).items()
    ]
    theory_curves = [profile_curve(name, profile, stroke) for name, (profile, stroke) in theories.items()]
    return profile_figure(slug, title, [*measured_curves, *theory_curves], measured=measured_curves)


def _log_range(main: Iterable[Curve], *, everything: Iterable[Curve], decades: float) -> tuple[float, float]:
    """A range that shows the main curves whole and does not follow theories down to 1e-30."""
    values = np.concatenate([curve.y[curve.y > 0] for curve in main])
    all_values = np.concatenate([curve.y for curve in everything])
    top = 1.6 * max(float(values.max()), min(float(all_values.max()), 30 * float(values.max())), 1.0)
    bottom = max(float(values.min()) / 2, top * 10**-decades)
    return min(bottom, 0.5), top
