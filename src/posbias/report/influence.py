"""Influence measured on the prompts of an evaluation, in words, tables and figures; of one run, or of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posbias.display.figures import GREEN, MEASURED, SKY, YELLOW, Curve, Figure, Stroke, interval_curves, theory_strokes
from posbias.display.wording import KINDS, THEORIES, label
from posbias.evaluation.correlation import InfluenceSeries
from posbias.evaluation.evaluation import MEASURES
from posbias.report.tables import Table
from posbias.statistics import MISSING, Interval

CORRELATION_CAVEAT = (
    "A rank correlation over positions is nearly automatic if both curves fall or bend alike; the partial ones hold "
    "position, distance to the nearer end, or both fixed. Their intervals resample samples at the chosen positions; "
    "p counts permutations of the positions, corrected (Holm) for the number of series and measures."
)
WHAT = {
    "gold": "answer's item",
    "place": "place, another item",
}
"""Item that a series of influence is about."""
CONTROLLED = {
    "nothing": "plain",
    "position": "position held fixed",
    "ends": "distance to the nearer end held fixed",
    "position_and_ends": "both held fixed",
}
INFLUENCES = tuple(Stroke(colour, "solid") for colour in (GREEN, YELLOW, SKY))
"""Strokes of measured kinds, none a theory's."""
TIE_RANGE = (0.02, 20.0)
"""Multiples of the mean shown on the logarithmic axis; theories fall far below."""
ON_ONE_SCALE = {"accuracy": MEASURED, "reciprocal_rank": Stroke(MEASURED.colour, "dash")}
"""Measures that can be drawn as multiples of their mean: none is negative."""


def correlated_measures(series: Sequence[InfluenceSeries]) -> list[str]:
    """Measures that any of the series is correlated with."""
    return list(dict.fromkeys(measure for entry in series for measure in entry.correlations))


def series_name(series: InfluenceSeries) -> str:
    """Name of a series of influence in words."""
    name = f"influence ({label(KINDS, str(series.kind))})" if series.measured else label(THEORIES, series.source)
    return f"{name}: {WHAT[series.what]}"


def correlation_table(title: str, series: Sequence[InfluenceSeries], measure: str) -> Table:
    """A row for each series that is correlated with the measure."""
    cells = []
    for entry in series:
        if measure in entry.correlations:
            correlations = entry.correlations[measure]
            texts = [
                MISSING
                if np.isnan(correlation.value.value)
                else f"{correlation.value} p {correlation.p_value:.2g}{', established' * correlation.established}"
                for correlation in correlations.correlations
            ]
            cells.append([series_name(entry), *texts, correlations.within.text(), str(correlations.n_positions)])
    return Table(title, ["influence", *CONTROLLED.values(), "within positions and samples", "positions"], cells)


def correlation_verdict(series: Sequence[InfluenceSeries]) -> str | None:
    """Whether more influence goes with better answers: the first measured series that has a correlation."""
    for entry in filter(lambda entry: entry.measured, series):
        for correlations in entry.correlations.values():
            plain, partial = correlations.of("nothing"), correlations.of("position_and_ends")
            if np.isnan(plain.value.value):
                continue
            deciding = partial if partial.established else plain
            numbers = f"rank correlation {deciding.value} over {correlations.n_positions} positions"
            if not deciding.established:
                return f"It is not established that positions with more influence are answered better: {numbers}."
            better = "better" if deciding.value.value > 0 else "worse"
            limit = "beyond position and ends" if partial.established else "though position alone may explain it"
            return f"Positions with more influence are answered {better}, {limit}: {numbers}."
    return None


@dataclass(frozen=True)
class Weighed:
    """Behaviour and influence on the same prompts, as one figure shows them."""

    positions: Sequence[int]
    n_items: int
    means: Mapping[str, Sequence[Interval]]
    """Means by measure of behaviour."""
    series: Sequence[InfluenceSeries]


def influence_figure(slug: str, title: str, weighed: Weighed) -> Figure:
    """Accuracy, influence and theories of one model, each as a multiple of its mean over positions."""
    lines = [
        (label(MEASURES, name), weighed.means[name], stroke)
        for name, stroke in ON_ONE_SCALE.items()
        if name in weighed.means
    ]
    theories = theory_strokes([series.source for series in weighed.series if not series.measured])
    kinds = list(dict.fromkeys(series.kind for series in weighed.series if series.measured))
    of_answers = {(series.source, series.kind) for series in weighed.series if series.what == "gold"}
    for series in weighed.series:
        measured = series.measured
        stroke = INFLUENCES[kinds.index(series.kind) % len(INFLUENCES)] if measured else theories[series.source]
        if series.what == "place" and (series.source, series.kind) in of_answers:
            stroke = Stroke(stroke.colour, "dot")  # beside the answer's item of the same source
        lines.append((series_name(series), series.means, stroke))
    curves: list[Curve] = []
    for name, means, stroke in lines:
        values = [mean.value for mean in means if not np.isnan(mean.value)]
        if values and np.mean(values) > 0:
            curves += interval_curves(name, weighed.positions, means, stroke, unit=float(np.mean(values)))
    return Figure(
        slug,
        f"{title}: what weighs, and what is used, by position (each as a multiple of its mean)",
        axis_of(weighed.n_items),
        "multiple of the mean over positions",
        tuple(curves),
        markers=True,
        log_range=TIE_RANGE,
        linear_range=(0.0, 4.0),
    )


def axis_of(n_items: int) -> str:
    """Label of the axis of positions."""
    return f"position of the answer among {n_items} (0 is the first)"
