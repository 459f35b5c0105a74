"""How many samples an effect takes: `python studies/mitigation/power.py`, the table of docs/mitigation.md, a minute.

Answers are drawn as a model gives them that is right in .8, .5, .3, .5, .7 of cases at five positions, under methods
without effect; given is the smallest rise that `posbias mitigate` would find with 80 % power, mean over runs.
"""

import numpy as np

from posbias.mitigation.judging import MEAN, WORST
from posbias.mitigation.planted import Planted, judged

CURVE = (0.8, 0.5, 0.3, 0.5, 0.7)
RUNS = 40


def found(count: int, n_methods: int) -> tuple[float, float]:
    """For the mean and for the worst position."""
    planted, generator = Planted(CURVE, (CURVE,) * n_methods), np.random.default_rng(0)
    each = []
    for _ in range(RUNS):
        changes = judged(planted, count=count, generator=generator).verdicts[0].changes
        each.append([changes[endpoint].detectable for endpoint in (MEAN, WORST)])
    mean, worst = np.array(each, dtype=float).mean(axis=0)
    return float(mean), float(worst)


def row(count: int) -> str:
    """Of the table: one method, and in brackets five."""
    (mean, worst), (of_five, worst_of_five) = found(count, 1), found(count, 5)
    return f"| {count} | {_short(mean)} ({_short(of_five)}) | {_short(worst)} ({_short(worst_of_five)}) |"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if np.isfinite(value) else "none in some runs"


if __name__ == "__main__":
    print("| samples | mean, one method (five) | worst position, one method (five) |\n|---:|---:|---:|")
    for count in (20, 40, 80, 160):
        print(row(count))
