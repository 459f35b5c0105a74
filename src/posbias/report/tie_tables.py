"""Correlations of influence with behaviour in words and table cells, for one run and for several pooled.

A stored one: {source, kind, what, correlations: {measure: `Correlations.as_record` with adjusted_p}}.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posbias.report.behaviour_figures import MEASURES, series_name
from posbias.report.tables import interval_text
from posbias.report.wording import label
from posbias.statistics.intervals import MISSING

CONTROLLED = {
    "nothing": "plain",
    "position": "position held fixed",
    "ends": "distance to the nearer end held fixed",
    "position_and_ends": "both held fixed",
}
TIE_CAVEAT = (
    "A rank correlation over positions is nearly automatic where both curves fall or bend alike; the partial ones hold "
    "position, distance to the nearer end, or both fixed. Their intervals resample samples at the chosen positions; "
    "p counts permutations of the positions, corrected (Holm) for the number of series and measures."
)
WITHIN = "within positions and samples"

Stored = Mapping[str, Any]


def tied_measures(series: Sequence[Stored]) -> list[str]:
    """Measures that any of the series is correlated with."""
    return list(dict.fromkeys(measure for entry in series for measure in entry["correlations"]))


def tie_cells(series: Sequence[Stored], measure: str) -> tuple[list[str], list[list[str]]]:
    """Header and a row for each series that is correlated with the measure."""
    cells = []
    for entry in series:
        if measure in entry["correlations"]:
            found = entry["correlations"][measure]
            texts = [_correlation_text(correlation) for correlation in found["correlations"]]
            cells.append([series_name(entry), *texts, interval_text(found["within"])])
    return ["influence", *CONTROLLED.values(), WITHIN], cells


def tie_statements(series: Sequence[Stored], measure: str, *, where: str = "") -> list[str]:
    """A sentence for every measured series, and for every theory of which anything is established."""
    return [
        _statement(entry, measure, where)
        for entry in series
        if measure in entry["correlations"] and (entry["source"] == "measured" or _any_established(entry, measure))
    ]


def _correlation_text(entry: Stored) -> str:
    if entry["value"] is None:
        return MISSING
    return f"{interval_text(entry)} p {entry.get('adjusted_p', entry['p']):.2g}"


def _any_established(series: Stored, measure: str) -> bool:
    return any(entry["established"] for entry in series["correlations"][measure]["correlations"])


def _statement(series: Stored, measure: str, where: str) -> str:
    found = series["correlations"][measure]
    by_name = {entry["controlled"]: entry for entry in found["correlations"]}
    plain, held = by_name["nothing"], by_name["position_and_ends"]
    if plain["value"] is None:
        return (
            f"{series_name(series)} and {label(MEASURES, measure)}: one of the curves is constant, so there is no "
            "correlation."
        )
    said = "established" if plain["established"] else "not established"
    rest = (
        "and nothing is left of a curve once position and ends are held fixed"
        if held["value"] is None
        else f"with position and ends held fixed {interval_text(held)} "
        f"({'established' if held['established'] else 'not established'})"
    )
    return (
        f"{series_name(series)} and {label(MEASURES, measure)} over {found['n_positions']} positions{where}: rank "
        f"correlation {interval_text(plain)} ({said}), {rest}."
    )
