"""Prints recall.csv, primacy and recency of the recorded study: `python studies/experiments/serial_positions.py [RUN]`.

Of every family and width, the share recalled of the first three places and of the last three, each minus that of the
four between them, with Student intervals over seeds.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from posbias.results.records import Record, read_record
from posbias_papers.findings import Difference, difference

HERE = Path(__file__).parent
ENDS = 3
CURVES = {
    ("free recall", "free_recalled"): "free recall",
    ("running span", "span_recalled"): "running span",
    ("both", "recalled"): "both",
}


def curves(record: Record, demand: str, quantity: str) -> dict[str, Float64[np.ndarray, "seed place"]]:
    """The final curve of every seed, by family and width."""
    found: dict[str, list[np.ndarray]] = {}
    for index, entry in enumerate(record.scalars["members"]):
        at = entry["coordinates"]
        if at["demand"] == demand:
            name = f"{at['family']}, d {at['model.width']}"
            found.setdefault(name, []).append(record.arrays[f"evaluations/{quantity}"][index, -1])
    return {name: np.array(rows, dtype=np.float64) for name, rows in found.items()}


def ends(rows: Float64[np.ndarray, "seed place"]) -> tuple[Difference, Difference]:
    """First and last places above the middle."""
    middle = rows[:, ENDS:-ENDS].mean(axis=1)
    first, last = (part.mean(axis=1) - middle for part in (rows[:, :ENDS], rows[:, -ENDS:]))
    return difference(first), difference(last)


def table(record: Record) -> str:
    """As CSV the share recalled by every network, and its first and last places less the middle."""
    intervals = [f"{end} three less middle{part}" for end in ("first", "last") for part in ("", ", low", ", high")]
    made = [",".join(f'"{name}"' for name in ("trained on", "network", "share recalled", *intervals))]
    for (demand, quantity), name in CURVES.items():
        for cell, rows in curves(record, demand, quantity).items():
            intervals = [each.interval for each in ends(rows)]
            numbers = [f"{number:.3f}" for each in intervals for number in (each.value, each.low, each.high)]
            made.append(",".join([name, f'"{cell}"', f"{rows.mean():.2f}", *numbers]))
    return "\n".join(made) + "\n"


def both_ways(record: Record, width: int) -> Mapping[str, Difference]:
    """Primacy under the causal mask minus that of the list read both ways, Llama's blocks, seed by seed."""
    found = {}
    for quantity in ("free_recalled", "free_probability"):
        rows = curves(record, "free recall", quantity)
        gaps = [
            each[:, :ENDS].mean(axis=1) - each[:, ENDS:-ENDS].mean(axis=1)
            for each in (rows[f"llama, d {width}"], rows[f"two-way, d {width}"])
        ]
        found[quantity] = difference(gaps[0] - gaps[1])
    return found


if __name__ == "__main__":
    run = read_record(sys.argv[1] if len(sys.argv) > 1 else HERE / "recall")
    print(table(run), end="")
    for size in (8, 32):
        for measure, gap in both_ways(run, size).items():
            print(f"causal minus two-way, d {size}, {measure}: {gap}", file=sys.stderr)
