"""A decomposition in words, tables and figures.

Shifts are in percentage points of the influence; the verdict claims one only if its interval over at least 6 prompts
leaves zero out.
"""

from collections.abc import Sequence

from posbias.comparison.distances import UNITS_FOR_CLAIM
from posbias.comparison.tables import VERDICTS
from posbias.decomposition.decomposition import MEASURED, Decomposition, Score, Shift
from posbias.results.figures import MEASURED as BLACK
from posbias.results.figures import Curve, Figure, interval_curves, theory_strokes
from posbias.results.naming import KINDS, STATISTICS, label
from posbias.results.page import Report
from posbias.results.tables import Table
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
    "power_rollout_rerun": "power rollout of the changed model",
}


def decomposition_report(decomposition: Decomposition) -> Report:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    tables = tables_of(decomposition)
    figures = [_shift_figure(decomposition, kind, shifts) for kind, shifts in _shifts_by_kind(decomposition).items()]
    return Report(
        f"What makes the profile of {decomposition.title}",
        kicker="posbias · ingredients of a profile, replaced one at a time",
        verdict=_verdict(decomposition),
        picture=figures[:1],
        summary=tables[:2],
        caveats=[CAVEAT],
        figures=figures[1:],
        note=NOTE,
        tables=tables[2:],
        left_out=reasons_of(decomposition),
        record=decomposition.record,
    )


def _verdict(decomposition: Decomposition) -> list[str]:
    """The ingredient whose replacement moves the first measured kind most, and all whose shift is decided."""
    if decomposition.count < UNITS_FOR_CLAIM:
        prompts = f"{decomposition.count} prompt{'s' if decomposition.count > 1 else ''}"
        return [f"{prompts}: with fewer than {UNITS_FOR_CLAIM} nothing is decided."]
    measured = (MEASURED, decomposition.kinds[0])
    shifts = [shift for shift in decomposition.shifts if (shift.source, shift.kind) == measured]
    decided = [shift for shift in shifts if shift.shift.excludes(0.0)]
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
    kinds = {kind: [shift for shift in decomposition.shifts if shift.kind == kind] for kind in decomposition.kinds}
    return {kind: shifts for kind, shifts in kinds.items() if shifts}


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
        moved = [intervals[rows[place - 1]] for place in places]
        curves += interval_curves(_source(source), places, moved, strokes[source], unit=0.01)
    title = f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})"
    named = tuple(f"{name}: {label(STATISTICS, mass)}" for name, mass in rows)
    return Figure(f"shifts-{kind}", title, "", "percentage points", tuple(curves), rows=named)


def _mass_names(decomposition: Decomposition) -> list[str]:
    return list(dict.fromkeys(label(STATISTICS, shift.mass) for shift in decomposition.shifts))


def _baseline_table(decomposition: Decomposition) -> Table:
    """One row per source and kind, from the first intervention that knows it."""
    before: dict[tuple[str, str], dict[str, str]] = {}
    for shift in decomposition.shifts:
        masses = before.setdefault((shift.source, shift.kind), {})
        masses.setdefault(shift.mass, shift.before.text(".1f", scale=100, unit=" %"))
    cells = [[_source(source), label(KINDS, kind), *masses.values()] for (source, kind), masses in before.items()]
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
    means, items = decomposition.divergences, decomposition.counterfactuals
    cells = [[item.ingredient, item.name, means[item.name].text()] for item in items if item.name in means]
    header = ["ingredient", "replaced by", "KL of the next token, nats"]
    return Table("How far does the change drive the model?", header, cells)


def _points(shift: Interval) -> str:
    """A shift of a share in percentage points."""
    return shift.text("+.1f", scale=100)


def _source(name: str) -> str:
    return label(SOURCE_NAMES, name)
