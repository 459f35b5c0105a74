"""An evaluation at several lengths, in words, tables and figures: accuracy by length and depth, effective length."""

import numpy as np

from posbias.display.figures import Curve, Figure, HeatMap, interval_curves, ramp
from posbias.evaluation.lengths import EffectiveLength, LengthEvaluation
from posbias.report.evaluate import notices_of
from posbias.report.layout import caveats_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.statistics import CONFIDENCE, MISSING

NOTE = (
    "One sample is requested once per depth; only the item that holds the answer moves. Each cell has a 95 % interval "
    "over samples. The effective length rests on the low ends, and claims too much in at most 5 % of runs; that a "
    "length fails rests on high ends that hold for all cells at once, which are a little wider than a cell's own."
)


@REPORTS.register("evaluate_lengths")
def length_report(evaluation: LengthEvaluation) -> Report:
    """A heat map of accuracy, a curve for every length, and the effective length with what decides it."""
    record, runs = evaluation.record, evaluation.at.values()
    cut, of = (sum(getattr(run, name) for run in runs) for name in ("cut_off", "examples"))
    cut_off = [f"{cut} of {of} generated answers were cut off, not ended by themselves."] if cut else []
    return Report(
        record.title,
        kicker="posbias · behaviour by length and depth",
        notices=list(dict.fromkeys(notice for run in runs for notice in notices_of(run))),
        verdict=length_verdict(evaluation),
        picture=[_heat_map(evaluation)],
        figures=[_curves(evaluation)],
        summary=[_cell_table(evaluation)],
        tables=[_level_table(evaluation)],
        caveats=[*cut_off, *caveats_of(record)],
        note=NOTE,
        left_out=_left_out(evaluation),
        record=record,
    )


def length_verdict(evaluation: LengthEvaluation) -> list[str]:
    """The effective length as a bound, and what keeps it from being longer."""
    effective = evaluation.effective_length
    wanted = f"{effective.threshold:g} accuracy at every depth"
    first = (
        f"Effective length: at least {effective.at_least} tokens with {wanted} ({CONFIDENCE:.0%} confidence)."
        if effective.at_least
        else f"No length is shown to reach {wanted}."
    )
    return [first, *_beyond(evaluation, effective)]


def _left_out(evaluation: LengthEvaluation) -> list[str]:
    """Samples that were not counted at each length, with the reason."""
    return [f"too long at {length} tokens: {samples} samples" for length, samples in evaluation.too_long.items()]


def _beyond(evaluation: LengthEvaluation, effective: EffectiveLength) -> list[str]:
    """The first length that is not reached: whether it is too long, or what would decide it."""
    length = effective.below or effective.undecided
    if length is None:
        limit = [length for length in evaluation.not_evaluated if length in evaluation.too_long]
        why = f"{limit[0]} tokens are too long for the model" if limit else "No longer length was evaluated"
        return [f"{why}; all of {', '.join(map(str, evaluation.lengths))} reach it."]
    level = next(level for level in evaluation.levels if level.length == length)
    numbers = f"{level.worst} at depth {level.worst_depth:.2g}, the worst"
    if level.withheld:
        return [f"{length} tokens are not decided: {level.withheld}."]
    if effective.below is not None:
        return [f"At {length} tokens accuracy is lower: {numbers}."]
    more = "more samples than are practical"
    if effective.samples_needed is not None:
        more = f"about {effective.samples_needed} samples (`--count`)"
    return [f"{length} tokens are not decided: accuracy {numbers}; {more} would decide."]


def _heat_map(evaluation: LengthEvaluation) -> HeatMap:
    cells = evaluation.cells
    return HeatMap(
        "accuracy-by-length",
        f"{evaluation.record.resolved['title']}: accuracy by length and depth",
        "depth of the answer (0 begin, 1 end)",
        "tokens",
        "accuracy",
        {"": evaluation.accuracy()},
        (evaluation.depths[0], evaluation.depths[-1]),
        (1, len(cells)),
        rows=tuple(map(str, cells)),
        ends=(0.0, 1.0),
    )


def _curves(evaluation: LengthEvaluation) -> Figure:
    curves: list[Curve] = []
    for (length, cells), stroke in zip(evaluation.cells.items(), ramp(len(evaluation.lengths)), strict=True):
        curves += interval_curves(f"{length} tokens", evaluation.depths, cells, stroke)
    title = f"{evaluation.record.resolved['title']}: accuracy by depth, a line for every length"
    return Figure(
        "accuracy-by-depth", title, "depth of the answer (0 begin, 1 end)", "accuracy", tuple(curves), markers=True
    )


def _cell_table(evaluation: LengthEvaluation) -> Table:
    effective = evaluation.effective_length
    words = {True: "yes", False: "no", None: "not decided"}
    reached = {level.length: words[level.reaches(effective.threshold)] for level in evaluation.levels}
    header = [
        "tokens",
        f"{effective.threshold:g} at every depth",
        *(f"depth {depth:.2g}" for depth in evaluation.depths),
    ]
    cells = [[str(length), reached[length], *(cell.text() for cell in row)] for length, row in evaluation.cells.items()]
    return Table(f"{evaluation.task}: accuracy by length and depth of the answer", header, cells)


def _level_table(evaluation: LengthEvaluation) -> Table:
    header = ["tokens", "mean tokens of a prompt", "samples", "mean accuracy", "worst depth", "accuracy there", "task"]
    cells = [
        [
            str(level.length),
            MISSING if np.isnan(level.prompt_tokens) else f"{level.prompt_tokens:.0f}",
            str(level.n_complete),
            level.mean.text(),
            f"{level.worst_depth:.2g}",
            level.worst.text(),
            level.task,
        ]
        for level in evaluation.levels
    ]
    return Table("Every length", header, cells)
