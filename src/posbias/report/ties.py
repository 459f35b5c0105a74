"""Correlations over several runs in words, tables and pictures: one picture per group, and all groups' ranks together.

Everything comes from the record (layout: posbias/evaluation/pooling.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.records import Record
from posbias.report.behaviour_figures import MEASURES, series_name, tie_figure
from posbias.report.conditions import title_of
from posbias.report.figures import Curve, Figure
from posbias.report.page import REPORTS, Report
from posbias.report.palette import RUNS
from posbias.report.tables import Table
from posbias.report.tie_tables import CONTROLLED, TIE_CAVEAT, tie_cells, tie_statements, tied_measures
from posbias.report.wording import label
from posbias.statistics.intervals import MISSING

NOTE = (
    "Ranks are formed within each measurement (one model, one task at one length), 0 for the least and 1 for the "
    "most, and correlated over the positions of all of them. Bootstrap draws take the samples of each anew, those "
    "that several share together; permutations move positions within each. In the pictures of single measurements "
    "every curve is a multiple of its mean over positions; shaded bands are 95 % intervals over samples."
)

Stored = Mapping[str, Any]


@REPORTS.register("correlate")
def ties_report(record: Record) -> Report:
    """What was pooled, the pooled correlations, and each group's own."""
    return Report(
        kicker="posbias · what weighs, and what is used, over several measurements",
        title=title_of(record),
        statements=statements_of_ties(record),
        figures=figures_of_ties(record),
        note=NOTE,
        tables=tables_of_ties(record),
        left_out=reasons_of_ties(record),
        caveats=[TIE_CAVEAT],
    )


def tables_of_ties(record: Record) -> list[Table]:
    """What was pooled, the pooled correlations, and each group's own."""
    groups, pooled, alone = (record.scalars[name] for name in ("groups", "pooled", "alone"))
    header = ["measurement", "runs", "samples", "positions", "tokens of a prompt"]
    cells = [
        [
            group["title"],
            str(len(group["runs"])),
            str(group["n_samples"]),
            " ".join(map(str, group["positions"])),
            MISSING if group["prompt_tokens"] is None else f"{group['prompt_tokens']:.0f}",
        ]
        for group in groups
    ]
    tables: list[Table] = [Table("What is correlated", header, cells)]
    for measure in tied_measures(pooled):
        over = "" if len(groups) == 1 else ", all measurements pooled"
        title = f"Influence and {label(MEASURES, measure)} over positions{over}"
        tables.append(Table(title, *tie_cells(pooled, measure)))
    for group in groups:
        own = [entry for entry in alone if entry["group"] == group["title"]]
        tables += [
            Table(f"{group['title']} alone: influence and {label(MEASURES, measure)}", *tie_cells(own, measure))
            for measure in tied_measures(own)
        ]
    return tables


def statements_of_ties(record: Record) -> list[str]:
    """What the intervals and permutations allow to say, sentence by sentence."""
    pooled, n_groups = record.scalars["pooled"], len(record.scalars["groups"])
    found = []
    for measure in tied_measures(pooled):
        for entry in pooled:
            there = len(entry["groups"].get(measure, ()))
            where = "" if n_groups == 1 else f" of {there} measurements"
            found += tie_statements([entry], measure, where=where)
    return found or ["No series of influence has samples in common with a measure of behaviour."]


def reasons_of_ties(record: Record) -> list[str]:
    """Which groups a pooled correlation goes without, and which leave it without an interval."""
    titles = [group["title"] for group in record.scalars["groups"]]
    found = []
    for entry in record.scalars["pooled"]:
        for measure, there in entry["groups"].items():
            about = f"{series_name(entry)} and {label(MEASURES, measure)}"
            missing = [title for title in titles if title not in there]
            if missing:
                found.append(f"{about}: without {', '.join(missing)}, which has not both")
            single = _single(record, entry, measure)
            if single:
                found.append(
                    f"{about}: no interval, for {', '.join(single)} has a single sample; leave it out, or give more"
                )
    return found


def _single(record: Record, entry: Stored, measure: str) -> list[str]:
    """The groups that bring a pooled correlation only one sample, from which nothing can be resampled."""
    return [
        alone["group"]
        for alone in record.scalars["alone"]
        if all(alone[part] == entry[part] for part in ("source", "kind", "what"))
        and alone["correlations"].get(measure, {}).get("n_samples") == 1
    ]


def figures_of_ties(record: Record) -> list[Figure]:
    """Correlations pooled and alone, the ranks of all groups for each measured series, every group's own curves."""
    groups = record.scalars["groups"]
    measured = [entry for entry in record.scalars["pooled"] if entry["source"] == "measured"]
    figures = [
        figure
        for number, entry in enumerate(measured)
        if (figure := _rank_figure(groups, entry, f"correlation-ranks-{number}")) is not None
    ]
    if len(groups) > 1 and measured:
        figures.insert(0, _correlation_figure(measured, record.scalars["alone"]))
    figures += [
        tie_figure(
            f"correlation-{number}",
            f"{group['title']}: what weighs, and what is used, by position (each as a multiple of its mean)",
            group,
        )
        for number, group in enumerate(groups)
    ]
    return [figure for figure in figures if figure.curves]


def _correlation_figure(pooled: Sequence[Stored], alone: Sequence[Stored]) -> Figure:
    """Plain and partial correlations with the first measure: of all groups together, and of each alone."""
    measure = next(iter(pooled[0]["correlations"]))
    rows = []
    for entry in pooled:
        own = [other for other in alone if _name(other) == _name(entry) and measure in other["correlations"]]
        if measure in entry["correlations"]:
            rows.append((f"{series_name(entry)}, pooled", entry["correlations"][measure]))
            rows += [(f"{other['group']}", other["correlations"][measure]) for other in own]
    curves = []
    for number, (name, stroke) in enumerate(zip(CONTROLLED, RUNS, strict=False)):
        stored = [found["correlations"][number] for _, found in rows]
        kept = [index for index, entry in enumerate(stored) if entry["value"] is not None]
        low, value, high = (_numbers([stored[index][end] for index in kept]) for end in ("low", "value", "high"))
        if kept:
            places = np.array(kept, dtype=np.float64) + 1
            curves.append(Curve(CONTROLLED[name], places, value, stroke, low, high))
    return Figure(
        "correlations",
        f"Influence and {label(MEASURES, measure)}: correlations, pooled and alone",
        "",
        "rank correlation over positions, 95 % interval over samples",
        tuple(curves),
        rows=tuple(name for name, _ in rows),
    )


def _name(entry: Stored) -> tuple[Any, ...]:
    return tuple(entry[part] for part in ("source", "kind", "what"))


def _rank_figure(groups: Sequence[Stored], entry: Stored, slug: str) -> Figure | None:
    """Every position of every group: rank of its influence, rank of its score."""
    measure = next(iter(entry["correlations"]))
    curves = []
    for group, stroke in zip(groups, RUNS, strict=False):
        if group["title"] not in entry["groups"][measure]:
            continue
        series = next(own for own in group["series"] if _name(own) == _name(entry))
        x, y = _ranks(series["means"]), _ranks(group["curves"][measure]["means"])
        curves.append(Curve(group["title"], x, y, stroke))
    value = entry["correlations"][measure]["correlations"][0]["value"]
    if value is None:
        return None
    return Figure(
        slug,
        f"{series_name(entry)} and {label(MEASURES, measure)}: ranks of the positions within each measurement "
        f"(rank correlation {value:.2f})",
        f"rank of: {series_name(entry)}",
        f"rank of the {label(MEASURES, measure)}",
        tuple(curves),
        markers=True,
        lines=False,
    )


def _ranks(means: Sequence[Stored]) -> Float64[np.ndarray, "n_positions"]:
    """Ranks from 0 to 1, ties sharing theirs."""
    from scipy.stats import rankdata

    values = _numbers([mean["value"] for mean in means])
    ranks: np.ndarray = (rankdata(np.round(values, 12)) - 1) / max(len(values) - 1, 1)
    return ranks


def _numbers(values: Sequence[float | None]) -> Float64[np.ndarray, "_"]:
    """NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
