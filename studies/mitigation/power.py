"""How many samples an effect takes: the table of docs/mitigate.md, which shows no method that draws anew; a minute.

Run it as `PYTHONPATH=tests python studies/mitigation/power.py`. Answers are drawn as a model gives them that is right
in .8, .5, .3, .5, .7 of cases at five positions, under methods without effect; given is the smallest rise that `posbias
mitigate` would find with 80 % power, mean over runs. How alike answers are before and after a method is an assumption:
drawn with the same luck in .7 of cases, or in none. If in none, a rise of the mean by .10 is found with 40 samples in
.33 [.25, .41] of runs.
"""

import numpy as np

from planted import Planted, judged
from posbias.evaluation.changes import MEAN, WORST

CURVE = (0.8, 0.5, 0.3, 0.5, 0.7)
RUNS = 40


def found(count: int, n_methods: int, agreement: float = 0.7) -> tuple[float, float]:
    """For the mean and for the worst position."""
    planted, generator = Planted(CURVE, (CURVE,) * n_methods, agreement=agreement), np.random.default_rng(0)
    each = []
    for _ in range(RUNS):
        changes = judged(planted, count=count, generator=generator).verdicts[0].changes
        each.append([changes[endpoint].detectable for endpoint in (MEAN, WORST)])
    mean, worst = np.array(each, dtype=float).mean(axis=0)
    return float(mean), float(worst)


def row(count: int) -> str:
    """Of the table: one method, and in brackets five; then one method that draws every answer anew."""
    (mean, worst), (of_five, worst_of_five), anew = found(count, 1), found(count, 5), found(count, 1, agreement=0.0)
    shown = f"{_short(mean)} ({_short(of_five)}) | {_short(worst)} ({_short(worst_of_five)})"
    return f"| {count} | {shown} | {_short(anew[0])}; {_short(anew[1])} |"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if np.isfinite(value) else "none in some runs"


if __name__ == "__main__":
    print("| samples | mean, one method (five) | worst position, one method (five) | drawn anew: mean; worst |")
    print("|---:|---:|---:|---:|")
    for count in (20, 40, 80, 160):
        print(row(count))
