"""A record of behaviour by position in words, tables and figures.

Everything comes from the record (layout: posbias/evaluation/record.py and, where influence was measured on the same
prompts, posbias/auditing/behaviour.py).
"""

from collections.abc import Mapping
from typing import Any

from posbias.records import Record
from posbias.report.behaviour_figures import MEASURES, behaviour_figures
from posbias.report.conditions import title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text
from posbias.report.tie_tables import TIE_CAVEAT, tie_cells, tie_statements, tied_measures
from posbias.report.wording import label
from posbias.statistics.intervals import MISSING

NOTE = (
    "One sample is requested once per position; only the item that holds the answer moves. Shaded bands are 95 % "
    "intervals over samples, position by position; statements about differences rest on the same samples at all "
    "positions and are corrected for the number of comparisons. A position that is missing was too long for the model."
)

Stored = Mapping[str, Any]


@REPORTS.register("evaluate")
def behaviour_report(record: Record) -> Report:
    """Scores by position, differences to the best one, and the correlation with influence where it was measured."""
    return Report(
        kicker="posbias · behaviour by position",
        title=title_of(record),
        statements=statements_of(record),
        figures=behaviour_figures(record),
        note=NOTE,
        tables=tables_of(record),
        left_out=reasons_of(record),
        caveats=[TIE_CAVEAT] if "influence" in record.scalars else [],
    )


def tables_of(record: Record) -> list[Table]:
    """Scores by position, differences to the best one, and the correlation where it was measured."""
    tables: list[Table] = [
        Table(
            f"{record.resolved['task']}: by position of the answer (0 ... {record.scalars['n_items'] - 1})",
            *_score_cells(record),
        )
    ]
    for name, curve in record.scalars["curves"].items():
        if curve["comparison"] is not None:
            tables.append(Table(f"{label(MEASURES, name)}: against the best position", *_difference_cells(curve)))
    tables += [
        Table(f"Influence and {label(MEASURES, measure)} over positions", *tie_cells(_series(record), measure))
        for measure in tied_measures(_series(record))
    ]
    return [table for table in tables if table.cells]


def statements_of(record: Record) -> list[str]:
    """What the intervals allow to say, sentence by sentence."""
    found = [
        f"{label(MEASURES, name)}: {finding}."
        for name, curve in record.scalars["curves"].items()
        for finding in curve["findings"]
    ]
    if not found:
        found = ["No example was answered or scored, so there is no curve."]
    for measure in tied_measures(_series(record)):
        found += tie_statements(_series(record), measure)
    return found


def reasons_of(record: Record) -> list[str]:
    """What was left out, and why."""
    reasons = [
        f"{count} examples with the answer at position {place} are longer than the model's context and were skipped"
        for place, count in record.scalars["skipped"].items()
    ]
    cut, total = record.scalars["cut_off"], record.scalars["examples"]
    if cut:
        tokens = record.resolved["max_tokens"]
        reasons.append(f"{cut} of {total} generated answers ended at --max-tokens {tokens}, not by themselves")
    unscored = record.resolved["responder"].get("no_scores_because")
    if unscored and record.arguments.get("score", True):
        reasons.append(f"the right answers were not scored: {unscored}")
    return [*reasons, *record.scalars.get("influence", {}).get("left_out", [])]


def _score_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    curves = record.scalars["curves"]
    header = ["position", "answer's token", "samples", *(label(MEASURES, name) for name in curves)]
    cells = []
    for column, place in enumerate(record.resolved["positions"] if curves else ()):
        first = next(iter(curves.values()))
        token = MISSING if first["gold_tokens"] is None else f"{first['gold_tokens'][column]:.0f}"
        means = [interval_text(curve["means"][column]) for curve in curves.values()]
        cells.append([str(place), token, str(first["counts"][column]), *means])
    return header, cells


def _difference_cells(curve: Stored) -> tuple[list[str], list[list[str]]]:
    comparison, places = curve["comparison"], curve["positions"]
    best = places[comparison["best"]]
    header = ["position", f"difference to position {best}", "chosen on other samples", "p, all pairs"]
    cells = []
    for entry in comparison["differences"]:
        adjusted = MISSING if entry["adjusted_p"] is None else f"{entry['adjusted_p']:.2g}"
        number = str(places[entry["position"]])
        cells.append(
            [
                number,
                interval_text(entry.get("interval") or entry["bootstrap"]),
                f"{entry['cross_fitted']:+.3f}",
                adjusted,
            ]
        )
    return header, cells


def _series(record: Record) -> list[Stored]:
    """The series of influence that were measured on the same prompts."""
    found: list[Stored] = record.scalars.get("influence", {}).get("series", [])
    return found
