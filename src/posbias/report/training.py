"""A training's record as tables: how members ended, and the last loss of every point of the grid over its seeds.

Everything comes from the record (layout: posbias/training/running.py).
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from posbias.errors import UsageError
from posbias.intervals import Interval, bootstrap_mean
from posbias.records import Record
from posbias.report.tables import MISSING, plain_columns, ruled

if TYPE_CHECKING:
    from rich.console import Console

BOOTSTRAP_SEED = 0


def show_training(record: Record, console: "Console") -> None:
    """Print the tables: ruled on a terminal, aligned plain columns into a pipe or a file.

    Raises:
        UsageError: the record is not a finished training.
    """
    if record.verb != "train" or "members" not in record.scalars:
        raise UsageError(f"a training's table needs a finished record of verb 'train', got {record.verb!r}")
    header, cells = loss_cells(record)
    title = f"{record.resolved['title']}: mean loss at the end (nats) with its 95 % interval over seeds"
    if console.is_terminal:
        console.print(ruled(title, header, cells))
    else:
        console.file.write(f"{title}\n{plain_columns(header, cells)}\n\n")
    for line in endings_of(record):
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)


def loss_cells(record: Record) -> tuple[list[str], list[list[str]]]:
    """One row per point of the grid: its coordinates, seeds, and the last loss over the seeds that ended well."""
    axes = list(record.resolved["axes"])
    points: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for member in record.scalars["members"]:
        key = tuple(str(member["coordinates"][axis]) for axis in axes)
        points.setdefault(key, []).append(member)
    cells = []
    for key, members in points.items():
        losses = [member["loss"] for member in members if member["status"] in ("done", "stopped_early")]
        cells.append([*key, f"{len(losses)} of {len(members)}", _mean_text(losses)])
    return [*(axis.removeprefix("model.") for axis in axes), "seeds", "loss"], cells


def endings_of(record: Record) -> list[str]:
    """How many members ended in which way, and why the ones that failed did."""
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in record.scalars["counts"].items())
    lines = [f"{len(record.scalars['members'])} members in {record.resolved['stacks']} stacks: {counts}."]
    return lines + [
        f"{member['name']}: {member['status']} after {member['steps']} steps ({member['reason']})"
        for member in record.scalars["members"]
        if member["status"] in ("diverged", "failed")
    ]


def mean_over_seeds(losses: list[float]) -> Interval:
    """The mean with its 95 % bootstrap interval; infinite from a single seed."""
    values = np.asarray(losses, dtype=np.float64)
    low, high = bootstrap_mean(values[:, None], generator=np.random.default_rng(BOOTSTRAP_SEED))
    return Interval(float(values.mean()), float(low[0]), float(high[0]))


def _mean_text(losses: list[float]) -> str:
    if not losses:
        return MISSING
    interval = mean_over_seeds(losses)
    if not np.isfinite(interval.low):
        return f"{interval.value:.4f}"
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
