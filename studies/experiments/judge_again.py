"""Judges the recorded position-copy networks anew, without their models: `python studies/experiments/judge_again.py`.

Statements, tables and figures are made again from the losses in the record, which it replaces; what else it holds is
kept. A run directory with models is judged anew by the command that made it, with `--resume`: it reads finished studies
back.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from posbias.errors import UsageError
from posbias.results.records import Record, read_record
from posbias.runs.parts import below
from posbias_papers.findings import Seeded
from posbias_papers.liu2026.experiment import CONFIGURATIONS, Losses, position_copy_page

HERE = Path(__file__).parent
SETTINGS = ("size", "studies", "steps", "trained_with")


def recorded_losses(record: Record) -> Losses:
    """Losses stored in a record of this reproduction, so that statements can be judged anew without the models.

    Args:
        record: Of verb "reproduce"; seeds that it does not name are taken to be 0, 1, ... for every network.

    Raises:
        UsageError: a record of something else.
    """
    recorded = {network: below(record.arrays, f"{network}/") for network in CONFIGURATIONS}
    losses = {
        network: Seeded(tuple(rows.get("seeds", np.arange(len(rows["loss"]))).tolist()), rows["loss"])
        for network, rows in recorded.items()
        if "loss" in rows
    }
    if not losses:
        raise UsageError(f"the record has no losses of position copy; networks: {', '.join(map(str, CONFIGURATIONS))}")
    return losses


def judged_again(record: Record) -> Record:
    """The same networks under today's rules."""
    settings = {name: record.resolved[name] for name in SETTINGS if name in record.resolved}
    code = {name: record.environment[name] for name in ("posbias", "commit")}
    settings.setdefault("trained_with", {**code, "created": record.created})
    facts = record.scalars["facts"]
    page = position_copy_page(recorded_losses(record), facts, settings=settings, seed=record.seeds["seed"])
    loops = [row for row in record.scalars["rows"] if row["sort"] != "finding"]
    others = {name: values for name, values in record.arrays.items() if not name.startswith("figures/")}
    again = replace(page, rows=[*page.rows, *loops], arrays={**others, **page.arrays}).record
    again.arguments, again.resolved["command"] = record.arguments, record.resolved["command"]
    return again


if __name__ == "__main__":
    directory = HERE / "position-copy"
    judged_again(read_record(directory)).save(directory)
