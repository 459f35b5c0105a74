"""How many samples decide: the table of docs/mitigate.md, which shows no method that draws anew; seconds.

Run it as `PYTHONPATH=tests python studies/mitigation/power.py`. Answers are drawn as a model gives them that is right
in .8, .5, .3, .5, .7 of cases at five positions, under methods without effect; given is the number of samples by which
`posbias mitigate` would find a rise of the mean in 80 % of runs, mean over runs of 40 samples. How alike answers are
before and after a method is an assumption: drawn with the same luck in .7 of cases, or in none.
"""

import numpy as np

from planted import Planted, planted_scores
from posbias.evaluation.levels import samples_for

CURVE = (0.8, 0.5, 0.3, 0.5, 0.7)
RUNS = 40


def needed(rise: float, n_methods: int, agreement: float = 0.7) -> float:
    """Samples, mean over runs; every method has two tests."""
    planted, generator = Planted(CURVE, (CURVE,), agreement=agreement), np.random.default_rng(0)
    found = []
    for _ in range(RUNS):
        before, (after,) = planted_scores(planted, count=40, generator=generator)
        found.append((samples_for(before, after, rise, 2 * n_methods) or (0.0, 0))[1])
    return float(np.mean(found))


def row(rise: float) -> str:
    """Of the table: one method, and in brackets five; then methods that draw every answer anew."""
    shown = [f"{needed(rise, 1, agreement):.0f} ({needed(rise, 5, agreement):.0f})" for agreement in (0.7, 0.0)]
    return f"| {f'{rise:.2f}'.removeprefix('0')} | {shown[0]} | {shown[1]} |"


if __name__ == "__main__":
    print("| rise of the mean | samples, one method (five) | drawn anew |")
    print("|---:|---:|---:|")
    for rise in (0.05, 0.10, 0.15, 0.20, 0.30):
        print(row(rise))
