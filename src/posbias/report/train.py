"""A training in tables and a figure: how members ended, losses by step, last losses over the grid."""

from collections.abc import Sequence

import numpy as np

from posbias.display.figures import RUNS, Curve, Figure
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.statistics import MISSING, mean_ends, mean_of
from posbias.training import ENDED_WELL, StudyRun, TrainedMember

Point = tuple[str, ...]
"""A point of the grid: its value on every axis."""


@REPORTS.register("train")
def training_report(run: StudyRun) -> Report:
    """How members ended, their losses by step, and their last losses over the grid."""
    trained = run.trained
    points: dict[Point, list[TrainedMember]] = {}
    for outcome in trained.members:
        point = tuple(str(outcome.member.coordinates[axis]) for axis in run.axes)
        points.setdefault(point, []).append(outcome)
    figure, endings = _loss_figure(run), _endings(run)
    header = [*(axis.removeprefix("model.") for axis in run.axes), "seeds", "loss"]
    title = f"{run.title}: mean loss at the end (nats) with its 95 % interval over seeds"
    rows = [[*point, *_last_losses(members)] for point, members in points.items()]
    return Report(
        run.title,
        kicker="posbias · small models, trained at once",
        verdict=[endings[0], *_extremes(rows)],
        picture=() if figure is None else (figure,),
        summary=[Table(title, header, rows)],
        statements=endings[1:],
        record=run.record,
    )


def _loss_figure(run: StudyRun) -> Figure | None:
    """Mean loss over the seeds of each point, by step, with its interval; None if no member ended well."""
    drawn = run.loss_curves()
    if not drawn:
        return None
    curves = [
        Curve(name, run.steps, rows.mean(0), stroke, *mean_ends(rows, least=0.0))
        for (name, rows), stroke in zip(drawn.items(), RUNS, strict=False)
    ]
    cut = len(drawn) > len(curves)
    shown = f" (the first {len(curves)} of {len(drawn)} points of the grid)" if cut else ""
    title = f"Training loss, mean over seeds; a member that has ended keeps its last loss{shown}"
    return Figure("losses", title, "step", "loss (nats)", tuple(curves))


def _extremes(rows: Sequence[Sequence[str]]) -> list[str]:
    """The points of the grid with the least and the largest loss at the end; empty if there is one point alone."""
    ended = [row for row in rows if row[-1] != MISSING]
    if len(ended) < 2:
        return []
    least, most = (end(ended, key=lambda row: float(row[-1].split()[0])) for end in (min, max))
    named = [f"{row[-1]} nats with {', '.join(row[:-2])}" for row in (least, most)]
    return [f"Loss at the end: from {named[0]} to {named[1]}."]


def _last_losses(members: Sequence[TrainedMember]) -> list[str]:
    """Number of seeds of a point that ended well, and the mean of their last losses."""
    losses = np.array([member.losses[-1] for member in members if member.status in ENDED_WELL], np.float64)
    mean = mean_of(losses).interval(least=0.0).text(".4f") if losses.size else MISSING
    return [f"{losses.size} of {len(members)}", mean]


def _endings(run: StudyRun) -> list[str]:
    """Numbers of members by how they ended, and why the ones that failed did."""
    trained, facts = run.trained, run.shown().facts
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in trained.counts().items())
    stacks = f"{trained.n_stacks} stack{'' if trained.n_stacks == 1 else 's'}"
    failed = [f"{name}: {ended}" for name, ended in facts.items()]
    return [f"{len(trained.members)} members in {stacks}: {counts}.", *failed]
