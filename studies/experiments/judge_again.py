"""Judges the recorded position-copy networks anew, without their models: `python studies/experiments/judge_again.py`.

Statements, tables and figures are made again from the losses and profiles in the record, which it replaces. A run
directory with models is judged anew by the command that made it, with `--resume`: it reads finished studies back.
"""

from dataclasses import replace
from pathlib import Path

from posbias.runs.records import Record, read_record
from posbias_papers.liu2026.experiment import position_copy_page, recorded_outcome
from posbias_papers.reproduction import reproduction_record

HERE = Path(__file__).parent
SETTINGS = ("size", "studies", "steps", "trained_with")


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
