"""A training's record in tables and a figure: how members ended, losses by step, last losses over the grid.

Everything comes from the record (layout: posbias/training/running.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from posbias.records import Record
from posbias.report.figures import Curve, Figure
from posbias.report.page import REPORTS, Report
from posbias.report.palette import RUNS
from posbias.report.tables import Table
from posbias.statistics import Interval, mean_ends, mean_of
from posbias.statistics.intervals import MISSING

ENDED_WELL = ("done", "stopped_early")

Point = tuple[str, ...]
"""A point of the grid: its value on every axis."""


@REPORTS.register("train")
def training_report(record: Record) -> Report:
    """How members ended, their losses by step, and their last losses over the grid."""
    figure = loss_figure(record)
    title = f"{record.resolved['title']}: mean loss at the end (nats) with its 95 % interval over seeds"
    return Report(
        kicker="posbias · small models, trained at once",
        title=record.resolved["title"],
        statements=endings_of(record),
        figures=() if figure is None else (figure,),
        tables=[Table(title, *loss_cells(record))],
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
    drawn = list(points)[: len(RUNS)]
    axes = [axis.rpartition(".")[2] for axis in record.resolved["axes"]]
    curves = [_loss_curve(number, _spelled(axes, point), points[point], window) for number, point in enumerate(drawn)]
    shown = "" if len(drawn) == len(points) else f" (the first {len(drawn)} of {len(points)} points of the grid)"
    return Figure(
        slug="losses",
        title=f"Training loss, mean over seeds; a member that has ended keeps its last loss{shown}",
        x_label="step",
        y_label="loss (nats)",
        curves=tuple(curves),
    )


def _kept_to_the_end(losses: Float[np.ndarray, "seed entry"]) -> Float[np.ndarray, "seed entry"]:
    """Loss curves whose missing ends repeat the last loss there is."""
    last = np.maximum.accumulate(np.where(np.isfinite(losses), np.arange(losses.shape[1]), 0), axis=1)
    return np.asarray(np.take_along_axis(losses, last, axis=1), dtype=np.float64)


def _loss_curve(number: int, name: str, losses: Float[np.ndarray, "seed entry"], window: int) -> Curve:
    low, high = mean_ends(losses, least=0.0)
    return Curve(
        name=name,
        x=window * np.arange(1.0, losses.shape[1] + 1),
        y=losses.mean(0),
        stroke=RUNS[number],
        low=low,
        high=high,
    )


def loss_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    """One row per point of the grid: its coordinates, seeds, and the last loss over the seeds that ended well."""
    axes = list(record.resolved["axes"])
    cells = []
    for point, indices in _points(record).items():
        members: list[Mapping[str, Any]] = [record.scalars["members"][index] for index in indices]
        losses = [member["loss"] for member in members if member["status"] in ENDED_WELL]
        cells.append([*point, f"{len(losses)} of {len(members)}", _mean_text(losses)])
    return [*(axis.removeprefix("model.") for axis in axes), "seeds", "loss"], cells


def endings_of(record: Record) -> list[str]:
    """How many members ended in which way, and why the ones that failed did."""
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in record.scalars["counts"].items())
    lines = [f"{len(record.scalars['members'])} members in {_counted(record.resolved['stacks'], 'stack')}: {counts}."]
    return lines + [
        f"{member['name']}: {member['status']} after {member['steps']} steps ({member['reason']})"
        for member in record.scalars["members"]
        if member["status"] in ("diverged", "failed")
    ]


def mean_over_seeds(losses: list[float]) -> Interval:
    """The mean with its 95 % interval; infinite from a single seed."""
    return mean_of(np.asarray(losses, dtype=np.float64)).interval(least=0.0)


def _spelled(axes: list[str], point: Point) -> str:
    """A point's place on every axis, for a legend."""
    return ", ".join(f"{axis}={value}" for axis, value in zip(axes, point, strict=True)) or "all seeds"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _points(record: Record) -> dict[Point, list[int]]:
    """Every point of the grid and the indices of its members."""
    points: dict[Point, list[int]] = {}
    for index, member in enumerate(record.scalars["members"]):
        point = tuple(str(member["coordinates"][axis]) for axis in record.resolved["axes"])
        points.setdefault(point, []).append(index)
    return points


def _mean_text(losses: list[float]) -> str:
    return mean_over_seeds(losses).text(".4f") if losses else MISSING
