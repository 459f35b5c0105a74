"""A decomposition in words, tables and figures.

Shifts are in percentage points of the influence; a statement is made only if an interval over at least 6 prompts leaves
zero out.
"""

from collections.abc import Sequence

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.decomposition import Counterfactual, Decomposition, Score, Shift
from posbias.decomposition.sources import MEASURED
from posbias.display.figures import MEASURED as BLACK
from posbias.display.figures import Curve, Figure, interval_curves, theory_strokes
from posbias.display.wording import KINDS, STATISTICS, label
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import VERDICTS, Table
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


@REPORTS.register("decompose")
def decomposition_report(decomposition: Decomposition) -> Report:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    statements, tables = statements_of(decomposition), tables_of(decomposition)
    figures = [_shift_figure(decomposition, kind, shifts) for kind, shifts in _shifts_by_kind(decomposition).items()]
    return Report(
        f"What makes the profile of {decomposition.title}",
        kicker="posbias · ingredients of a profile, replaced one at a time",
        verdict=_verdict(decomposition) or statements[:1],
        picture=figures[:1],
        summary=tables[:2],
        statements=statements,
        caveats=[*caveats_of(decomposition.record), CAVEAT],
        figures=figures[1:],
        note=NOTE,
        tables=tables[2:],
        left_out=reasons_of(decomposition),
        record=decomposition.record,
    )


def _verdict(decomposition: Decomposition) -> list[str]:
    """The ingredient whose replacement moves most, and all whose shift is decided; empty with too few prompts."""
    if decomposition.count < UNITS_FOR_CLAIM:
        return []
    decided = [shift for shift in _measured_shifts(decomposition) if shift.shift.excludes(0.0)]
    if not decided:
        return ["No replacement is shown to move the profile."]
    most = max(decided, key=lambda shift: abs(shift.shift.value))
    names = ", ".join(dict.fromkeys(shift.intervention for shift in decided))
    return [
        f"{most.intervention} moves the profile most: the {label(STATISTICS, most.mass)} changes by "
        f"{_points(most.shift)} percentage points.",
        f"These replacements are shown to move it: {names}.",
    ]


def tables_of(decomposition: Decomposition) -> list[Table]:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    tables = [_baseline_table(decomposition)]
    for kind, shifts in _shifts_by_kind(decomposition).items():
        name = label(KINDS, kind)
        moved = [(shift, shift.shift) for shift in shifts]
        missed = [(shift, shift.gap) for shift in shifts if shift.gap is not None]
        tables += [
            _shift_table(f"Shift of the mass in percentage points ({name})", decomposition, moved),
            _shift_table(f"Theory's shift less the measured one, in points ({name})", decomposition, missed),
        ]
    tables += [_score_table(decomposition.scores), _divergence_table(decomposition)]
    return [table for table in tables if table.cells]


def statements_of(decomposition: Decomposition) -> list[str]:
    """Sentences that the intervals support."""
    if decomposition.count < UNITS_FOR_CLAIM:
        return [f"{decomposition.count} prompts: with fewer than {UNITS_FOR_CLAIM} nothing is decided."]
    measured = _measured_shifts(decomposition)
    statements = [_shift_statement(item, measured) for item in decomposition.counterfactuals]
    return [*filter(None, statements), *map(_score_statement, decomposition.scores)]


def reasons_of(decomposition: Decomposition) -> list[str]:
    """Sources and changes that were not possible, and why."""
    reasons = [f"{_source(source)}: {reason}" for source, reason in decomposition.left_out.items()]
    for item in decomposition.counterfactuals:
        for source, reason in item.reasons.items():
            why = reason.removeprefix(f"{item.name}: ")
            reasons.append(f"{item.name}, {_source(source)}: not possible, {why}")
    return reasons


def _shifts_by_kind(decomposition: Decomposition) -> dict[str, list[Shift]]:
    """Shifts of every kind of influence that has any."""
    shifts = {kind: [shift for shift in decomposition.shifts if shift.kind == kind] for kind in decomposition.kinds}
    return {kind: shifts_of_kind for kind, shifts_of_kind in shifts.items() if shifts_of_kind}


def _measured_shifts(decomposition: Decomposition) -> list[Shift]:
    """Measured shifts of the first kind, which sentences are about."""
    shifts = decomposition.shifts
    return [shift for shift in shifts if (shift.source, shift.kind) == (MEASURED, decomposition.kinds[0])]


def _shift_figure(decomposition: Decomposition, kind: str, shifts: Sequence[Shift]) -> Figure:
    """One row per ingredient and mass, one sort of point per source; the measurement is black."""
    masses = list(dict.fromkeys(shift.mass for shift in shifts))
    rows = [(name, mass) for name in dict.fromkeys(shift.intervention for shift in shifts) for mass in masses]
    sources = [name for name in decomposition.sources if any(shift.source == name for shift in shifts)]
    strokes = {**theory_strokes([name for name in sources if name != MEASURED]), MEASURED: BLACK}
    curves: list[Curve] = []
    for source in sources:
        intervals = {(shift.intervention, shift.mass): shift.shift for shift in shifts if shift.source == source}
        places = [place for place, row in enumerate(rows, start=1) if row in intervals]
        stored = [intervals[rows[place - 1]].as_record() for place in places]
        curves += interval_curves(_source(source), places, stored, strokes[source], unit=0.01)
    return Figure(
        slug=f"shifts-{kind}",
        title=f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})",
        x_label="",
        y_label="percentage points",
        curves=tuple(curves),
        rows=tuple(f"{name}: {label(STATISTICS, mass)}" for name, mass in rows),
    )


def _mass_names(decomposition: Decomposition) -> list[str]:
    return list(dict.fromkeys(label(STATISTICS, shift.mass) for shift in decomposition.shifts))


def _baseline_table(decomposition: Decomposition) -> Table:
    """One row per source and kind, from the first intervention that knows it."""
    before: dict[tuple[str, str], dict[str, Interval]] = {}
    for shift in decomposition.shifts:
        before.setdefault((shift.source, shift.kind), {}).setdefault(shift.mass, shift.before)
    cells = [
        [
            _source(source),
            label(KINDS, kind),
            *(interval.text(".1f", scale=100, unit=" %") for interval in masses.values()),
        ]
        for (source, kind), masses in before.items()
        if source != "power_rollout_rerun"  # with nothing replaced, there is nothing to run again
    ]
    header = ["source", "kind", *_mass_names(decomposition)]
    return Table("Masses with nothing replaced (a flat line: 10 % each)", header, cells)


def _shift_table(title: str, decomposition: Decomposition, numbers: Sequence[tuple[Shift, Interval]]) -> Table:
    """One row per intervention and source, one column per mass."""
    rows: dict[tuple[str, str], list[str]] = {}
    for shift, number in numbers:
        rows.setdefault((shift.intervention, shift.source), []).append(_points(number))
    ingredients = {item.name: item.ingredient for item in decomposition.counterfactuals}
    cells = [[ingredients[name], name, _source(source), *texts] for (name, source), texts in rows.items()]
    return Table(title, ["ingredient", "replaced by", "source", *_mass_names(decomposition)], cells)


def _score_table(scores: Sequence[Score]) -> Table:
    header = ["theory", "kind", "mean |gap|, points", "that of predicting no shift", "difference"]
    header += ["interventions", "against predicting no shift"]
    cells = [
        [
            _source(score.source),
            label(KINDS, score.kind),
            *(distance.text(".1f", scale=100) for distance in (score.error, score.no_shift)),
            _points(score.difference),
            str(len(score.interventions)),
            VERDICTS[score.decides],
        ]
        for score in scores
    ]
    return Table("How far are a theory's shifts from the measured ones?", header, cells)


def _divergence_table(decomposition: Decomposition) -> Table:
    means = decomposition.divergences
    cells = [
        [item.ingredient, item.name, means[item.name].text()]
        for item in decomposition.counterfactuals
        if item.name in means
    ]
    header = ["ingredient", "replaced by", "KL of the next token, nats"]
    return Table("How far does the change drive the model?", header, cells)


def _shift_statement(item: Counterfactual, measured: Sequence[Shift]) -> str:
    """Measured shifts of one intervention; empty if it has none."""
    shifts = [shift for shift in measured if shift.intervention == item.name]
    parts = [
        f"{label(STATISTICS, shift.mass)} {_points(shift.shift)} points"
        if shift.shift.excludes(0.0)
        else f"{label(STATISTICS, shift.mass)} not decided ({_points(shift.shift)})"
        for shift in shifts
    ]
    if not shifts:
        return ""
    return f"{item.name} ({item.ingredient}), measured {label(KINDS, shifts[0].kind)}: {'; '.join(parts)}."


def _score_statement(score: Score) -> str:
    verdict = {
        -1: "closer than no shift at all",
        0: "not decided whether closer than no shift at all",
        1: "farther than no shift at all",
    }[score.decides]
    return (
        f"{_source(score.source)} ({label(KINDS, score.kind)}): over {len(score.interventions)} changes its shifts "
        f"miss the measured ones by {100 * score.error.value:.1f} points on average, against "
        f"{100 * score.no_shift.value:.1f} of predicting no shift: {verdict}."
    )


def _points(shift: Interval) -> str:
    """A shift of a share in percentage points."""
    return shift.text("+.1f", scale=100)


def _source(name: str) -> str:
    return label(SOURCE_NAMES, name)
