"""Evaluations side by side in words, tables and a figure: what differs from the first, paired over samples."""

from collections.abc import Sequence
from dataclasses import replace

from posbias.display.figures import MEASURED, Curve, Figure, interval_curves, run_strokes
from posbias.display.wording import label
from posbias.errors import UsageError
from posbias.evaluation.comparison import Compared, EvaluationComparison, compare_evaluations
from posbias.evaluation.evaluation import MEASURES, Evaluation
from posbias.evaluation.levels import ALPHA, MEAN, SPREAD, WORST, change_text
from posbias.report.page import REPORTS, Report, Section
from posbias.report.tables import Table

NOTE = (
    "All evaluations asked the same samples; differences are paired over those answered at every position in all of "
    "them. p-values are corrected (Holm) over all evaluations: of mean, worst position and spread together, and of "
    "the positions together; of judges' rates together."
)
RATE_WORDS = {
    "accuracy": "right verdicts",
    "flip_rate": "preferred response changes with the order",
    "first_pick": "first response picked",
}
RISES = {
    MEAN: ("better on average", "worse on average"),
    WORST: ("better at worst", "worse at worst"),
    SPREAD: ("position matters more", "position matters less"),
}
"""A change of each endpoint in words, upwards and downwards."""


@REPORTS.register("compare_evaluations")
def evaluation_comparison_report(comparison: EvaluationComparison) -> Report:
    """Every evaluation less the first: one sentence each, the curves, and the differences by position."""
    return Report(
        comparison.record.title,
        kicker="posbias · evaluations compared",
        verdict=[
            *_withheld(comparison),
            *(text for entry in comparison.compared[1:] for text in (_sentence(comparison, entry), *_flips(entry))),
        ],
        picture=[_figure(comparison)],
        summary=[_change_table(comparison), *_rate_tables(comparison)],
        tables=[_position_table(comparison)],
        note=NOTE,
        record=comparison.record,
    )


def side_by_side(evaluations: Sequence[Evaluation], reports: Sequence[Report]) -> Report:
    """Finished evaluations on one page: paired if they asked the same samples, then each by itself."""
    sections = [
        Section(
            report.title,
            anchor=f"run-{number}",
            texts=report.verdict,
            statements=report.statements,
            caveats=[*report.notices, *report.caveats],
            figures=[*report.picture, *report.figures],
            tables=[*report.summary, *report.tables],
            left_out=report.left_out,
            record=report.record,
        )
        for number, report in enumerate(reports, start=1)
    ]
    try:
        paired = evaluation_comparison_report(compare_evaluations(evaluations))
    except UsageError as reason:
        return Report(
            " beside ".join(report.title for report in reports),
            kicker="posbias · evaluations side by side",
            notices=[f"Not paired: {reason}."],
            verdict=[f"{report.title}: {report.verdict[0]}" for report in reports],
            picture=[report.picture[0] for report in reports[:2] if report.picture],
            sections=sections,
        )
    return replace(paired, sections=sections, record=None)


def axis_of(n_items: int) -> str:
    """Label of the axis of positions."""
    return f"position of the answer among {n_items} (0 is the first)"


def _withheld(comparison: EvaluationComparison) -> list[str]:
    """Why nothing is concluded from the generated answers of an evaluation, for each of which that is so."""
    return [
        f"No conclusion from the generated answers of {entry.name}: {entry.withheld}."
        for entry in comparison.compared
        if entry.withheld
    ]


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


def _flips(entry: Compared) -> list[str]:
    """What is established of a judge's dependence on the slot, beside the first."""
    words = {"flip_rate": "verdicts that change with the order", "first_pick": "picks of the first response"}
    told = {name: text for name, text in words.items() if entry.rate_p.get(name, 1.0) < ALPHA}
    clauses = [f"{text} {change_text(entry.rates[name].value, '+')}" for name, text in told.items()]
    return [f"{entry.name} by slot: {'; '.join(clauses)}."] if clauses else []


def _figure(comparison: EvaluationComparison) -> Figure:
    strokes = {comparison.compared[0].name: MEASURED, **run_strokes([entry.name for entry in comparison.compared[1:]])}
    curves: list[Curve] = []
    for entry in comparison.compared:
        if entry.means:
            curves += interval_curves(entry.name, comparison.positions, entry.means, strokes[entry.name])
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


def _rate_tables(comparison: EvaluationComparison) -> list[Table]:
    """Rates of judges less those of the first; none for other tasks."""
    cells = [
        [entry.name, RATE_WORDS[name], change_text(contrast.value, "+"), f"{entry.rate_p[name]:.2g}"]
        for entry in comparison.compared
        for name, contrast in entry.rates.items()
    ]
    title = f"Judges less {comparison.compared[0].name}, over questions"
    return [Table(title, ["run", "of", "difference", "p"], cells)] if cells else []


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
