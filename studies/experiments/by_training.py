"""Accuracy as training goes on, and by place at its end: `python studies/experiments/by_training.py [RUN]`.

Of every architecture of the longer retrieval study (`longer.yaml`), means over seeds; gaps with Student intervals.
longer.csv is what it prints.
"""

import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float

from posbias.results.records import Record, read_record
from posbias_papers.findings import Difference, difference

HERE = Path(__file__).parent
FIRST_LAST = 1
"""Place of the gap first vs last among the three of an evaluation."""


def values(record: Record, quantity: str) -> dict[tuple[str, str], Float[np.ndarray, "seed evaluation *rest"]]:
    """An evaluated quantity by residual and encoding."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for index, entry in enumerate(record.scalars["members"]):
        at = entry["coordinates"]
        found.setdefault((at["model.residual"], at["encoding"]), []).append(
            record.arrays[f"evaluations/{quantity}"][index]
        )
    return {cell: np.array(rows, dtype=np.float64) for cell, rows in found.items()}


def gap(rows: Float[np.ndarray, "seed evaluation gap"], evaluation: int = -1) -> Difference:
    """First vs last, over seeds."""
    return difference(rows[:, evaluation, FIRST_LAST])


def lines(record: Record) -> list[str]:
    """The rows of longer.csv."""
    novel, places = values(record, "accuracy_novel_classes"), values(record, "accuracy_by_place")
    published, unconfounded = values(record, "gaps"), values(record, "unconfounded_gaps")
    made = ['residual,encoding,novel classes,by place,"gap, published sets","gap, unconfounded"']
    for residual, encoding in novel:
        cell = residual, encoding
        course = " ".join(f"{value:.2f}" for value in novel[cell].mean(axis=0)[1:])
        by_place = " ".join(f"{value:.2f}" for value in places[cell][:, -1].mean(axis=0))
        gaps = f'"{gap(published[cell])}","{gap(unconfounded[cell])}"'
        made.append(f"{residual},{encoding},{course},{by_place},{gaps}")
    return made


if __name__ == "__main__":
    print("\n".join(lines(read_record(sys.argv[1] if len(sys.argv) > 1 else HERE / "longer"))))
