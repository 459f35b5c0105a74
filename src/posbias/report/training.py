"""A training's record as tables and a page: how members ended, losses by step, last losses over the grid.

Everything comes from the record (layout: posbias/training/running.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from posbias.errors import UsageError
from posbias.records import Record
from posbias.report.conditions import conditions_of
from posbias.report.figures import Curve, Figure
from posbias.report.files import page_template, write_page
from posbias.report.interactive import interactive, plotly_source
from posbias.report.palette import RUNS
from posbias.report.static import png
from posbias.report.tables import print_notes, print_tables
from posbias.statistics import Interval, mean_ends, mean_of
from posbias.statistics.intervals import MISSING
from posbias.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATE = "reproduction.html.jinja"
ENDED_WELL = ("done", "stopped_early")

Point = tuple[str, ...]
"""A point of the grid: its value on every axis."""


def write_training_report(record: Record, out: Path) -> Path:
    """Write `report.html` and `losses.png` into `out`, each atomically.

    Raises:
        UsageError: the record is not a finished training.
        RunError: the files cannot be written.
    """
    _check(record)
    figure = loss_figure(record)
    pictures = {} if figure is None else {"losses.png": png(figure)}
    return write_page(render_training(record, figure), out, pictures=pictures)


def render_training(record: Record, figure: Figure | None) -> str:
    """The page as text."""
    header, cells = loss_cells(record)
    return page_template(TEMPLATE).render(
        title=record.resolved["title"],
        kicker="small models, trained at once",
        statements=endings_of(record),
        tables=[{"title": _table_title(record), "header": header, "cells": cells}],
        charts=[] if figure is None else [interactive(figure, anchor="losses")],
        command=record.resolved.get("command", ""),
        conditions=conditions_of(record),
        plotly=plotly_source(),
        version=__version__,
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


def show_training(record: Record, console: "Console") -> None:
    """Print the tables: ruled on a terminal, aligned plain columns into a pipe or a file.

    Raises:
        UsageError: the record is not a finished training.
    """
    _check(record)
    header, cells = loss_cells(record)
    title = _table_title(record)
    print_tables([(title, header, cells)], console)
    print_notes(endings_of(record), console)


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


def _check(record: Record) -> None:
    if record.verb != "train" or "members" not in record.scalars:
        raise UsageError(f"a training's report needs a finished record of verb 'train', got {record.verb!r}")


def _table_title(record: Record) -> str:
    return f"{record.resolved['title']}: mean loss at the end (nats) with its 95 % interval over seeds"


def _points(record: Record) -> dict[Point, list[int]]:
    """Every point of the grid and the indices of its members."""
    points: dict[Point, list[int]] = {}
    for index, member in enumerate(record.scalars["members"]):
        point = tuple(str(member["coordinates"][axis]) for axis in record.resolved["axes"])
        points.setdefault(point, []).append(index)
    return points


def _mean_text(losses: list[float]) -> str:
    return mean_over_seeds(losses).text(".4f") if losses else MISSING
