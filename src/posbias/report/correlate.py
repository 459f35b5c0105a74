"""Correlations over several runs in words, tables and pictures: one per group, and all groups' ranks together."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from posbias.display.figures import RUNS, Curve, Figure, interval_curves
from posbias.display.wording import label
from posbias.evaluation.correlate import InfluenceCorrelation, MeasuredGroup
from posbias.evaluation.correlation import InfluenceSeries
from posbias.evaluation.evaluation import MEASURES
from posbias.report.influence import (
    CONTROLLED,
    CORRELATION_CAVEAT,
    Weighed,
    correlated_measures,
    correlation_table,
    correlation_verdict,
    influence_figure,
    series_name,
)
from posbias.report.layout import notice_sentences
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.statistics import MISSING, Interval

NOTE = (
    "Ranks are formed within each measurement (one model, one task at one length), 0 for the least and 1 for the "
    "most, and correlated over the positions of all of them. Bootstrap draws take the samples of each anew, those "
    "that several share together; permutations move positions within each. In the pictures of single measurements "
    "every curve is a multiple of its mean over positions; shaded bands are 95 % intervals over samples."
)
NOTHING = "Nothing to compare: no series of influence has samples in common with a measure of behaviour."


@REPORTS.register("correlate")
def correlation_report(result: InfluenceCorrelation) -> Report:
    """The pooled groups, their pooled correlations, and the correlations of each group alone."""
    pictures, details = figures(result), tables(result)
    return Report(
        result.record.title,
        kicker="posbias · what weighs, and what is used, over several measurements",
        verdict=[correlation_verdict(result.pooled) or NOTHING],
        picture=pictures[:1],
        summary=details[:2],
        notices=[
            *(f"No conclusion from the generated answers of {reason}." for reason in result.withheld),
            *(
                sentence
                for group in result.groups
                for sentence in notice_sentences(group.notices, count=group.n_samples, here=True, of=f"{group.title}: ")
            ),
        ],
        caveats=[CORRELATION_CAVEAT],
        figures=pictures[1:],
        note=NOTE,
        tables=details[2:],
        left_out=reasons(result),
        record=result.record,
    )


def tables(result: InfluenceCorrelation) -> list[Table]:
    """The measurements, their pooled correlations, and each measurement's own."""
    header = ["measurement", "samples", "positions", "tokens of a prompt"]
    cells = [
        [
            group.title,
            str(group.n_samples),
            " ".join(map(str, group.positions)),
            MISSING if group.prompt_tokens is None else f"{group.prompt_tokens:.0f}",
        ]
        for group in result.groups
    ]
    tables = [Table("What is correlated", header, cells)]
    over = "" if len(result.groups) == 1 else ", all measurements pooled"
    tables += [
        correlation_table(f"Influence and {label(MEASURES, measure)} over positions{over}", result.pooled, measure)
        for measure in correlated_measures(result.pooled)
    ]
    for group in result.groups:
        alone = [series for series in result.alone if series.group == group.title]
        tables += [
            correlation_table(f"{group.title} alone: influence and {label(MEASURES, measure)}", alone, measure)
            for measure in correlated_measures(alone)
        ]
    return tables


def reasons(result: InfluenceCorrelation) -> list[str]:
    """Groups that a pooled correlation does without, and groups that leave it without an interval."""
    reasons = []
    for series in result.pooled:
        for measure, there in series.groups.items():
            about = f"{series_name(series)} and {label(MEASURES, measure)}"
            missing = [group.title for group in result.groups if group.title not in there]
            if missing:
                reasons.append(f"{about}: without {', '.join(missing)} (one of the two is missing)")
            # From a single sample nothing can be resampled.
            single = [
                alone.group
                for alone in result.alone
                if alone.name == series.name
                and measure in alone.correlations
                and alone.correlations[measure].n_samples == 1
            ]
            if single:
                reasons.append(
                    f"{about}: no interval, since {', '.join(single)} has a single sample; leave it out, or give more"
                )
    return reasons


def figures(result: InfluenceCorrelation) -> list[Figure]:
    """Correlations pooled and alone, the ranks of all groups for each measured series, every group's own curves."""
    groups = result.groups
    measured = [series for series in result.pooled if series.measured]
    figures = [_correlation_figure(measured, result.alone)] if len(groups) > 1 and measured else []
    for number, series in enumerate(measured):
        figures += _rank_figure(groups, series, f"correlation-ranks-{number}")
    for number, group in enumerate(groups):
        weighed = Weighed(group.positions, group.n_items, group.means, group.series)
        figures.append(influence_figure(f"correlation-{number}", group.title, weighed))
    return [figure for figure in figures if figure.curves]


def _correlation_figure(pooled: Sequence[InfluenceSeries], alone: Sequence[InfluenceSeries]) -> Figure:
    """Plain and partial correlations with the first measure: of all groups together, and of each alone."""
    measure = next(iter(pooled[0].correlations))
    rows = []
    for series in pooled:
        if measure in series.correlations:
            rows.append((f"{series_name(series)}, pooled", series.correlations[measure]))
            rows += [
                (entry.group, entry.correlations[measure])
                for entry in alone
                if entry.name == series.name and measure in entry.correlations
            ]
    curves: list[Curve] = []
    for number, (name, stroke) in enumerate(zip(CONTROLLED.values(), RUNS, strict=False)):
        values = [row.correlations[number].value for _, row in rows]
        curves += interval_curves(name, range(1, len(rows) + 1), values, stroke)
    return Figure(
        "correlations",
        f"Influence and {label(MEASURES, measure)}: correlations, pooled and alone",
        "",
        "rank correlation over positions, 95 % interval over samples",
        tuple(curves),
        rows=tuple(name for name, _ in rows),
    )


def _rank_figure(groups: Sequence[MeasuredGroup], series: InfluenceSeries, slug: str) -> list[Figure]:
    """Every position of every group: rank of its influence, rank of its score; none if a curve is constant."""
    measure = next(iter(series.correlations))
    value = series.correlations[measure].of("nothing").value.value
    if np.isnan(value):
        return []
    curves = []
    for group, stroke in zip(groups, RUNS, strict=False):
        if group.title in series.groups[measure]:
            influence = next(entry for entry in group.series if entry.name == series.name)
            curves.append(Curve(group.title, _ranks(influence.means), _ranks(group.means[measure]), stroke))
    name = label(MEASURES, measure)
    title = f"{series_name(series)} and {name}: ranks of the positions within each measurement"
    return [
        Figure(
            slug,
            f"{title} (rank correlation {value:.2f})",
            f"rank of: {series_name(series)}",
            f"rank of the {name}",
            tuple(curves),
            markers=True,
            lines=False,
        )
    ]


def _ranks(means: Sequence[Interval]) -> Float64[np.ndarray, "n_positions"]:
    """Ranks from 0 to 1, ties sharing theirs."""
    from scipy.stats import rankdata

    values = np.array([mean.value for mean in means], dtype=np.float64)
    ranks: np.ndarray = (rankdata(np.round(values, 12)) - 1) / max(len(values) - 1, 1)
    return ranks
