"""A record of behaviour by position in words and tables, on the terminal and as one offline page with its figures.

Everything comes from the record (layout: posbias/evaluation/record.py and, where influence was measured on the same
prompts, posbias/auditing/behaviour.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbias.errors import UsageError
from posbias.records import Record
from posbias.report.behaviour_figures import MEASURES, behaviour_figures, series_name
from posbias.report.conditions import conditions_of, title_of
from posbias.report.files import page_template, write_page
from posbias.report.interactive import interactive, plotly_source
from posbias.report.static import png
from posbias.report.tables import MISSING, plain_columns, ruled
from posbias.report.wording import label
from posbias.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATE = "behaviour.html.jinja"
CONTROLLED = {
    "nothing": "plain",
    "position": "position held fixed",
    "ends": "distance to the nearer end held fixed",
    "position_and_ends": "both held fixed",
}
TIE_CAVEAT = (
    "A rank correlation over positions is nearly automatic where both curves fall or bend alike; the partial ones hold "
    "position, distance to the nearer end, or both fixed. Their intervals resample contents at the chosen positions; "
    "p counts permutations of the positions, corrected (Holm) for the number of series and measures."
)

Stored = Mapping[str, Any]
Table = tuple[str, list[str], list[list[str]]]
"""Title, header, cells."""


def write_behaviour_report(record: Record, out: Path) -> Path:
    """Write `report.html` and a PNG per figure into `out`, each atomically.

    Raises:
        UsageError: the record is not a finished evaluation.
        RunError: the files cannot be written.
    """
    if record.verb != "evaluate" or "curves" not in record.scalars:
        raise UsageError(f"a report of behaviour needs a finished record of verb 'evaluate', got {record.verb!r}")
    pictures = {f"{figure.slug}.png": png(figure) for figure in behaviour_figures(record)}
    return write_page(render_behaviour(record), out, pictures=pictures)


def render_behaviour(record: Record) -> str:
    """The page as text."""
    return page_template(TEMPLATE).render(
        title=title_of(record),
        caveat=TIE_CAVEAT if "tie" in record.scalars else "",
        statements=statements_of(record),
        charts=[interactive(figure, anchor=figure.slug) for figure in behaviour_figures(record)],
        tables=tables_of(record),
        reasons=reasons_of(record),
        command=record.resolved.get("command", ""),
        conditions=conditions_of(record),
        plotly=plotly_source(),
        version=__version__,
    )


def show_behaviour(record: Record, console: "Console") -> None:
    """Print tables and statements: ruled on a terminal, aligned plain columns into a pipe or a file."""
    for title, header, cells in tables_of(record):
        if console.is_terminal:
            console.print(ruled(title, header, cells))
        else:
            console.file.write(f"{title}\n{plain_columns(header, cells)}\n\n")
    for statement in [*statements_of(record), *reasons_of(record)]:
        console.print(f"- {statement}", highlight=False, markup=False, soft_wrap=True)


def tables_of(record: Record) -> list[Table]:
    """Scores by position, differences to the best one, and the tie where it was measured."""
    tables: list[Table] = [
        (
            f"{record.resolved['task']}: by position of the answer (0 ... {record.scalars['n_items'] - 1})",
            *_score_cells(record),
        )
    ]
    for name, curve in record.scalars["curves"].items():
        if curve["comparison"] is not None:
            tables.append((f"{label(MEASURES, name)}: against the best position", *_difference_cells(curve)))
    tables += [
        (f"Influence and {label(MEASURES, measure)} over positions", *_tie_cells(record, measure))
        for measure in _tied_measures(record)
    ]
    return [table for table in tables if table[2]]


def statements_of(record: Record) -> list[str]:
    """What the intervals allow to say, sentence by sentence."""
    found = [
        f"{label(MEASURES, name)}: {finding}."
        for name, curve in record.scalars["curves"].items()
        for finding in curve["findings"]
    ]
    if not found:
        found = ["No example was answered or scored, so there is no curve."]
    for measure in _tied_measures(record):
        found += [
            _tie_statement(series, measure)
            for series in record.scalars["tie"]["series"]
            if measure in series["ties"] and (series["source"] == "measured" or _any_established(series, measure))
        ]
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
    return [*reasons, *record.scalars.get("tie", {}).get("left_out", [])]


def _score_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    curves = record.scalars["curves"]
    header = ["position", "answer's token", "contents", *(label(MEASURES, name) for name in curves)]
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
    header = ["position", f"difference to position {best}", "chosen on other contents", "McNemar p (Holm)"]
    cells = []
    for entry in comparison["differences"]:
        adjusted = MISSING if entry["adjusted_p"] is None else f"{entry['adjusted_p']:.2g}"
        number = str(places[entry["position"]])
        cells.append([number, interval_text(entry["bootstrap"]), f"{entry['cross_fitted']:+.3f}", adjusted])
    return header, cells


def _tied_measures(record: Record) -> list[str]:
    series = record.scalars.get("tie", {}).get("series", [])
    return list(dict.fromkeys(measure for entry in series for measure in entry["ties"]))


def _tie_cells(record: Record, measure: str) -> tuple[list[str], list[list[str]]]:
    header = ["influence", *CONTROLLED.values(), "within positions and contents"]
    cells = []
    for series in record.scalars["tie"]["series"]:
        if measure not in series["ties"]:
            continue
        found = series["ties"][measure]
        texts = [_correlation_text(entry) for entry in found["correlations"]]
        cells.append([series_name(series), *texts, interval_text(found["within"])])
    return header, cells


def _correlation_text(entry: Stored) -> str:
    if entry["value"] is None:
        return MISSING
    return f"{interval_text(entry)} p {entry.get('adjusted_p', entry['p']):.2g}"


def _any_established(series: Stored, measure: str) -> bool:
    return any(entry["established"] for entry in series["ties"][measure]["correlations"])


def _tie_statement(series: Stored, measure: str) -> str:
    found = series["ties"][measure]
    by_name = {entry["controlled"]: entry for entry in found["correlations"]}
    plain, held = by_name["nothing"], by_name["position_and_ends"]
    if plain["value"] is None:
        return (
            f"{series_name(series)} and {label(MEASURES, measure)}: one of the curves is constant, so there is no tie."
        )
    said = "established" if plain["established"] else "not established"
    rest = (
        "and nothing is left of a curve once position and ends are held fixed"
        if held["value"] is None
        else f"with position and ends held fixed {interval_text(held)} "
        f"({'established' if held['established'] else 'not established'})"
    )
    return (
        f"{series_name(series)} and {label(MEASURES, measure)} over {found['n_positions']} positions: rank correlation "
        f"{interval_text(plain)} ({said}), {rest}."
    )


def interval_text(stored: Stored | None) -> str:
    """A number with its interval."""
    if stored is None or stored["value"] is None:
        return MISSING
    ends = "" if stored["low"] is None or stored["high"] is None else f" [{stored['low']:.3f}, {stored['high']:.3f}]"
    return f"{stored['value']:.3f}{ends}"
