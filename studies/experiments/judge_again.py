"""Judges the recorded position-copy networks anew, without their models: `python studies/experiments/judge_again.py`.

Statements, tables and figures are made again from the losses and profiles in the record, which it replaces. A run
directory with models is judged anew by the command that made it, with `--resume`: it reads finished studies back.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from posbias.errors import UsageError
from posbias.runs.parts import below
from posbias.runs.records import Record, read_record
from posbias_papers.closing_loop import Loop
from posbias_papers.findings import Seeded
from posbias_papers.liu2026.experiment import CopyOutcome, position_copy_page
from posbias_papers.liu2026.published import CONFIGURATIONS
from posbias_papers.reproduction import reproduction_record

HERE = Path(__file__).parent
SETTINGS = ("size", "studies", "steps", "trained_with")


def recorded_outcome(record: Record) -> CopyOutcome:
    """Outcomes stored in a record of this reproduction, so that statements can be judged anew without the models.

    Args:
        record: Of verb "reproduce"; seeds that it does not name are taken to be 0, 1, ... for every network.

    Raises:
        UsageError: a record of something else.
    """
    arrays = record.arrays
    names = {str(configuration): configuration for configuration in CONFIGURATIONS}
    by_configuration = {network: below(arrays, f"{name}/") for name, network in names.items()}
    recorded = {
        network: rows_by_name
        for network, rows_by_name in by_configuration.items()
        if {"loss", "course"} <= set(rows_by_name)
    }
    if not recorded:
        raise UsageError(f"the record has no losses of position copy; networks: {', '.join(names)}")
    seeds = {
        network: tuple(rows_by_name.get("seeds", np.arange(len(rows_by_name["loss"]))).tolist())
        for network, rows_by_name in recorded.items()
    }
    losses, speeds = (
        {network: Seeded(seeds[network], rows_by_name[name]) for network, rows_by_name in recorded.items()}
        for name in ("loss", "course")
    )
    loops = []
    for name, configuration in names.items():
        rows_by_name = below(arrays, f"loop/{name}/")
        if configuration in recorded and rows_by_name:
            predicted = {
                (key.split("/")[0], key.split("/")[1]): rows for key, rows in rows_by_name.items() if "/" in key
            }
            loops.append(Loop(name, predicted, {key: rows for key, rows in rows_by_name.items() if "/" not in key}))
    return CopyOutcome(losses, speeds, loops, record.scalars["facts"])


def judged_again(record: Record) -> Record:
    """The same networks under today's rules."""
    settings = {name: record.resolved[name] for name in SETTINGS if name in record.resolved}
    code = {name: record.environment[name] for name in ("posbias", "commit")}
    settings.setdefault("trained_with", {**code, "created": record.created})
    page = position_copy_page(recorded_outcome(record), settings=settings, seed=record.seeds["seed"])
    trained = settings["trained_with"]
    origin = {"study": "study", **trained, "created": trained["created"][:10]}
    page = replace(page, facts={**page.facts, "trained_before": [origin]})
    return reproduction_record(page, record.arguments, command=record.resolved["command"])


if __name__ == "__main__":
    directory = HERE / "position-copy"
    judged_again(read_record(directory)).save(directory)
