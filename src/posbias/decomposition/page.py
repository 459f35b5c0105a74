"""A decomposition in words, tables and figures.

Shifts are in percentage points of the influence; the verdict claims one only if its interval over at least 6 prompts
leaves zero out.
"""

from collections.abc import Iterable, Sequence

from posbias.comparison.distances import UNITS_FOR_CLAIM
from posbias.comparison.tables import VERDICTS
from posbias.decomposition.decomposition import MEASURED, Decomposition, Shift
from posbias.results.figures import MEASURED as BLACK
from posbias.results.figures import Curve, Figure, theory_strokes
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
SOURCES = {
    "measured": "measured",
    "rollout_content": "architecture: residual rollout with content",
    "power_rollout_rerun": "power rollout of the changed model",
}


def decomposition_report(decomposition: Decomposition) -> Report:
    """Shifts and gaps of every kind, the theories' scores, and how far each change drives the model."""
    tables = tables_of(decomposition)
    figures = [_shift_figure(kind, of_kind) for kind, of_kind in _by_kind(decomposition)]
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
    ingredients = {item.name: item.ingredient for item in decomposition.counterfactuals}

    def by_mass(title: str, kind: str, numbers: Iterable[tuple[Shift, Interval | None]]) -> Table:
        """One row per intervention and source, one column per mass."""
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for shift, number in numbers:
            if shift.kind == kind and number is not None:
                name, source = shift.intervention, label(SOURCES, shift.source)
                named = {"ingredient": ingredients[name], "replaced by": name, "source": source}
                rows.setdefault((name, source), named)[label(STATISTICS, shift.mass)] = _points(number)
        return Table.of(f"{title} ({label(KINDS, kind)})", rows.values())

    before: dict[tuple[str, str], dict[str, str]] = {}  # from the first intervention that knows a source and kind
    for shift in decomposition.shifts:
        named = {"source": label(SOURCES, shift.source), "kind": label(KINDS, shift.kind)}
        masses = before.setdefault((shift.source, shift.kind), named)
        masses.setdefault(label(STATISTICS, shift.mass), shift.before.text(".1f", scale=100, unit=" %"))
    tables = [Table.of("Masses with nothing replaced (a flat line: 10 % each)", before.values())]
    for kind in decomposition.kinds:
        moved, missed = ([(shift, getattr(shift, of)) for shift in decomposition.shifts] for of in ("shift", "gap"))
        tables.append(by_mass("Shift of the mass in percentage points", kind, moved))
        tables.append(by_mass("Theory's shift less the measured one, in points", kind, missed))
    scores = [
        {
            "theory": label(SOURCES, score.source),
            "kind": label(KINDS, score.kind),
            "mean |gap|, points": score.error.text(".1f", scale=100),
            "that of predicting no shift": score.no_shift.text(".1f", scale=100),
            "difference": _points(score.difference),
            "interventions": str(len(score.interventions)),
            "against predicting no shift": VERDICTS[score.decides],
        }
        for score in decomposition.scores
    ]
    driven = [
        {"ingredient": ingredients[name], "replaced by": name, "KL of the next token, nats": mean.text()}
        for name, mean in decomposition.divergences.items()
    ]
    tables.append(Table.of("How far are a theory's shifts from the measured ones?", scores))
    tables.append(Table.of("How far does the change drive the model?", driven))
    return [table for table in tables if table.cells]


def reasons_of(decomposition: Decomposition) -> list[str]:
    """Sources and changes that were not possible, and why."""
    reasons = [f"{label(SOURCES, source)}: {reason}" for source, reason in decomposition.left_out.items()]
    for item in decomposition.counterfactuals:
        for source, reason in item.reasons.items():
            why = reason.removeprefix(f"{item.name}: ")
            reasons.append(f"{item.name}, {label(SOURCES, source)}: not possible, {why}")
    return reasons


def _by_kind(decomposition: Decomposition) -> list[tuple[str, list[Shift]]]:
    """Shifts of every kind of influence that has any."""
    kinds = [(kind, [shift for shift in decomposition.shifts if shift.kind == kind]) for kind in decomposition.kinds]
    return [(kind, shifts) for kind, shifts in kinds if shifts]


def _shift_figure(kind: str, shifts: Sequence[Shift]) -> Figure:
    """One row per ingredient and mass, one sort of point per source; the measurement is black."""
    masses = list(dict.fromkeys(shift.mass for shift in shifts))
    rows = [(name, mass) for name in dict.fromkeys(shift.intervention for shift in shifts) for mass in masses]
    sources = list(dict.fromkeys(shift.source for shift in shifts))
    strokes = {**theory_strokes([name for name in sources if name != MEASURED]), MEASURED: BLACK}
    curves = []
    for source in sources:
        of_source = [shift for shift in shifts if shift.source == source]
        places = [rows.index((shift.intervention, shift.mass)) + 1 for shift in of_source]
        moved = [shift.shift for shift in of_source]
        curves.append(Curve.of_intervals(label(SOURCES, source), places, moved, strokes[source]).scaled(100))
    title = f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})"
    named = tuple(f"{name}: {label(STATISTICS, mass)}" for name, mass in rows)
    return Figure(f"shifts-{kind}", title, "", "percentage points", tuple(curves), rows=named)


def _points(shift: Interval) -> str:
    """A shift of a share in percentage points."""
    return shift.text("+.1f", scale=100)
