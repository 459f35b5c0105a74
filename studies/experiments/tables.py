"""Prints the findings of reproductions as CSV: `python studies/experiments/tables.py RUN... > findings.csv`."""

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path

from posbias.results.records import Record, read_record
from posbias_papers.findings import NOT_RUN


def findings(records: Mapping[str, Record]) -> str:
    """Every finding of the runs that was run, in their order."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["run", "where", "reported", "here", "verdict", "all together"])
    for run, record in records.items():
        found = [row for row in record.scalars["rows"] if row["sort"] == "finding" and row["verdict"] != NOT_RUN]
        names = ("where", "reported", "found", "verdict", "together")
        writer.writerows([run, *(row.get(name, "") for name in names)] for row in found)
    return written.getvalue()


if __name__ == "__main__":
    print(findings({Path(run).name: read_record(run) for run in sys.argv[1:]}), end="")
