"""The numbers of runs with profiles as tables: distances beside the flat line's, shares, differences and depth."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posbias.comparison.distances import point_statistics, summarise
from posbias.comparison.metrics import STATISTICS, wasserstein
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
DISTANCE = "distance W1 [95 %]"
NEAR = "How near is each theory? Distances (W1) to what was measured; 0 means identical"
TENTHS = ("first_tenth", "middle_tenth", "last_tenth")
ENDS = ("first_token", "last_token")
Row = Mapping[str, str]


def shown_rows(count: int) -> list[int]:
    """Rows of the at most 7 layers that are shown of `count`: first, last, and evenly between."""
    return sorted({int(row) for row in np.linspace(0, count - 1, min(count, 7)).round()})


def overview_tables(views: Sequence[ProfileRun]) -> list[Table]:
    """The tables that a run is read for first: theories, shares, changes, depth, and further numbers."""
    shares = (*TENTHS, "last_token", "minimum_position")
    rows = {
        NEAR: _theory_rows(views, first=True),
        "Where does the influence lie?": _share_rows(views, shares),
        "What differs between the two?": _contrast_rows(views),
        "How does the profile form?": _depth_rows(views),
        "What else was found?": _detail_rows(views),
    }
    return [table for title, found in rows.items() if (table := Table.of(title, found)).cells]


def detailed_tables(view: ProfileRun) -> list[Table]:
    """Every metric beside the flat line's, and every share."""
    shares = (*TENTHS, *ENDS, "interior_recency", "mean_position", "minimum_position")
    rows = {
        "Which curve is which?": _settings_rows(view),
        NEAR: _theory_rows([view]),
        "Every distance, the flat line's in parentheses": _metric_rows(view),
        "Shares of the influence": _share_rows([view], shares),
    }
    return [table for title, found in rows.items() if (table := Table.of(title, found)).cells]


def _states(views: Sequence[ProfileRun]) -> list[tuple[ProfileRun, str, Subject]]:
    return [(view, state_of(view, subject), subject) for view in views for subject in view.subjects]


def _comparisons(views: Sequence[ProfileRun], *, first: bool = False) -> Iterator[tuple[Row, KindComparison]]:
    """Every theory beside every measured kind, or the `first` one alone, the nearest first, after what it is called."""
    kinds = [(view, kind) for view in views for subject in view.subjects for kind in subject.measured]
    reference = "measured" if all(is_measured(view, kind) for view, kind in kinds) else "compared to"
    for view, state, subject in _states(views):
        for kind in list(subject.measured)[: 1 if first else None]:
            of_kind = (block for block in subject.comparisons if block.kind == kind)
            for block in sorted(of_kind, key=lambda block: block.metrics["wasserstein"]):
                names = view.called("measured", kind), view.called("theories", block.theory)
                yield {"model": state, reference: names[0], "theory": names[1]}, block


def _theory_rows(views: Sequence[ProfileRun], *, first: bool = False) -> Iterator[Row]:
    """Distances of theories to every measured kind, or to the `first` one of each model alone."""
    for names, block in _comparisons(views, first=first):
        row = {**names, DISTANCE: block.distance_text, OF_FLAT: number_text(block.flat["wasserstein"])}
        row |= dict.fromkeys((OF_HALVES, OF_ONE, AGAINST_FLAT), MISSING)
        if (found := block.prompts) is not None:
            row |= {OF_HALVES: number_text(found.noise.mean), OF_ONE: number_text(found.per_prompt.value)}
            row[AGAINST_FLAT] = _against_flat(block)
        yield row


def _against_flat(block: KindComparison) -> str:
    """Closer, farther or undecided by W1, and which other distances have the two the other way round."""
    reverse = []
    for name in ("total_variation", "symmetric_kl", "log_error"):
        distance, flat = block.metrics[name], block.flat[name]
        if math.isfinite(distance) and math.isfinite(flat) and block.sign * (round(distance, 3) - round(flat, 3)) < 0:
            reverse.append(label(METRIC_NAMES, name))
    opposite = f" by W1, {VERDICTS[-block.sign]} by {', '.join(reverse)}" if reverse else ""
    return f"{VERDICTS[block.sign]}{opposite}"


def _metric_rows(view: ProfileRun) -> Iterator[Row]:
    """Every distance of every theory to every measured kind."""
    for names, block in _comparisons([view]):
        texts = {}
        for name in (name for name in dict.fromkeys((*METRIC_NAMES, *block.metrics)) if name in block.metrics):
            digits = 0 if name == "minimum_shift" else 3
            ours, flat = (number_text(numbers[name], digits) for numbers in (block.metrics, block.flat))
            texts[label(METRIC_NAMES, name)] = f"{ours} ({flat})"
        yield {**names, **texts}


def _settings_rows(view: ProfileRun) -> Iterator[Row]:
    """Settings that each of several predictions was computed for; pages of models have theirs."""
    curves = {name: view.curves[key] for key, name in view.names.items() if "theory" in view.curves[key]}
    if any("mask" in settings for settings in curves.values()):
        for name, settings in curves.items():
            yield {"curve": name, **{key: setting_text(value) for key, value in worded(settings).items()}}


def _share_rows(views: Sequence[ProfileRun], names: Sequence[str]) -> Iterator[Row]:
    """A row for each profile, measured or predicted, a column for each statistic, with its interval if estimated."""
    look: dict[str, dict[str, Any]] = {"minimum_position": {"spec": ".0f"}, "mean_position": {}}
    percent = {"spec": ".1f", "scale": 100, "unit": " %"}
    for view, state, subject in _states(views):
        found = [(view.called("measured", kind), subject.summary(kind)) for kind in subject.measured]
        for name, theory in subject.theories.items():
            statistics: Mapping[str, Interval] = point_statistics(theory.profile)
            # Beside a measurement intervals are given of distances, not of a theory's own shares.
            if not subject.measured and theory.n_independent > 1 and (sample := theory.sample):
                statistics = summarise(sample, generator=np.random.default_rng(0))
            found.append((view.called("theories", name), statistics))
        for profile, statistics in found:
            texts = {label(STATISTIC_NAMES, name): statistics[name].text(**look.get(name, percent)) for name in names}
            yield {"model": state, "profile": profile, **texts}


def _depth_rows(views: Sequence[ProfileRun]) -> Iterator[Row]:
    """Shares of the influence on the stream after some layers, and how far that profile is from the final one's."""
    depths = [(state, subject.depth) for _, state, subject in _states(views) if subject.depth is not None]
    for state, depth in depths:
        flat, last = Profile.uniform(depth.influence.shape[1]).influence, depth.influence[-1]
        for row in shown_rows(len(depth.layers)):
            profile = depth.influence[row]
            shares = {label(STATISTIC_NAMES, name): STATISTICS[name](profile) for name in (*TENTHS, *ENDS)}
            distances = {"W1 to flat": wasserstein(profile, flat), "W1 to last layer": wasserstein(profile, last)}
            yield {
                "model": state,
                "after layer": str(int(depth.layers[row])),
                **{name: f"{100 * float(share):.1f} %" for name, share in shares.items()},
                **{name: f"{float(distance):.3f}" for name, distance in distances.items()},
            }


def _detail_rows(views: Sequence[ProfileRun]) -> Iterator[Row]:
    """Numbers of kinds with passes of their own: the mean and the range over prompts."""
    for view in views:
        for kind, of_kind in view.details.items():
            for name, numbers in of_kind.items():
                ends = {"mean": numbers.mean(), "smallest": numbers.min(), "largest": numbers.max()}
                about = {"model": view.label, "measured": label(KINDS, kind), "found": name.replace("_", " ")}
                yield about | {end: f"{number:.4g}" for end, number in ends.items()}


def _contrast_rows(views: Sequence[ProfileRun]) -> Iterator[Row]:
    """Shares of a model as trained less those at initialisation, or of one run less those of another, and W1."""
    for view in views:
        between = "trained less initialised" if view.subject.name in SUBJECTS else "first less second"
        for kind, entry in view.contrasts.items():
            ends = [entry.statistics[name].text("+.1f", scale=100, unit=" points") for name in (TENTHS[0], TENTHS[2])]
            yield {
                "model": view.label,
                "measured": label(KINDS, kind),
                "difference": between,
                "first tenth": ends[0],
                "last tenth": ends[1],
                DISTANCE: str(entry.distance),
                OF_FLAT: number_text(entry.flat.value),
                AGAINST_FLAT: VERDICTS[entry.decides],
                "texts or seeds": str(entry.n_units),
            }
