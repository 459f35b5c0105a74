"""Figures as data: curves and heat maps, which `drawing.py` draws on a page, in files and on a user's axes.

Measurements are black, the flat line grey; each theory keeps its colour (Okabe and Ito, safe for the colour-blind) and
its dash, for print, in every figure of every report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
from jaxtyping import Float, Float64, Real

from posbias.errors import printable
from posbias.statistics import Interval

INK = "#1a1a1a"
NOTE = "#555555"
"""Colour of words that say how an axis runs."""
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
DRAWN_POINTS = 128
"""Most points of a curve in a picture, which is about 340 points wide, so that a page stays light."""
LONG_CONTEXT = 2048
"""Positions from which a profile is shown by the logarithm of the distance from the end: what lies at the end would
otherwise be a line at the edge of the picture."""


@dataclass(frozen=True)
class Stroke:
    """How a curve is drawn."""

    colour: str
    dash: str
    """One of "solid", "dash", "dot", "dashdot", "longdash", "longdashdot"."""


MEASURED = Stroke(INK, "solid")
FLAT = Stroke(FAINT, "dot")
NEXT = Stroke("", "solid")
"""The next one of `RUNS` that no other curve of the figure has."""
THEORY_STROKES = {
    "power_rollout": Stroke(BLUE, "solid"),
    "rollout": Stroke(VERMILION, "dash"),
    "attention_only": Stroke(ORANGE, "dashdot"),
    "attention_rollout": Stroke(PURPLE, "longdash"),
    "rollout_content": Stroke(YELLOW, "dash"),
    "closed_form": Stroke(GREEN, "dash"),
    "continuous": Stroke(SKY, "dashdot"),
    "mean_field": Stroke(GREEN, "solid"),
}
RUNS = tuple(
    Stroke(colour, dash)
    for dash in ("solid", "dash", "dot", "dashdot")
    for colour in (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
)
"""Strokes of runs that are drawn side by side, in order."""


def ramp(count: int) -> list[Stroke]:
    """Strokes of an ordered sequence, from pale to dark."""
    shades = np.linspace([170, 205, 235], [10, 30, 80], count).round().astype(int)
    return [Stroke("#" + "".join(f"{part:02x}" for part in shade), "solid") for shade in shades]


@dataclass(frozen=True, eq=False)
class Curve:
    """One named line of a result or a figure, with its pointwise interval, if it has one."""

    name: str
    x: Real[np.ndarray, "n_points"]
    y: Float64[np.ndarray, "n_points"]
    stroke: Stroke = NEXT
    low: Float64[np.ndarray, "n_points"] | None = None
    high: Float64[np.ndarray, "n_points"] | None = None
    """An end that is not finite says nothing, nor does the other one there."""
    drawn: bool = True
    """False keeps a result's curve out of its picture; it is in tables in any case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))  # it may come from a file

    @classmethod
    def of_intervals(
        cls, name: str, places: Sequence[float], intervals: Sequence[Interval], stroke: Stroke = NEXT
    ) -> "Curve":
        """Estimates with their ends, over places."""
        y, low, high = np.array([(each.value, each.low, each.high) for each in intervals], np.float64).reshape(-1, 3).T
        return cls(name, np.array(places), y, stroke, low, high)

    @property
    def ends(self) -> tuple[Float64[np.ndarray, "n_points"], Float64[np.ndarray, "n_points"]]:
        """Both ends of the interval, NaN at places where one of them is unknown."""
        nothing = np.full_like(self.y, np.nan)
        low, high = nothing if self.low is None else self.low, nothing if self.high is None else self.high
        finite = np.isfinite(low) & np.isfinite(high)
        return np.where(finite, low, np.nan), np.where(finite, high, np.nan)

    def text(self, index: int, spec: str) -> str:
        """A value, and its interval in brackets if there is one."""
        low, high = (float(end[index]) for end in self.ends)
        return f"{self.y[index]:{spec}}" + (f" [{low:{spec}}, {high:{spec}}]" if low < high else "")

    def scaled(self, factor: float) -> "Curve":
        """The curve with its values in another unit."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return replace(self, y=self.y * factor, low=low, high=high)

    def at(self, places: np.ndarray) -> "Curve":
        """Some of its points: their numbers, or True for every one that stays."""
        low, high = (None if end is None else end[places] for end in (self.low, self.high))
        return replace(self, x=self.x[places], y=self.y[places], low=low, high=high)

    def thinned(self) -> "Curve":
        """The curve at no more points than a picture shows: of many some evenly, and more at both ends."""
        if self.y.size <= DRAWN_POINTS:
            return self
        even, from_end = np.linspace(0, 1, DRAWN_POINTS // 2), np.geomspace(1, self.y.size, DRAWN_POINTS // 4) - 1
        shown = np.concatenate([even * (self.y.size - 1), from_end, self.y.size - 1 - from_end])
        return self.at(np.unique(shown.astype(int)))


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
    """Curves, in the order in which they are drawn, at the places where they have a value; a solid one that covers an
    earlier one is dashed."""
    markers: bool = False
    log_range: tuple[float, float] | None = None
    """Range of the logarithmic axis, in data units, of a figure that has both; None: it has a linear one alone."""
    linear_range: tuple[float, float] | None = None
    """Range of the linear axis; spikes of the first and last position may be cut. None: everything."""
    by_distance: bool = False
    """True shows positions by the logarithm of their distance from the end wherever the other axis is logarithmic."""
    rows: tuple[str, ...] = ()
    """Names of x = 1, 2 ...: drawn lying, one row for each, points with their intervals. Empty: x is a number."""
    stretches: tuple[tuple[float, float, str], ...] = ()
    """Ranges of x that are shaded, each under a few words; of a profile by distance from the end, too."""
    stretches_are: str = ""
    """Words for the shaded ranges, which stand beside the name of the axis of x."""

    def __post_init__(self) -> None:
        known = [curve.at(np.isfinite(curve.y)) for curve in self.curves if np.isfinite(curve.y).any()]
        heights = np.concatenate([np.zeros(0), *(curve.y for curve in known)])
        within = 0.006 * float(np.ptp(heights)) if heights.size else 0.0  # the width of a line
        seen: list[Curve] = []
        taken = {curve.stroke for curve in known}
        strokes = cycle([stroke for stroke in RUNS if stroke not in taken] or RUNS)
        for curve in known:
            curve = replace(curve, stroke=next(strokes)) if curve.stroke == NEXT else curve
            covered = (below for below in seen if np.array_equal(curve.x, below.x))
            if curve.stroke.dash == "solid" and any(
                np.abs(curve.y - below.y).max(initial=0.0) <= within for below in covered
            ):
                curve = replace(curve, stroke=replace(curve.stroke, dash="dash"))
            seen.append(curve)
        object.__setattr__(self, "curves", tuple(seen))

    @property
    def n_positions(self) -> float:
        """One more than the last place: the distance of place 0 from the end."""
        return 1.0 + max(float(curve.x.max()) for curve in self.curves)


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
    ends: tuple[float, float]
    """Ends of the colour scale, whose colours values beyond them take."""
    rows: tuple[str, ...] = ()
    """Names of the rows in place of numbers on the axis; `y` is then (1, number of rows)."""
    logarithmic: bool = False
    """True for a logarithmic colour scale."""


def profile_figure(
    slug: str,
    title: str,
    curves: Sequence[Curve],
    *,
    measured: Sequence[Curve] = (),
    x_label: str = "position in the context",
) -> Figure:
    """Influence in multiples of the flat line, beside it, on two axes whose range `measured` (by default all) sets.

    Measurements are drawn first, and black. Positions of a long context are shown by distance from the end; profiles of
    several lengths over fractions of the context.

    Args:
        slug: Name for files and anchors; what is neither letter nor digit becomes a hyphen.
        title: A sentence that says what is seen.
        curves: Of `Profile.curve`: influence over all positions.
        measured: Likewise.
        x_label: Name of the axis of positions.
    """
    black = (replace(curve, stroke=MEASURED) for curve in measured)
    drawn = [curve.scaled(curve.y.size) for curve in (*black, *curves)]
    if len({curve.y.size for curve in drawn}) > 1:
        x_label = "position as a fraction of the context"
        drawn = [replace(curve, x=curve.x / max(curve.y.size - 1, 1)) for curve in drawn]
    main, last = drawn[: len(measured) or None], float(drawn[0].x[-1])
    by_distance = last + 1 >= LONG_CONTEXT
    # From zero to above everything between the first and the last position, whose spikes would flatten the rest.
    inside = np.concatenate([curve.y[1:-1] if curve.y.size > 2 else curve.y for curve in main])
    # A range that shows the main curves whole and does not follow theories down to 1e-30: at most four decades, five if
    # the last position of a long context rises that far above the rest.
    values = np.concatenate([curve.y[curve.y > 0] for curve in main])
    highest, all_highest = float(values.max()), float(np.concatenate([curve.y for curve in drawn]).max())
    top = 1.6 * max(highest, min(all_highest, 30 * highest), 1.0)
    bottom = max(float(values.min()) / 2, top * 10 ** -(4.0 + by_distance))
    return Figure(
        "".join(character if character.isalnum() else "-" for character in slug.lower()).strip("-"),
        title,
        x_label,
        "influence (flat line = 1)",
        (*drawn, Curve("flat line", np.array([0.0, last]), np.ones(2), FLAT)),
        log_range=(min(bottom, 0.5), top),
        linear_range=(0.0, max(1.25 * float(inside.max()), 1.5)),
        by_distance=by_distance,
    )
