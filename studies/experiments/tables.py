"""Prints the findings of reproductions as CSV: `python studies/experiments/tables.py RUN... > findings.csv`."""

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbias.runs.records import Record, read_record


def line(run: str, row: Mapping[str, Any]) -> list[str]:
    """One finding."""
    return [run, row["where"], row["reported"], row["found"], row["verdict"], row.get("together", "")]


def findings(records: Mapping[str, Record]) -> str:
    """Every finding of the runs that was run, in their order."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["run", "where", "reported", "here", "verdict", "all together"])
    for run, record in records.items():
        rows = [row for row in record.scalars["rows"] if row["sort"] == "finding" and row["verdict"] != "not run"]
        writer.writerows(line(run, row) for row in rows)
    return written.getvalue()


if __name__ == "__main__":
    print(findings({Path(run).name: read_record(run) for run in sys.argv[1:]}), end="")
