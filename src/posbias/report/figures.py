"""What each figure shows, apart from how it is drawn: curves, their band, stroke and title.

`figures_of` gives the figures of one run, `side_by_side` those of several; report/interactive.py draws them with
plotly, report/static.py with matplotlib. To add a figure, describe it here and both follow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.comparison import STATISTICS, Depth, Subject
from posbias.profiles import Profile
from posbias.report.checks import shown_rows
from posbias.report.layout import RunView
from posbias.report.palette import FLAT, MEASURED, RUNS, Stroke, drawn_positions, ramp, theory_strokes
from posbias.report.wording import KINDS, MIXINGS, SUBJECTS, THEORIES, label

LOG_DECADES = 4.0
"""Decades a logarithmic axis shows below its largest value where no measurement sets the range."""


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

    def __post_init__(self) -> None:
        if self.low is None or self.high is None:
            return
        known = np.isfinite(self.low) & np.isfinite(self.high)
        for name, end in (("low", self.low), ("high", self.high)):
            # Where nothing is known the band is as narrow as the line, so that nothing is seen of it.
            object.__setattr__(self, name, np.where(known, end, self.y) if known.any() else None)


@dataclass(frozen=True, eq=False)
class Figure:
    """A titled set of curves over one axis."""

    slug: str
    """Short name for files and anchors: lower case, digits, hyphens."""
    title: str
    """What is seen, as a sentence."""
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    markers: bool = False
    lines: bool = True
    """Whether the points of a curve are joined."""
    log_range: tuple[float, float] | None = None
    """Range of the logarithmic axis, in data units; None for a figure that has only a linear one."""
    linear_range: tuple[float, float] | None = None
    """Range of the linear axis; spikes of the first and last position may be cut. None: everything."""
    log_axes: str = ""
    """Axes that are logarithmic without a choice: "", "x", "y" or "xy"."""
    rows: tuple[str, ...] = ()
    """Names of x = 1, 2 ...: drawn lying, one row for each, points with their intervals. Empty: x is a number."""

    @property
    def cut_spike(self) -> float | None:
        """The largest value that the linear axis does not show; None where it shows all."""
        top = max(float(curve.y.max()) for curve in self.curves)
        return top if self.linear_range is not None and top > self.linear_range[1] else None

    @property
    def cut_note(self) -> str:
        """What the linear axis does not show, in words; empty where it shows all."""
        top = self.cut_spike
        return "" if top is None else f"spikes to {top:.0f} cut" if top >= 10 else f"spikes to {top:.2g} cut"


def offset(number: int, count: int) -> float:
    """Where a curve's points lie within their row of a figure with `rows`, from -0.35 to 0.35."""
    return 0.0 if count == 1 else 0.7 * (number / (count - 1) - 0.5)


def figures_of(view: RunView) -> list[Figure]:
    """Profiles per subject and measured kind, predictions without a measurement, depth, and mixing per layer."""
    figures: list[Figure] = []
    for subject in view.subjects:
        figures.extend(_measured_figure(view, subject, kind) for kind in subject.measured)
        if not subject.measured and subject.theories:
            figures.append(_predicted_figure(view, subject))
    formed = [(subject, subject.depth) for subject in view.subjects if subject.depth is not None]
    figures.extend(_depth_figure(view, subject, depth) for subject, depth in formed)
    if any(subject.mixing for subject in view.subjects):
        figures.append(_mixing_figure(view))
    if len(view.subjects) > 1:
        figures[0:0] = _birth_figures(view)
    return figures


def side_by_side(views: Sequence[RunView]) -> list[Figure]:
    """One figure per measured kind that several runs share, and one of the predictions of runs without measurement."""
    kinds = dict.fromkeys(kind for view in views for subject in view.subjects for kind in subject.measured)
    figures = []
    for kind in kinds:
        entries = [
            (_state(view, subject), subject.measured[kind].profile, _run_stroke(number, state))
            for number, view in enumerate(views)
            for state, subject in enumerate(view.subjects)
            if kind in subject.measured
        ]
        if len(entries) > 1:
            title = f"{_capital(label(KINDS, kind))} influence of {len(entries)} measurements, side by side"
            figures.append(_runs_figure(f"runs-{kind}", title, entries))
    predictions = [
        (f"{_state(view, subject)}: {label(THEORIES, name)}", theory.profile, _run_stroke(number, 0))
        for number, view in enumerate(views)
        for subject in view.subjects
        if not subject.measured
        for name, theory in subject.theories.items()
    ]
    if len(predictions) > 1:
        figures.append(_runs_figure("runs-predicted", f"{len(predictions)} predictions, side by side", predictions))
    return figures


def profiles_figure(
    slug: str,
    title: str,
    theories: Mapping[str, tuple[Profile, Stroke]],
    *,
    measured: Mapping[str, Profile] | None = None,
) -> Figure:
    """Any profiles over one context, by the names they bear in the legend, measurements drawn in black.

    Args:
        slug: Short name for files and anchors.
        title: What is seen, as a sentence.
        theories: Predicted profiles with their strokes.
        measured: Measured ones; they set the range of the axes.
    """
    own = [_profile_curve(name, profile, MEASURED, emphasis=True) for name, profile in (measured or {}).items()]
    others = [_profile_curve(name, profile, stroke) for name, (profile, stroke) in theories.items()]
    return _profile_figure(slug, title, (*own, *others), measured=own)


def _measured_figure(view: RunView, subject: Subject, kind: str) -> Figure:
    profile = subject.measured[kind].profile
    name = f"measured ({label(KINDS, kind)})"
    measured = _profile_curve(name, profile, MEASURED, emphasis=True)
    theories = _theory_curves(subject)
    title = f"{_state(view, subject)}: {_shares_sentence(profile, f'{label(KINDS, kind)} influence')}"
    return _profile_figure(f"{subject.name}-{kind}", title, (measured, *theories), measured=[measured])


def _predicted_figure(view: RunView, subject: Subject) -> Figure:
    curves = _theory_curves(subject)
    first = next(iter(subject.theories.values())).profile
    title = f"{_state(view, subject)}: {_shares_sentence(first, 'predicted influence')}"
    return _profile_figure(f"{subject.name}-predicted", title, curves, measured=[])


def _birth_figures(view: RunView) -> list[Figure]:
    """The first two subjects (as trained, at initialisation) in one figure, for their first common kind."""
    first, second = view.subjects[:2]
    kind = next((kind for kind in first.measured if kind in second.measured), None)
    if kind is None or first.n_positions != second.n_positions:
        return []
    curves = tuple(
        _profile_curve(label(SUBJECTS, subject.name), subject.measured[kind].profile, stroke, emphasis=True)
        for subject, stroke in ((first, RUNS[0]), (second, RUNS[3]))
    )
    shares = [
        100 * float(STATISTICS["first_tenth"](entry.measured[kind].profile.influence)) for entry in (first, second)
    ]
    title = (
        f"{view.title}: the first tenth of the context carries {shares[0]:.0f} %"
        f" {label(SUBJECTS, first.name)} and {shares[1]:.0f} % {label(SUBJECTS, second.name)}"
    )
    return [_profile_figure(f"initialisation-{kind}", title, curves, measured=list(curves))]


def _depth_figure(view: RunView, subject: Subject, depth: Depth) -> Figure:
    """The profile after a few layers, from pale (near the input) to dark."""
    rows = shown_rows(len(depth.layers))
    curves = []
    for row, stroke in zip(rows, ramp(len(rows)), strict=True):
        low, high = (None if end is None else end[row] for end in (depth.low, depth.high))
        profile = Profile(depth.influence[row], low, high)
        curves.append(_profile_curve(f"after layer {int(depth.layers[row])}", profile, stroke))
    shares = [100 * float(STATISTICS["last_tenth"](depth.influence[row])) for row in (0, -1)]
    title = (
        f"{_state(view, subject)}: the last tenth carries {shares[0]:.0f} % of the influence after layer"
        f" {int(depth.layers[0])} and {shares[1]:.0f} % after layer {int(depth.layers[-1])}"
    )
    return _profile_figure(f"{subject.name}-depth", title, tuple(curves), measured=curves)


def _mixing_figure(view: RunView) -> Figure:
    curves = []
    means = []
    for number, subject in enumerate(view.subjects):
        for definition, mixing in subject.mixing.items():
            dash = "solid" if definition == next(iter(subject.mixing)) else "dash"
            stroke = Stroke((RUNS[0], RUNS[3], RUNS[2])[number % 3].colour, dash)
            name = f"{label(SUBJECTS, subject.name)}, {label(MIXINGS, definition)}"
            layers = np.arange(mixing.value.size, dtype=np.float64)
            curves.append(Curve(name, layers, mixing.value, stroke, low=mixing.low, high=mixing.high))
        if subject.mixing:
            first = next(iter(subject.mixing.values()))
            means.append(f"{first.value.mean():.2f} {label(SUBJECTS, subject.name)}")
    title = f"{view.title}: attention contributes a share of {' and '.join(means)} to a layer's output, on average"
    return Figure("mixing", title, "layer (0 is nearest the input)", "mixing coefficient", tuple(curves), markers=True)


def _runs_figure(slug: str, title: str, entries: Sequence[tuple[str, Profile, Stroke]]) -> Figure:
    curves = tuple(_profile_curve(name, profile, stroke, relative=True) for name, profile, stroke in entries)
    return Figure(
        _slug(slug),
        title,
        "position as a fraction of the context",
        "influence (flat line = 1)",
        (*curves, _flat_curve(0.0, 1.0)),
        log_range=_log_range(curves),
        linear_range=_linear_range(curves),
    )


def _run_stroke(run: int, state: int) -> Stroke:
    """A colour per run, a dash per state of its model."""
    return Stroke(RUNS[run % len(RUNS)].colour, ("solid", "dot", "dashdot")[state % 3])


def _profile_figure(slug: str, title: str, curves: tuple[Curve, ...], *, measured: Sequence[Curve]) -> Figure:
    flat = _flat_curve(0.0, float(max(curve.x[-1] for curve in curves)))
    return Figure(
        _slug(slug),
        title,
        "position in the context",
        "influence (flat line = 1)",
        (*curves, flat),
        log_range=_log_range(measured or curves, everything=curves),
        linear_range=_linear_range(measured or curves),
    )


def _theory_curves(subject: Subject) -> tuple[Curve, ...]:
    strokes = theory_strokes(list(subject.theories))
    return tuple(
        _profile_curve(label(THEORIES, name), theory.profile, strokes[name])
        for name, theory in subject.theories.items()
    )


def _profile_curve(
    name: str, profile: Profile, stroke: Stroke, *, relative: bool = False, emphasis: bool = False
) -> Curve:
    """Influence in multiples of the flat line, thinned where the profile is longer than a figure can show."""
    shown = drawn_positions(profile.n_positions)
    x = (profile.relative_positions if relative else np.arange(profile.n_positions, dtype=np.float64))[shown]
    low, high = (None if end is None else end[shown] * profile.n_positions for end in (profile.low, profile.high))
    return Curve(name, x, profile.influence[shown] * profile.n_positions, stroke, low, high, emphasis)


def _flat_curve(start: float, stop: float) -> Curve:
    return Curve("flat line", np.array([start, stop]), np.array([1.0, 1.0]), FLAT)


def _log_range(main: Iterable[Curve], *, everything: Iterable[Curve] = ()) -> tuple[float, float]:
    """A range that shows the main curves whole and does not follow theories down to 1e-30."""
    values = np.concatenate([curve.y[curve.y > 0] for curve in main] or [np.ones(1)])
    others = np.concatenate([curve.y for curve in everything] or [values])
    top = 1.6 * max(float(values.max()), min(float(others.max()), 30 * float(values.max())), 1.0)
    bottom = max(float(values.min()) / 2, top * 10**-LOG_DECADES)
    return min(bottom, 0.5), top


def _linear_range(main: Iterable[Curve]) -> tuple[float, float]:
    """From zero to above everything between the first and the last position, whose spikes would flatten the rest."""
    inside = [curve.y[1:-1] if curve.y.size > 2 else curve.y for curve in main]
    return 0.0, max(1.25 * float(np.concatenate(inside).max()), 1.5)


def _shares_sentence(profile: Profile, what: str) -> str:
    first, middle, last = (
        100 * float(STATISTICS[name](profile.influence)) for name in ("first_tenth", "middle_tenth", "last_tenth")
    )
    return f"{first:.0f} % of the {what} on the first tenth, {middle:.0f} % on the middle, {last:.0f} % on the last"


def _state(view: RunView, subject: Subject) -> str:
    return f"{view.title} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.title


def _slug(text: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in text.lower()).strip("-")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
