"""A decomposition in words, tables and figures.

Shifts are in percentage points of the influence; the verdict claims one only if its interval over at least 6 prompts
leaves zero out.
"""

from posbias.comparison.distances import UNITS_FOR_CLAIM
from posbias.decomposition.decomposition import Decomposition, masses
from posbias.results.figures import MEASURED, Curve, Figure
from posbias.results.naming import KINDS, STATISTICS, label
from posbias.results.page import Report
from posbias.results.tables import Table
from posbias.statistics import mean_of

CAVEAT = (
    "A changed model computes off its training distribution: a shift says what the trained weights do without the "
    "ingredient, not what a model trained without it would do."
)
NOTE = (
    "Masses: the shares of influence on the first tenth of the context, on the tenth around its centre and on the last "
    "tenth. A shift is a prompt's mass with the ingredient replaced less its mass without, averaged; brackets and "
    "whiskers are 95 % intervals over prompts, the same prompts on both sides. What is missing has its reason below."
)


def decomposition_report(decomposition: Decomposition) -> Report:
    """Shifts of every kind, and how far each change drives the model."""
    tables = tables_of(decomposition)
    figures = []
    for kind in dict.fromkeys(each.kind for each in decomposition.shifts):
        shifts = [each for each in decomposition.shifts if each.kind == kind]
        moved = Curve.of_intervals("measured", range(1, len(shifts) + 1), [each.shift for each in shifts], MEASURED)
        title = f"What replacing each ingredient does to the masses of the profile ({label(KINDS, kind)})"
        rows = tuple(f"{each.intervention}: {label(STATISTICS, each.mass)}" for each in shifts)
        figures.append(Figure(f"shifts-{kind}", title, "", "percentage points", (moved.scaled(100),), rows=rows))
    refused = [(item.name, item.reason) for item in decomposition.counterfactuals if item.reason is not None]
    return Report(
        f"What makes the profile of {decomposition.record.title}",
        kicker="posbias · ingredients of a profile, replaced one at a time",
        verdict=_verdict(decomposition),
        picture=figures[:1],
        summary=tables[:2],
        caveats=[CAVEAT],
        figures=figures[1:],
        note=NOTE,
        tables=tables[2:],
        left_out=[f"{name}: not possible, {reason.removeprefix(f'{name}: ')}" for name, reason in refused],
    )


def _verdict(decomposition: Decomposition) -> list[str]:
    """The ingredient whose replacement moves the first kind most, and all whose shift is decided."""
    if decomposition.count < UNITS_FOR_CLAIM:
        prompts = f"{decomposition.count} prompt{'s' if decomposition.count > 1 else ''}"
        return [f"{prompts}: with fewer than {UNITS_FOR_CLAIM} nothing is decided."]
    first = [shift for shift in decomposition.shifts if shift.kind == decomposition.kinds[0]]
    decided = [shift for shift in first if shift.shift.excludes(0.0)]
    if not decided:
        return ["No replacement is shown to move the profile."]
    most = max(decided, key=lambda shift: abs(shift.shift.value))
    names = ", ".join(dict.fromkeys(shift.intervention for shift in decided))
    return [
        f"{most.intervention} moves the profile most: the {label(STATISTICS, most.mass)} changes by "
        f"{most.shift.text('+.1f', scale=100)} percentage points.",
        f"These replacements are shown to move it: {names}.",
    ]


def tables_of(decomposition: Decomposition) -> list[Table]:
    """Masses as they are, shifts of every kind, and how far each change drives the model."""
    before = []
    for kind, profiles in decomposition.baseline.items():
        shares = {mass: mean_of(values).interval(least=0.0, most=1.0) for mass, values in masses(profiles).items()}
        told = {label(STATISTICS, mass): share.text(".1f", scale=100, unit=" %") for mass, share in shares.items()}
        before.append({"kind": label(KINDS, kind), **told})
    tables = [Table.of("Masses with nothing replaced (a flat line: 10 % each)", before)]
    named = {
        item.name: {"ingredient": item.ingredient, "replaced by": item.name} for item in decomposition.counterfactuals
    }
    for kind in decomposition.kinds:
        rows: dict[str, dict[str, str]] = {}
        for shift in decomposition.shifts:
            if shift.kind == kind:
                row = rows.setdefault(shift.intervention, {**named[shift.intervention]})
                row[label(STATISTICS, shift.mass)] = shift.shift.text("+.1f", scale=100)
        tables.append(Table.of(f"Shift of the mass in percentage points ({label(KINDS, kind)})", rows.values()))
    driven = [
        {**named[name], "KL of the next token, nats": mean.text()} for name, mean in decomposition.divergences.items()
    ]
    tables.append(Table.of("How far does the change drive the model?", driven))
    return [table for table in tables if table.cells]
