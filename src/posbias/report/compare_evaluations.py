"""Evaluations side by side in words, tables and a figure: what differs from the first, paired over samples."""

from itertools import chain, cycle

from posbias.display.figures import MEASURED, RUNS, Curve, Figure, interval_curves
from posbias.display.wording import label
from posbias.evaluation.comparison import Compared, EvaluationComparison
from posbias.evaluation.evaluation import MEASURES
from posbias.evaluation.levels import ALPHA, MEAN, SPREAD, WORST, change_text
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table

NOTE = (
    "All evaluations asked the same samples; differences are paired over those answered at every position in all of "
    "them. p-values are corrected (Holm) over all evaluations: of mean, worst position and spread together, and of "
    "the positions together."
)
RISES = {
    MEAN: ("better on average", "worse on average"),
    WORST: ("better at worst", "worse at worst"),
    SPREAD: ("position matters more", "position matters less"),
}
"""A change of each endpoint in words, upwards and downwards."""


@REPORTS.register("compare_evaluations")
def evaluation_comparison_report(comparison: EvaluationComparison) -> Report:
    """Every evaluation less the first: one sentence each, the curves, and the differences by position."""
    withheld = [entry for entry in comparison.compared if entry.withheld]
    return Report(
        comparison.record.title,
        kicker="posbias · evaluations compared",
        verdict=[
            *(f"No conclusion from the generated answers of {each.name}: {each.withheld}." for each in withheld),
            *(_sentence(comparison, entry) for entry in comparison.compared[1:]),
        ],
        picture=[_figure(comparison)],
        summary=[_change_table(comparison)],
        tables=[_position_table(comparison)],
        note=NOTE,
        record=comparison.record,
    )


def axis_of(n_items: int) -> str:
    """Label of the axis of positions."""
    return f"position of the answer among {n_items} (0 is the first)"


def _sentence(comparison: EvaluationComparison, entry: Compared) -> str:
    """What is established of one evaluation less the first."""
    baseline, measure = comparison.compared[0].name, label(MEASURES, comparison.measure)
    if not entry.changes:
        if comparison.n_samples >= comparison.samples_needed:
            return f"{entry.name} and {baseline} are not compared by {measure}."
        return (
            f"{entry.name} and {baseline} are not compared: {comparison.n_samples} samples are complete in all "
            f"evaluations, {comparison.samples_needed} are needed."
        )
    numbers = {name: f"{change_text(change.value, '+')}" for name, change in entry.changes.items()}
    established = {name: change.value.value > 0 for name, change in entry.changes.items() if entry.p[name] < ALPHA}
    if not established:
        ends = f"mean {measure} {numbers[MEAN]}, worst position {numbers[WORST]}"
        return f"No difference between {entry.name} and {baseline} is established: {ends}."
    clauses = [f"{RISES[name][0 if rises else 1]} ({numbers[name]})" for name, rises in established.items()]
    return f"{entry.name} compared with {baseline}, {measure}: {'; '.join(clauses)}."


def _figure(comparison: EvaluationComparison) -> Figure:
    curves: list[Curve] = []
    for entry, stroke in zip(comparison.compared, chain([MEASURED], cycle(RUNS)), strict=False):
        curves += interval_curves(entry.name, comparison.positions, entry.means, stroke)
    measure = label(MEASURES, comparison.measure)
    title = f"{comparison.task}: {measure} by position"
    return Figure("evaluations", title, axis_of(comparison.n_items), measure, tuple(curves), markers=True)


def _change_table(comparison: EvaluationComparison) -> Table:
    baseline = comparison.compared[0].name
    cells = [
        [entry.name, name, change_text(change.value, "+"), f"{entry.p[name]:.2g}"]
        for entry in comparison.compared[1:]
        for name, change in entry.changes.items()
    ]
    return Table(f"Less {baseline}, {comparison.n_samples} samples", ["run", "of", "difference", "p"], cells)


def _position_table(comparison: EvaluationComparison) -> Table:
    baseline = comparison.compared[0]
    cells = [
        [
            entry.name,
            str(place),
            baseline.means[column].text(),
            entry.means[column].text(),
            change_text(entry.differences[column].value, "+"),
            f"{entry.difference_p[column]:.2g}",
        ]
        for entry in comparison.compared[1:]
        for column, place in enumerate(comparison.positions)
        if entry.differences
    ]
    return Table("By position", ["run", "position", baseline.name, "its mean", "difference", "p"], cells)
