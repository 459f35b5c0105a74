"""Influence beside behaviour in words, tables and pictures: of one run, or of several."""

from collections.abc import Sequence

import numpy as np

from posbias.display.figures import (
    GREEN,
    MEASURED,
    SKY,
    YELLOW,
    Curve,
    Figure,
    Stroke,
    interval_curves,
    theory_strokes,
)
from posbias.display.wording import KINDS, THEORIES, label
from posbias.evaluation.correlate import InfluenceCorrelation, MeasuredGroup
from posbias.evaluation.evaluation import MEASURES, InfluenceSeries
from posbias.report.compare_evaluations import axis_of
from posbias.report.page import REPORTS, Report, notice_sentences
from posbias.report.tables import Table
from posbias.statistics import MISSING

NOTE = (
    "Ranks are formed within each measurement (one model, one task at one length), 0 for the least and 1 for the "
    "most, and correlated over the positions of all of them. Bootstrap draws take the samples of each anew, those "
    "that several share together; permutations move positions within each. In the pictures of single measurements "
    "every curve is a multiple of its mean over positions; shaded bands are 95 % intervals over samples."
)
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


@REPORTS.register("correlate")
def correlation_report(result: InfluenceCorrelation) -> Report:
    """What is correlated, the correlations over all measurements, and the pictures of each."""
    pictures = figures(result)
    cells = [[group.title, str(group.n_samples), " ".join(map(str, group.positions))] for group in result.groups]
    over = "" if len(result.groups) == 1 else ", all measurements pooled"
    tables = [
        Table("What is correlated", ["measurement", "samples", "positions"], cells),
        *correlation_tables(result.pooled, over),
    ]
    noticed = [
        sentence
        for group in result.groups
        for sentence in notice_sentences(group.notices, count=group.n_samples, here=True, of=f"{group.title}: ")
    ]
    nothing = "Nothing to compare: samples in common, at 3 positions at least, are needed of influence and behaviour."
    return Report(
        result.record.title,
        kicker="posbias · what weighs, and what is used, over several measurements",
        verdict=[correlation_verdict(result.pooled) or nothing],
        picture=pictures[:1],
        summary=tables[:2],
        notices=[*(f"No conclusion from the generated answers of {reason}." for reason in result.withheld), *noticed],
        caveats=[CORRELATION_CAVEAT],
        figures=pictures[1:],
        note=NOTE,
        tables=tables[2:],
        left_out=reasons(result),
        record=result.record,
    )


def reasons(result: InfluenceCorrelation) -> list[str]:
    """Runs that a pooled correlation does without, and those that leave it without an interval."""
    reasons = []
    for series in result.pooled:
        for measure, there in series.groups.items():
            about = f"{series_name(series)} and {label(MEASURES, measure)}"
            missing = [group.title for group in result.groups if group.title not in there]
            if missing:
                reasons.append(f"{about}: without {', '.join(missing)} (one of the two is missing)")
            if series.correlations[measure].n_samples == 1:  # from which nothing can be resampled
                reasons.append(f"{about}: no interval, since a measurement has a single sample")
    return reasons


def figures(result: InfluenceCorrelation) -> list[Figure]:
    """Every run's own curves."""
    drawn = [influence_figure(f"correlation-{number}", group) for number, group in enumerate(result.groups)]
    return [figure for figure in drawn if figure.curves]


def series_name(series: InfluenceSeries) -> str:
    """Name of a series of influence in words."""
    name = f"influence ({label(KINDS, str(series.kind))})" if series.measured else label(THEORIES, series.source)
    return f"{name}: {WHAT[series.what]}"


def correlation_tables(series: Sequence[InfluenceSeries], over: str = "") -> list[Table]:
    """A table for each measure, with a row for each series that is correlated with it."""
    tables = []
    for measure in dict.fromkeys(measure for entry in series for measure in entry.correlations):
        cells = []
        for entry in (entry for entry in series if measure in entry.correlations):
            found = entry.correlations[measure]
            texts = [
                f"{each.value} p {each.p_value:.2g}{', established' * each.established}" for each in found.correlations
            ]
            unknown = [np.isnan(each.value.value) for each in found.correlations]
            told = [MISSING if nothing else text for nothing, text in zip(unknown, texts, strict=True)]
            cells.append([series_name(entry), *told, str(found.n_positions)])
        title = f"Influence and {label(MEASURES, measure)} over positions{over}"
        tables.append(Table(title, ["influence", *CONTROLLED.values(), "positions"], cells))
    return tables


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


def influence_figure(slug: str, group: MeasuredGroup) -> Figure:
    """Accuracy, influence and theories of one model, each as a multiple of its mean over positions."""
    series, means = group.series, group.means
    lines = [(label(MEASURES, name), means[name], stroke) for name, stroke in ON_ONE_SCALE.items() if name in means]
    theories = theory_strokes([entry.source for entry in series if not entry.measured])
    kinds = list(dict.fromkeys(entry.kind for entry in series if entry.measured))
    of_answers = {(entry.source, entry.kind) for entry in series if entry.what == "gold"}
    for entry in series:
        stroke = theories[entry.source] if not entry.measured else INFLUENCES[kinds.index(entry.kind) % len(INFLUENCES)]
        if entry.what == "place" and (entry.source, entry.kind) in of_answers:
            stroke = Stroke(stroke.colour, "dot")  # beside the answer's item of the same source
        lines.append((series_name(entry), entry.means, stroke))
    curves: list[Curve] = []
    for name, by_position, stroke in lines:
        values = [mean.value for mean in by_position if not np.isnan(mean.value)]
        if values and np.mean(values) > 0:
            curves += interval_curves(name, group.positions, by_position, stroke, unit=float(np.mean(values)))
    return Figure(
        slug,
        f"{group.title}: what weighs, and what is used, by position (each as a multiple of its mean)",
        axis_of(group.n_items),
        "multiple of the mean over positions",
        tuple(curves),
        markers=True,
        log_range=TIE_RANGE,
        linear_range=(0.0, 4.0),
    )
