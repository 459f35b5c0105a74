"""The tables of the study, with intervals over fits: `python studies/distilled/summary.py DIRECTORY`.

A row for every arm, of the seeds that are there: right answers (mean over samples and places, by place), and changes
against the unchanged model of the same seed. Then the contrasts that the predictions are about, paired by seed.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from posbias.statistics import mean_of

ARMS = ("unchanged", "answers", "answers_question", "gold_alone", "gold_alone_question", "best_place")
Cells = dict[str, dict[int, dict[str, Any]]]
"""What was measured of an arm, by seed."""


def read(directory: Path) -> Cells:
    """All cells that are there."""
    cells: Cells = {arm: {} for arm in ARMS}
    for path in sorted(directory.glob("*.json")):
        arm, _, seed = path.stem.rpartition("-")
        if arm in cells and seed.isdigit():
            cells[arm][int(seed)] = json.loads(path.read_text())
    return cells


def mean(cell: dict[str, Any], part: str) -> float:
    return float(np.mean(cell[part]))


def worst(cell: dict[str, Any], part: str) -> float:
    return float(np.mean(cell[part], axis=0).min())


def spread(cell: dict[str, Any], part: str) -> float:
    return float(np.ptp(np.mean(cell[part], axis=0)))


def judged(cell: dict[str, Any]) -> set[str]:
    """Left-out families that a cell has."""
    return {part for part in cell if "(" in part and "seconds" not in part}


def families(cell: dict[str, Any], _: str = "") -> float:
    """Mean over left-out families, each by its places."""
    return float(np.mean([mean(cell, part) for part in judged(cell)]))


def divergence(cell: dict[str, Any], part: str) -> float:
    return float(np.mean([kl for kl, _ in cell[part]]))


def interval(values: list[float], spec: str) -> str:
    """The mean over fits with its interval by Student's t; of one fit, and if all are the same, the value alone."""
    found = np.array(values)
    ends = {} if spec.startswith("+") else {"least": 0.0, "most": 1.0}
    told = len(found) > 2 and np.ptp(found) > 0
    text = mean_of(found).interval(**ends).text(spec) if told else f"{found.mean():{spec}}"
    return re.sub(r"(?<!\d)0\.", ".", text)


def differences(cells: Cells, arm: str, other: str, of: Callable[..., float], part: str) -> list[float]:
    """Of every seed that both have measured; without a part, of all families alike."""
    found = []
    for seed, cell in sorted(cells[arm].items()):
        same = cells[other].get(seed, {})
        if part in cell and part in same if part else judged(cell) == judged(same) != set():
            found.append(of(cell, part) - of(same, part))
    return found


def rows(cells: Cells) -> list[str]:
    """The table."""
    columns = (
        ("four documents", mean, "four", ".2f"),
        ("eight documents", mean, "eight", ".2f"),
        ("gold alone", mean, "gold alone", ".2f"),
        ("left-out families", families, "", "+.3f"),
        ("text, nats", mean, "text", "+.4f"),
        ("replies, nats", divergence, "replies", "+.4f"),
    )
    lines = [f"| arm | fits | {' | '.join(name for name, *_ in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for arm, of_arm in cells.items():
        if not of_arm:
            continue
        told = []
        for _, of, part, spec in columns:
            if spec.startswith("+"):
                values = differences(cells, arm, "unchanged", of, part)
            else:
                values = [of(cell, part) for cell in of_arm.values() if part in cell]
            shown = interval(values, spec) if values else ""
            if part in ("four", "eight") and values:
                places = np.mean([np.mean(cell[part], axis=0) for cell in of_arm.values() if part in cell], axis=0)
                shown += ": " + re.sub(r"0\.", ".", " ".join(f"{place:.2f}" for place in places))
            told.append(shown)
        lines.append(f"| {arm} | {len(of_arm)} | {' | '.join(told)} |")
    return lines


CONTRASTS = (
    ("1 mean at four", "gold_alone", "unchanged", mean, "four"),
    ("1 worst place at four", "gold_alone", "unchanged", worst, "four"),
    ("2 spread at four", "gold_alone", "unchanged", spread, "four"),
    ("3 mean at four", "answers", "gold_alone", mean, "four"),
    ("4 mean at four", "answers_question", "answers", mean, "four"),
    ("4 mean at four", "gold_alone_question", "gold_alone", mean, "four"),
    ("5 mean at eight", "gold_alone", "unchanged", mean, "eight"),
    ("6 left-out families", "gold_alone", "answers", families, ""),
    ("7 text", "answers", "unchanged", mean, "text"),
    ("7 text", "gold_alone", "unchanged", mean, "text"),
)
"""What every prediction is about: its number, the arms, the quantity."""


def contrasts(cells: Cells) -> list[str]:
    """The table of predictions."""
    lines = ["| prediction | arms | difference |", "|---|---|---|"]
    for name, arm, other, of, part in CONTRASTS:
        values = differences(cells, arm, other, of, part)
        lines.append(f"| {name} | {arm} less {other} | {interval(values, '+.3f') if values else ''} |")
    return lines


def main(directory: Path) -> None:
    cells = read(directory)
    print("\n".join([*rows(cells), "", *contrasts(cells)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
