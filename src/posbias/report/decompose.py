"""A decomposition's record in words, tables and figures.

Everything comes from the record (layout: posbias/decomposition/record.py). Shifts are in percentage points of the
influence; a statement is made only where an interval over at least 6 prompts leaves zero out.
"""

from collections.abc import Mapping
from typing import Any

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.display.figures import MEASURED, Curve, Figure, interval_curves, theory_strokes
from posbias.display.wording import KINDS, STATISTICS, label
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import VERDICTS, Table, interval_text
from posbias.runs.records import Record
from posbias.statistics import Interval

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
SOURCE_NAMES = {
    "measured": "measured",
    "rollout_content": "architecture: residual rollout with content",
    "attention_rollout": "own attention rolled out, replaced",
    "power_rollout": "power rollout, replaced",
    "power_rollout_rerun": "power rollout, run again",
}
"""Replaced: on the unchanged model's activations. Run again: on the changed model's own."""

Stored = Mapping[str, Any]


@REPORTS.register("decompose")
def decomposition_report(record: Record) -> Report:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    statements, tables = statements_of(record), tables_of(record)
    figures = [_shift_figure(record, kind, shifts) for kind, shifts in _drawn(record).items()]
    return Report(
        f"What makes the profile of {record.resolved['title']}",
        kicker="posbias · ingredients of a profile, replaced one at a time",
        verdict=_verdict(record) or statements[:1],
        picture=figures[:1],
        summary=tables[:2],
        statements=statements,
        caveats=[*caveats_of(record), CAVEAT],
        figures=figures[1:],
        note=NOTE,
        tables=tables[2:],
        left_out=reasons_of(record),
        record=record,
    )


def _verdict(record: Record) -> list[str]:
    """The ingredient whose replacement moves most, of those whose shift is decided, and the theory nearest to the
    measured shifts; empty where there are too few prompts."""
    if record.scalars["count"] < UNITS_FOR_CLAIM:
        return []
    kind = record.scalars["kinds"][0]
    shifts = [each for each in record.scalars["shifts"] if each["source"] == "measured" and each["kind"] == kind]
    shown = [each for each in shifts if Interval.of_record(each["shift"]).excludes(0.0)]
    said = ["No replaced ingredient is shown to move the profile."]
    if shown:
        most = max(shown, key=lambda each: abs(each["shift"]["value"]))
        points = interval_text(most["shift"], "+.1f", scale=100)
        names = ", ".join(dict.fromkeys(each["intervention"] for each in shown))
        said = [
            f"What makes the profile: replacing by {most['intervention']} moves it most, the "
            f"{label(STATISTICS, most['mass'])} by {points} percentage points; shown to move it at all: {names}."
        ]
    scores = sorted(record.scalars["scores"], key=lambda score: score["error"]["value"])
    return [*said, *(f"Which theory knows why: {_score_statement(score)}" for score in scores[:1])]


def tables_of(record: Record) -> list[Table]:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    tables = [_baseline_table(record)]
    for kind, shifts in _drawn(record).items():
        name = label(KINDS, kind)
        tables.append(_shift_table(f"Shift of the mass in percentage points ({name})", record, shifts, "shift"))
        tables.append(_shift_table(f"Theory's shift less the measured one, in points ({name})", record, shifts, "gap"))
    tables += [_score_table(record), _divergence_table(record)]
    return [table for table in tables if table.cells]


def statements_of(record: Record) -> list[str]:
    """What the intervals support, sentence by sentence."""
    count = record.scalars["count"]
    if count < UNITS_FOR_CLAIM:
        return [f"{count} prompts: with fewer than {UNITS_FOR_CLAIM} nothing is decided."]
    kind = record.scalars["kinds"][0]
    found = [_shift_statement(record, entry, kind) for entry in record.scalars["interventions"]]
    return [*filter(None, found), *map(_score_statement, record.scalars["scores"])]


def reasons_of(record: Record) -> list[str]:
    """What was not possible, and why."""
    reasons = [f"{_source(source)}: {reason}" for source, reason in record.scalars["left_out"].items()]
    for entry in record.scalars["interventions"]:
        for source, reason in entry["reasons"].items():
            why = reason.removeprefix(f"{entry['name']}: ")
            reasons.append(f"{entry['name']}, {_source(source)}: not possible, {why}")
    return reasons


def _drawn(record: Record) -> dict[str, list[Stored]]:
    """The stored shifts of every kind of influence that has any."""
    shifts = {
        kind: [shift for shift in record.scalars["shifts"] if shift["kind"] == kind] for kind in record.scalars["kinds"]
    }
    return {kind: entries for kind, entries in shifts.items() if entries}


def _shift_figure(record: Record, kind: str, shifts: list[Stored]) -> Figure:
    """One row per ingredient and mass, one sort of point per source; the measurement is black."""
    shown = {shift["intervention"] for shift in shifts}
    masses = list(dict.fromkeys(shift["mass"] for shift in shifts))
    names = [entry["name"] for entry in record.scalars["interventions"] if entry["name"] in shown]
    rows = [(name, mass) for name in names for mass in masses]
    sources = [source for source in record.scalars["sources"] if any(shift["source"] == source for shift in shifts)]
    strokes = {**theory_strokes([source for source in sources if source != "measured"]), "measured": MEASURED}
    curves: list[Curve] = []
    for source in sources:
        own = {(shift["intervention"], shift["mass"]): shift["shift"] for shift in shifts if shift["source"] == source}
        places = [place for place, row in enumerate(rows, start=1) if row in own]
        stored = [own[rows[place - 1]] for place in places]
        curves += interval_curves(_source(source), places, stored, strokes[source], unit=0.01)
    return Figure(
        slug=f"shifts-{kind}",
        title=f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})",
        x_label="",
        y_label="percentage points",
        curves=tuple(curves),
        rows=tuple(f"{name}: {label(STATISTICS, mass)}" for name, mass in rows),
    )


def _mass_names(record: Record) -> list[str]:
    return list(dict.fromkeys(label(STATISTICS, shift["mass"]) for shift in record.scalars["shifts"]))


def _baseline_table(record: Record) -> Table:
    """One row per source and kind, from the first intervention that knows it."""
    seen: dict[tuple[str, str], dict[str, Stored]] = {}
    for shift in record.scalars["shifts"]:
        seen.setdefault((shift["source"], shift["kind"]), {}).setdefault(shift["mass"], shift["before"])
    cells = [
        [
            _source(source),
            label(KINDS, kind),
            *(interval_text(part, ".1f", scale=100, unit=" %") for part in parts.values()),
        ]
        for (source, kind), parts in seen.items()
        if source != "power_rollout_rerun"  # with nothing replaced, there is nothing to run again
    ]
    header = ["source", "kind", *_mass_names(record)]
    return Table("Masses with nothing replaced (a flat line: 10 % each)", header, cells)


def _shift_table(title: str, record: Record, shifts: list[Stored], number: str) -> Table:
    """One row per intervention and source, one column per mass."""
    rows: dict[tuple[str, str], list[str]] = {}
    for shift in shifts:
        if shift[number] is not None:
            rows.setdefault((shift["intervention"], shift["source"]), []).append(
                interval_text(shift[number], "+.1f", scale=100)
            )
    ingredients = {entry["name"]: entry["ingredient"] for entry in record.scalars["interventions"]}
    cells = [[ingredients[name], name, _source(source), *texts] for (name, source), texts in rows.items()]
    return Table(title, ["ingredient", "replaced by", "source", *_mass_names(record)], cells)


def _score_table(record: Record) -> Table:
    header = ["theory", "kind", "mean |gap|, points", "that of predicting no shift", "difference"]
    header += ["interventions", "against predicting no shift"]
    cells = [
        [
            _source(score["source"]),
            label(KINDS, score["kind"]),
            *(interval_text(score[name], ".1f", scale=100) for name in ("error", "no_shift")),
            interval_text(score["difference"], "+.1f", scale=100),
            str(len(score["interventions"])),
            VERDICTS[score["decides"]],
        ]
        for score in record.scalars["scores"]
    ]
    return Table("How far are a theory's shifts from the measured ones?", header, cells)


def _divergence_table(record: Record) -> Table:
    cells = [
        [entry["ingredient"], entry["name"], interval_text(entry["divergence"])]
        for entry in record.scalars["interventions"]
        if entry["divergence"] is not None
    ]
    header = ["ingredient", "replaced by", "KL of the next token, nats"]
    return Table("How far does the change drive the model?", header, cells)


def _shift_statement(record: Record, entry: Stored, kind: str) -> str:
    """Measured shifts of one intervention."""
    parts = []
    for shift in record.scalars["shifts"]:
        if (shift["intervention"], shift["source"], shift["kind"]) != (entry["name"], "measured", kind):
            continue
        name, change = label(STATISTICS, shift["mass"]), Interval.of_record(shift["shift"])
        points = change.text("+.1f", scale=100)
        parts.append(f"{name} {points} points" if change.excludes(0.0) else f"{name} not decided ({points})")
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


def _source(name: str) -> str:
    return label(SOURCE_NAMES, name)
