"""Prints a reproduction's findings as the tables of README.md: `python studies/experiments/tables.py RUN`."""

import sys
from collections.abc import Mapping
from typing import Any

from posbias.runs.records import read_record


def line(row: Mapping[str, Any]) -> str:
    """One finding."""
    together = f" {row['together']} |" if "together" in row else ""
    return f"| {row['where']} | {row['reported']} | {row['found']} | **{row['verdict']}** |{together}"


def tables(rows: list[Mapping[str, Any]]) -> str:
    """What was run, published statements first; then what was not."""
    run = [row for row in rows if row["verdict"] != "not run"]
    ours = [row for row in run if "unconfounded" in row["where"] or "control" in row["where"] or "code" in row["where"]]
    published = [row for row in run if row not in ours]
    missing = ", ".join(dict.fromkeys(row["where"] for row in rows if row["verdict"] == "not run"))
    heads = (("reported", published), ("question", ours))
    parts = [
        f"| where | {head} | here | verdict | all together |\n|---|---|---|---|---|\n" + "\n".join(map(line, part))
        for head, part in heads
        if part
    ]
    return "\n\n".join([*parts, f"Not run: {missing or 'nothing'}."])


if __name__ == "__main__":
    record = read_record(sys.argv[1])
    print(tables([row for row in record.scalars["rows"] if row["sort"] == "finding"]))
    for statement in record.scalars["statements"]:
        if statement.startswith(("Of ", "Chance: ")):
            print(f"\n{statement}")
