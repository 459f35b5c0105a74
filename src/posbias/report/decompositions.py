"""A decomposition's record in words, tables and figures.

Everything comes from the record (layout: posbias/decomposition/record.py). Shifts are in percentage points of the
influence; a statement is made only where an interval over at least 6 prompts leaves zero out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.records import Record
from posbias.report.conditions import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.shift_figure import SOURCE_NAMES, shift_figure, stored_shifts
from posbias.report.tables import VERDICTS, Table
from posbias.report.wording import KINDS, STATISTICS, label
from posbias.statistics.intervals import MISSING

CAVEAT = (
    "A changed model computes off its training distribution: a shift says what the trained weights do without the "
    "ingredient, not what a model trained without it would do."
)

NOTE = (
    "Masses: the shares of influence on the first tenth of the context, on the tenth around its centre and on the last "
    "tenth. A shift is a prompt's mass with the ingredient replaced less its mass without, averaged; brackets and "
    "whiskers are 95 % intervals over prompts, the same prompts on both sides. A point that is missing has "
    "its reason below."
)

Stored = Mapping[str, Any]


@REPORTS.register("decompose")
def decomposition_report(record: Record) -> Report:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    return Report(
        kicker="posbias · ingredients of a profile, replaced one at a time",
        title=f"What makes the profile of {record.resolved['title']}",
        statements=statements_of(record),
        figures=[shift_figure(record, kind) for kind in _drawn(record)],
        note=NOTE,
        tables=tables_of(record),
        left_out=reasons_of(record),
        caveats=[*caveats_of(record), CAVEAT],
    )


def tables_of(record: Record) -> list[Table]:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    tables: list[Table] = [Table("Masses with nothing replaced (a flat line: 10 % each)", *_baseline_cells(record))]
    for kind in _drawn(record):
        name = label(KINDS, kind)
        tables.append(Table(f"Shift of the mass in percentage points ({name})", *_cells(record, kind, "shift")))
        gaps = _cells(record, kind, "gap")
        if gaps[1]:
            tables.append(Table(f"Theory's shift less the measured one, in points ({name})", *gaps))
    if record.scalars["scores"]:
        tables.append(Table("How far are a theory's shifts from the measured ones?", *_score_cells(record)))
    tables.append(Table("How far does the change drive the model?", *_divergence_cells(record)))
    return [table for table in tables if table.cells]


def statements_of(record: Record) -> list[str]:
    """What the intervals allow to say, sentence by sentence."""
    count = record.scalars["count"]
    if count < UNITS_FOR_CLAIM:
        return [f"{count} prompts: with fewer than {UNITS_FOR_CLAIM} nothing is decided."]
    kind = record.scalars["kinds"][0]
    found = [_shift_statement(record, entry, kind) for entry in record.scalars["interventions"]]
    return [*(text for text in found if text), *map(_score_statement, record.scalars["scores"])]


def reasons_of(record: Record) -> list[str]:
    """What was not possible, and why."""
    reasons = [f"{_source(source)}: {reason}" for source, reason in record.scalars["left_out"].items()]
    for entry in record.scalars["interventions"]:
        for source, reason in entry["reasons"].items():
            said = reason.removeprefix(f"{entry['name']}: ")
            reasons.append(f"{entry['name']}, {_source(source)}: not possible, {said}")
    return reasons


def points_text(stored: Stored | None) -> str:
    """A share's change in percentage points with its interval."""
    if stored is None or stored["value"] is None:
        return MISSING
    low, high = stored["low"], stored["high"]
    ends = "" if low is None or high is None else f" [{_signed(low)}, {_signed(high)}]"
    return f"{_signed(stored['value'])}{ends}"


def _signed(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def _drawn(record: Record) -> list[str]:
    """Kinds with anything to draw."""
    return [kind for kind in record.scalars["kinds"] if stored_shifts(record, kind)]


def _baseline_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    """One row per source and kind, from the first intervention that knows it."""
    seen: dict[tuple[str, str], dict[str, Stored]] = {}
    for shift in record.scalars["shifts"]:
        seen.setdefault((shift["source"], shift["kind"]), {}).setdefault(shift["mass"], shift["before"])
    header = ["source", "kind", *_mass_names(record)]
    cells = [
        [_source(source), label(KINDS, kind), *(_share(stored) for stored in parts.values())]
        for (source, kind), parts in seen.items()
        if source != "power_rollout_rerun"  # with nothing replaced, there is nothing to run again
    ]
    return header, cells


def _cells(record: Record, kind: str, number: str) -> tuple[list[str], list[list[str]]]:
    """One row per intervention and source, one column per mass."""
    rows: dict[tuple[str, str], list[str]] = {}
    for shift in record.scalars["shifts"]:
        if shift["kind"] == kind and shift[number] is not None:
            rows.setdefault((shift["intervention"], shift["source"]), []).append(points_text(shift[number]))
    header = ["ingredient", "replaced by", "source", *_mass_names(record)]
    ingredients = {entry["name"]: entry["ingredient"] for entry in record.scalars["interventions"]}
    return header, [[ingredients[name], name, _source(source), *texts] for (name, source), texts in rows.items()]


def _score_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    header = [
        "theory",
        "kind",
        "mean |gap|, points",
        '"nothing changes"',
        "difference",
        "interventions",
        "than nothing",
    ]
    cells = []
    for score in record.scalars["scores"]:
        texts = [_share(score[name], unit="") for name in ("error", "no_shift")] + [points_text(score["difference"])]
        counts = [str(len(score["interventions"])), VERDICTS[score["decides"]]]
        cells.append([_source(score["source"]), label(KINDS, score["kind"]), *texts, *counts])
    return header, cells


def _divergence_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    header = ["ingredient", "replaced by", "KL of the next token, nats"]
    cells = []
    for entry in record.scalars["interventions"]:
        stored = entry["divergence"]
        if stored is not None:
            ends = "" if stored["low"] is None else f" [{stored['low']:.3f}, {stored['high']:.3f}]"
            cells.append([entry["ingredient"], entry["name"], f"{stored['value']:.3f}{ends}"])
    return header, cells


def _shift_statement(record: Record, entry: Stored, kind: str) -> str:
    """Measured shifts of one intervention."""
    parts = []
    for shift in record.scalars["shifts"]:
        if (shift["intervention"], shift["source"], shift["kind"]) != (entry["name"], "measured", kind):
            continue
        name, stored = label(STATISTICS, shift["mass"]), shift["shift"]
        decided = stored["low"] > 0 or stored["high"] < 0
        parts.append(
            f"{name} {points_text(stored)} points" if decided else f"{name} not decided ({points_text(stored)})"
        )
    return (
        f"{entry['name']} ({entry['ingredient']}), measured {label(KINDS, kind)}: {'; '.join(parts)}." if parts else ""
    )


def _score_statement(score: Stored) -> str:
    verdict = {
        -1: "closer than no shift at all",
        0: "not decided whether closer than no shift at all",
        1: "farther than no shift at all",
    }[score["decides"]]
    return (
        f"{_source(score['source'])} ({label(KINDS, score['kind'])}): over {len(score['interventions'])} changes its "
        f"shifts miss the measured ones by {100 * score['error']['value']:.1f} points on average, "
        f"against {100 * score['no_shift']['value']:.1f} of predicting no shift: {verdict}."
    )


def _mass_names(record: Record) -> Sequence[str]:
    return list(dict.fromkeys(label(STATISTICS, shift["mass"]) for shift in record.scalars["shifts"]))


def _share(stored: Stored, unit: str = " %") -> str:
    ends = "" if stored["low"] is None else f" [{100 * stored['low']:.1f}, {100 * stored['high']:.1f}]"
    return f"{100 * stored['value']:.1f}{unit}{ends}"


def _source(name: str) -> str:
    return label(SOURCE_NAMES, name)
