"""The numbers of runs with profiles as tables: distances beside the flat line's, shares, differences and depth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.comparison.distances import Sample, point_statistics, summarise
from posbias.comparison.metrics import METRICS, STATISTICS
from posbias.comparison.stored import (
    KindComparison,
    ProfileRun,
    Subject,
    is_measured,
    state_of,
)
from posbias.profiles import Profile
from posbias.results.naming import KINDS, SUBJECTS, label, setting_text, worded
from posbias.results.naming import METRICS as METRIC_NAMES
from posbias.results.naming import STATISTICS as STATISTIC_NAMES
from posbias.results.tables import Table, number_text
from posbias.statistics import MISSING, Interval

VERDICTS = {-1: "closer", 0: "undecided", 1: "farther"}
AGAINST_FLAT, OF_FLAT, OF_HALVES, OF_ONE = (
    "against a flat line",
    "a flat line's distance",
    "between halves of the texts",
    "to single texts",
)
"""Columns beside a distance; the glossary explains each by this name."""
OTHER_DISTANCES = ("total_variation", "symmetric_kl", "log_error")
"""Distances that may rank a theory and a flat line otherwise than W1 does."""
BOOTSTRAP_SEED = 0
"""Seed of the intervals of a prediction's shares, which are drawn here from the record's prompts."""
SHOWN_LAYERS = 7
"""Layers of a table or figure of depth: first, last, and evenly between."""
TENTHS = ("first_tenth", "middle_tenth", "last_tenth")
ENDS = ("first_token", "last_token")


def shown_rows(count: int) -> list[int]:
    """Rows of the layers that are shown of `count`: first, last, and evenly between."""
    return sorted({int(row) for row in np.linspace(0, count - 1, min(count, SHOWN_LAYERS)).round()})


def overview_tables(views: Sequence[ProfileRun]) -> list[Table]:
    """The tables that a run is read for first: theories, shares, changes, depth, and further numbers."""
    tables = [
        _theory_table(views, first=True),
        _share_table("Where does the influence lie?", views, (*TENTHS, "last_token", "minimum_position")),
        _contrast_table(views),
        _depth_table(views),
        _detail_table(views),
    ]
    return [table for table in tables if table.cells]


def detailed_tables(view: ProfileRun) -> list[Table]:
    """Every metric beside the flat line's, and every share."""
    shares = (*TENTHS, *ENDS, "interior_recency", "mean_position", "minimum_position")
    tables = [
        _settings_table(view),
        _theory_table([view]),
        _metric_table(view),
        _share_table("Shares of the influence", [view], shares),
    ]
    return [table for table in tables if table.cells]


def _states(views: Sequence[ProfileRun]) -> list[tuple[ProfileRun, str, Subject]]:
    return [(view, state_of(view, subject), subject) for view in views for subject in view.subjects]


def _comparisons(views: Sequence[ProfileRun]) -> list[tuple[list[str], Subject, KindComparison]]:
    """Every theory beside every measured kind, the nearest first, after what each of the three is called."""

    return [
        ([state, view.called("measured", block.kind), view.called("theories", block.theory)], subject, block)
        for view, state, subject in _states(views)
        for kind in subject.measured
        for block in sorted(subject.comparisons, key=lambda block: block.metrics["wasserstein"])
        if block.kind == kind
    ]


def _reference(views: Sequence[ProfileRun]) -> str:
    """The column of what theories are compared to: "measured" only if all of it is."""
    kinds = [(view, kind) for view in views for subject in view.subjects for kind in subject.measured]
    return "measured" if all(is_measured(view, kind) for view, kind in kinds) else "compared to"


def _settings_table(view: ProfileRun) -> Table:
    """Settings that each of several predictions was computed for."""
    curves = {name: settings for key, name in view.names.items() if "theory" in (settings := view.curves[key])}
    if not any("mask" in settings for settings in curves.values()):  # of models: their own pages have their settings
        curves = {}
    rows = (
        {"curve": name, **{key: setting_text(value) for key, value in worded(settings).items()}}
        for name, settings in curves.items()
    )
    return Table.of("Which curve is which?", rows)


def _theory_table(views: Sequence[ProfileRun], *, first: bool = False) -> Table:
    """Distances of theories to every measured kind, or to the `first` one of each model alone."""
    header = ["model", _reference(views), "theory", "distance W1 [95 %]", OF_FLAT, OF_HALVES, OF_ONE, AGAINST_FLAT]
    cells = []
    for names, subject, block in _comparisons(views):
        if first and block.kind != next(iter(subject.measured)):
            continue
        distance, further = number_text(block.metrics["wasserstein"]), [MISSING] * 3
        if (found := block.prompts) is not None:
            further = [number_text(found.noise.mean), number_text(found.per_prompt.value), _against_flat(block)]
            distance = str(found.distance)
        cells.append([*names, distance, number_text(block.flat["wasserstein"]), *further])
    return Table("How near is each theory? Distances (W1) to what was measured; 0 means identical", header, cells)


def _against_flat(block: KindComparison) -> str:
    """Closer, farther or undecided by W1, and which other distances have the two the other way round."""
    decides, reverse = 0 if block.prompts is None else block.prompts.decides, []
    for name in OTHER_DISTANCES:
        distance, flat = block.metrics[name], block.flat[name]
        if math.isfinite(distance) and math.isfinite(flat) and decides * (round(distance, 3) - round(flat, 3)) < 0:
            reverse.append(label(METRIC_NAMES, name))
    opposite = f" by W1, {VERDICTS[-decides]} by {', '.join(reverse)}" if reverse else ""
    return f"{VERDICTS[decides]}{opposite}"


def _share_table(title: str, views: Sequence[ProfileRun], names: Sequence[str]) -> Table:
    """A row for each profile, measured or predicted, a column for each statistic, with its interval if estimated."""
    look: dict[str, dict[str, Any]] = {"minimum_position": {"spec": ".0f"}, "mean_position": {}}
    percent = {"spec": ".1f", "scale": 100, "unit": " %"}
    cells = []

    def add(state: str, profile: str, statistics: Mapping[str, Interval]) -> None:
        cells.append([state, profile, *(statistics[name].text(**look.get(name, percent)) for name in names)])

    for view, state, subject in _states(views):
        for kind, measured in subject.measured.items():
            add(state, view.called("measured", kind), subject.summaries.get(kind) or point_statistics(measured.profile))
        for name, theory in subject.theories.items():
            # Beside a measurement intervals are given of distances, not of a theory's own shares.
            if not subject.measured and theory.per_prompt is not None and len(theory.per_prompt) > 1:
                generator = np.random.default_rng(BOOTSTRAP_SEED)
                add(state, view.called("theories", name), summarise(Sample.of(theory.per_prompt), generator=generator))
            else:
                add(state, view.called("theories", name), point_statistics(theory.profile))
    return Table(title, ["model", "profile", *(label(STATISTIC_NAMES, name) for name in names)], cells)


def _depth_table(views: Sequence[ProfileRun]) -> Table:
    """Shares of the influence on the stream after some layers, and how far that profile is from the final one's."""
    cells = []
    for _, state, subject in _states(views):
        if subject.depth is None:
            continue
        flat, last = Profile.uniform(subject.depth.influence.shape[1]).influence, subject.depth.influence[-1]
        for row in shown_rows(len(subject.depth.layers)):
            profile = subject.depth.influence[row]
            shares = [f"{100 * float(STATISTICS[share](profile)):.1f} %" for share in (*TENTHS, *ENDS)]
            distances = [f"{float(METRICS['wasserstein'](profile, reference)):.3f}" for reference in (flat, last)]
            cells.append([state, str(int(subject.depth.layers[row])), *shares, *distances])
    shares = [label(STATISTIC_NAMES, name) for name in (*TENTHS, *ENDS)]
    return Table(
        "How does the profile form?", ["model", "after layer", *shares, "W1 to flat", "W1 to last layer"], cells
    )


def _detail_table(views: Sequence[ProfileRun]) -> Table:
    """Numbers of kinds with passes of their own: the mean and the range over prompts."""
    cells = []
    for run, (kind, of_kind) in ((view, entry) for view in views for entry in view.details.items()):
        for name, numbers in of_kind.items():
            ends = [f"{number:.4g}" for number in (numbers.mean(), numbers.min(), numbers.max())]
            cells.append([run.label, label(KINDS, kind), name.replace("_", " "), *ends])
    return Table("What else was found?", ["model", "measured", "found", "mean", "smallest", "largest"], cells)


def _metric_table(view: ProfileRun) -> Table:
    blocks = _comparisons([view])
    known = list(blocks[0][2].metrics) if blocks else []
    metrics = [*(name for name in METRIC_NAMES if name in known), *(name for name in known if name not in METRIC_NAMES)]
    cells = []
    for names, _, block in blocks:
        digits = {name: 0 if name == "minimum_shift" else 3 for name in metrics}
        pairs = [[number_text(of[name], digits[name]) for of in (block.metrics, block.flat)] for name in metrics]
        cells.append([*names, *(f"{distance} ({flat})" for distance, flat in pairs)])
    header = ["model", _reference([view]), "theory", *(label(METRIC_NAMES, name) for name in metrics)]
    return Table("Every distance, the flat line's in parentheses", header, cells)


def _contrast_table(views: Sequence[ProfileRun]) -> Table:
    """Shares of a model as trained less those at initialisation, or of one run less those of another, and W1."""
    cells = []
    for view in views:
        between = "trained less initialised" if view.subject.name in SUBJECTS else "first less second"
        for kind, entry in view.contrasts.items():
            ends = [entry.statistics[name].text("+.1f", scale=100, unit=" points") for name in (TENTHS[0], TENTHS[2])]
            distances = [str(entry.distance), number_text(entry.flat.value), VERDICTS[entry.decides]]
            cells.append([view.label, label(KINDS, kind), between, *ends, *distances, str(entry.n_units)])
    header = ["model", "measured", "difference", "first tenth", "last tenth"]
    header += ["distance W1 [95 %]", OF_FLAT, AGAINST_FLAT]
    return Table("What differs between the two?", [*header, "texts or seeds"], cells)
