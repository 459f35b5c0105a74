"""A training's record in tables and a figure: how members ended, losses by step, last losses over the grid.

Everything comes from the record (layout: posbias/training/running.py).
"""

import numpy as np
from jaxtyping import Float

from posbias.display.figures import RUNS, Curve, Figure
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.runs.records import Record
from posbias.statistics import MISSING, mean_ends, mean_of

ENDED_WELL = ("done", "stopped_early")

Point = tuple[str, ...]
"""A point of the grid: its value on every axis."""


@REPORTS.register("train")
def training_report(record: Record) -> Report:
    """How members ended, their losses by step, and their last losses over the grid."""
    figure, endings = loss_figure(record), endings_of(record)
    return Report(
        record.resolved["title"],
        kicker="posbias · small models, trained at once",
        verdict=[endings[0], *_extremes(record)],
        picture=() if figure is None else (figure,),
        summary=[_loss_table(record)],
        statements=endings[1:],
        record=record,
    )


def loss_figure(record: Record) -> Figure | None:
    """Mean loss over the seeds of each point, by step, with its interval; None where no member has a loss."""
    losses, window = record.arrays["losses"], record.resolved["options"]["window"]
    points = {
        point: rows
        for point, indices in _points(record).items()
        if len(rows := _kept_to_the_end(losses[[index for index in indices if np.isfinite(losses[index, 0])]]))
    }
    if not points:
        return None
    axes = [axis.rpartition(".")[2] for axis in record.resolved["axes"]]
    curves = []
    for (point, rows), stroke in zip(points.items(), RUNS, strict=False):
        name = ", ".join(f"{axis}={value}" for axis, value in zip(axes, point, strict=True)) or "all seeds"
        steps = window * np.arange(1.0, rows.shape[1] + 1)
        curves.append(Curve(name, steps, rows.mean(0), stroke, *mean_ends(rows, least=0.0)))
    cut = len(points) > len(curves)
    shown = f" (the first {len(curves)} of {len(points)} points of the grid)" if cut else ""
    title = f"Training loss, mean over seeds; a member that has ended keeps its last loss{shown}"
    return Figure("losses", title, "step", "loss (nats)", tuple(curves))


def _kept_to_the_end(losses: Float[np.ndarray, "seed entry"]) -> Float[np.ndarray, "seed entry"]:
    """Loss curves whose missing ends repeat the last loss there is."""
    last = np.maximum.accumulate(np.where(np.isfinite(losses), np.arange(losses.shape[1]), 0), axis=1)
    return np.asarray(np.take_along_axis(losses, last, axis=1), dtype=np.float64)


def _extremes(record: Record) -> list[str]:
    """The points of the grid with the least and the largest loss at the end; empty where there is one point alone."""
    rows = [row for row in _loss_table(record).cells if row[-1] != MISSING]
    if len(rows) < 2:
        return []
    least, most = (end(rows, key=lambda row: float(row[-1].split()[0])) for end in (min, max))
    named = [f"{row[-1]} nats with {', '.join(row[:-2])}" for row in (least, most)]
    return [f"Loss at the end: from {named[0]} to {named[1]}."]


def _loss_table(record: Record) -> Table:
    """One row per point of the grid: its coordinates, seeds, and the last loss over the seeds that ended well."""
    cells = []
    for point, indices in _points(record).items():
        members = [record.scalars["members"][index] for index in indices]
        losses = np.array([member["loss"] for member in members if member["status"] in ENDED_WELL], np.float64)
        mean = mean_of(losses).interval(least=0.0).text(".4f") if losses.size else MISSING
        cells.append([*point, f"{losses.size} of {len(members)}", mean])
    header = [*(axis.removeprefix("model.") for axis in record.resolved["axes"]), "seeds", "loss"]
    title = f"{record.resolved['title']}: mean loss at the end (nats) with its 95 % interval over seeds"
    return Table(title, header, cells)


def endings_of(record: Record) -> list[str]:
    """How many members ended in which way, and why the ones that failed did."""
    members, stacks = record.scalars["members"], record.resolved["stacks"]
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in record.scalars["counts"].items())
    failed = [
        f"{member['name']}: {member['status']} after {member['steps']} steps ({member['reason']})"
        for member in members
        if member["status"] in ("diverged", "failed")
    ]
    return [f"{len(members)} members in {stacks} stack{'' if stacks == 1 else 's'}: {counts}.", *failed]


def _points(record: Record) -> dict[Point, list[int]]:
    """Every point of the grid and the indices of its members."""
    points: dict[Point, list[int]] = {}
    for index, member in enumerate(record.scalars["members"]):
        point = tuple(str(member["coordinates"][axis]) for axis in record.resolved["axes"])
        points.setdefault(point, []).append(index)
    return points
