"""Correlations over several runs in words, tables and pictures: one picture per group, and all groups' ranks together.

Everything comes from the record (layout: posbias/evaluation/pooling.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.display.figures import RUNS, Curve, Figure, interval_curves
from posbias.evaluation.evaluation import MEASURES
from posbias.report.evaluate import (
    CONTROLLED,
    CORRELATION_CAVEAT,
    correlation_statements,
    correlation_table,
    influence_figure,
    series_name,
    tied_measures,
)
from posbias.report.layout import notice_sentences, title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text
from posbias.report.wording import label
from posbias.runs.records import Record
from posbias.statistics import MISSING

NOTE = (
    "Ranks are formed within each measurement (one model, one task at one length), 0 for the least and 1 for the "
    "most, and correlated over the positions of all of them. Bootstrap draws take the samples of each anew, those "
    "that several share together; permutations move positions within each. In the pictures of single measurements "
    "every curve is a multiple of its mean over positions; shaded bands are 95 % intervals over samples."
)

Stored = Mapping[str, Any]


@REPORTS.register("correlate")
def correlations_report(record: Record) -> Report:
    """What was pooled, the pooled correlations, and each group's own."""
    said, drawn, shown = statements(record), figures(record), tables(record)
    return Report(
        title_of(record),
        kicker="posbias · what weighs, and what is used, over several measurements",
        verdict=[verdict_of(record)],
        picture=drawn[:1],
        summary=shown[:2],
        statements=said,
        notices=notices_of_runs(record),
        caveats=[CORRELATION_CAVEAT],
        figures=drawn[1:],
        note=NOTE,
        tables=shown[2:],
        left_out=reasons(record),
        record=record,
    )


def tables(record: Record) -> list[Table]:
    """The measurements, their pooled correlations, and each measurement's own."""
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
    tables = [Table("What is correlated", header, cells)]
    over = "" if len(groups) == 1 else ", all measurements pooled"
    tables += [
        correlation_table(f"Influence and {label(MEASURES, measure)} over positions{over}", pooled, measure)
        for measure in tied_measures(pooled)
    ]
    for group in groups:
        own = [entry for entry in alone if entry["group"] == group["title"]]
        tables += [
            correlation_table(f"{group['title']} alone: influence and {label(MEASURES, measure)}", own, measure)
            for measure in tied_measures(own)
        ]
    return tables


def statements(record: Record) -> list[str]:
    """What the intervals and permutations support, sentence by sentence."""
    pooled, n_groups = record.scalars["pooled"], len(record.scalars["groups"])
    found = []
    for measure in tied_measures(pooled):
        for entry in pooled:
            where = "" if n_groups == 1 else f" of {len(entry['groups'].get(measure, ()))} measurements"
            found += correlation_statements([entry], measure, where=where)
    return found or ["No series of influence has samples in common with a measure of behaviour."]


def verdict_of(record: Record) -> str:
    """Whether more influence goes with better answers, of the first measured series and its first measure."""
    for entry in record.scalars["pooled"]:
        for measure in tied_measures([entry]) if entry["source"] == "measured" else ():
            found = {each["controlled"]: each for each in entry["correlations"][measure]["correlations"]}
            plain, held = found["nothing"], found["position_and_ends"]
            if plain["value"] is None:
                continue
            deciding = held if held["established"] else plain
            n_positions = entry["correlations"][measure]["n_positions"]
            about = f"{series_name(entry)} and {label(MEASURES, measure)}"
            numbers = f"rank correlation of {about} {interval_text(deciding)} over {n_positions} positions"
            if not deciding["established"]:
                return f"Not established: whether positions with more influence are answered better ({numbers})."
            lead, better = ("Yes", "better") if deciding["value"] > 0 else ("No, the reverse", "worse")
            rest = (
                ", beyond what position and ends explain" if held["established"] else "; position alone may explain it"
            )
            return f"{lead}: positions with more influence are answered {better}{rest} ({numbers})."
    return "Nothing to compare: no series of influence has samples in common with a measure of behaviour."


def notices_of_runs(record: Record) -> list[str]:
    """What is odd about the samples of the runs."""
    return [
        sentence
        for run in record.scalars.get("notices", ())
        for sentence in notice_sentences(run["notices"], count=run["count"], here=True, of=f"{run['title']}: ")
    ]


def reasons(record: Record) -> list[str]:
    """Which groups a pooled correlation goes without, and which leave it without an interval."""
    titles = [group["title"] for group in record.scalars["groups"]]
    found = []
    for entry in record.scalars["pooled"]:
        for measure, there in entry["groups"].items():
            about = f"{series_name(entry)} and {label(MEASURES, measure)}"
            missing = [title for title in titles if title not in there]
            if missing:
                found.append(f"{about}: without {', '.join(missing)}, which has not both")
            # From a single sample nothing can be resampled.
            single = [
                alone["group"]
                for alone in record.scalars["alone"]
                if _key(alone) == _key(entry) and alone["correlations"].get(measure, {}).get("n_samples") == 1
            ]
            if single:
                found.append(
                    f"{about}: no interval, for {', '.join(single)} has a single sample; leave it out, or give more"
                )
    return found


def figures(record: Record) -> list[Figure]:
    """Correlations pooled and alone, the ranks of all groups for each measured series, every group's own curves."""
    groups = record.scalars["groups"]
    measured = [entry for entry in record.scalars["pooled"] if entry["source"] == "measured"]
    figures = [_correlation_figure(measured, record.scalars["alone"])] if len(groups) > 1 and measured else []
    for number, entry in enumerate(measured):
        figures += _rank_figure(groups, entry, f"correlation-ranks-{number}")
    figures += [influence_figure(f"correlation-{number}", group["title"], group) for number, group in enumerate(groups)]
    return [figure for figure in figures if figure.curves]


def _correlation_figure(pooled: Sequence[Stored], alone: Sequence[Stored]) -> Figure:
    """Plain and partial correlations with the first measure: of all groups together, and of each alone."""
    measure = next(iter(pooled[0]["correlations"]))
    rows = []
    for entry in pooled:
        if measure in entry["correlations"]:
            rows.append((f"{series_name(entry)}, pooled", entry["correlations"][measure]))
            own = [other for other in alone if _key(other) == _key(entry) and measure in other["correlations"]]
            rows += [(other["group"], other["correlations"][measure]) for other in own]
    curves: list[Curve] = []
    for number, (name, stroke) in enumerate(zip(CONTROLLED.values(), RUNS, strict=False)):
        stored = [found["correlations"][number] for _, found in rows]
        curves += interval_curves(name, range(1, len(rows) + 1), stored, stroke)
    return Figure(
        "correlations",
        f"Influence and {label(MEASURES, measure)}: correlations, pooled and alone",
        "",
        "rank correlation over positions, 95 % interval over samples",
        tuple(curves),
        rows=tuple(name for name, _ in rows),
    )


def _key(entry: Stored) -> tuple[Any, ...]:
    return tuple(entry[part] for part in ("source", "kind", "what"))


def _rank_figure(groups: Sequence[Stored], entry: Stored, slug: str) -> list[Figure]:
    """Every position of every group: rank of its influence, rank of its score; none where a curve is constant."""
    measure = next(iter(entry["correlations"]))
    value = entry["correlations"][measure]["correlations"][0]["value"]
    if value is None:
        return []
    curves = []
    for group, stroke in zip(groups, RUNS, strict=False):
        if group["title"] in entry["groups"][measure]:
            series = next(own for own in group["series"] if _key(own) == _key(entry))
            x, y = _ranks(series["means"]), _ranks(group["curves"][measure]["means"])
            curves.append(Curve(group["title"], x, y, stroke))
    name = label(MEASURES, measure)
    title = f"{series_name(entry)} and {name}: ranks of the positions within each measurement"
    return [
        Figure(
            slug,
            f"{title} (rank correlation {value:.2f})",
            f"rank of: {series_name(entry)}",
            f"rank of the {name}",
            tuple(curves),
            markers=True,
            lines=False,
        )
    ]


def _ranks(means: Sequence[Stored]) -> Float64[np.ndarray, "n_positions"]:
    """Ranks from 0 to 1, ties sharing theirs."""
    from scipy.stats import rankdata

    values = np.array([mean["value"] for mean in means], dtype=np.float64)
    ranks: np.ndarray = (rankdata(np.round(values, 12)) - 1) / max(len(values) - 1, 1)
    return ranks
