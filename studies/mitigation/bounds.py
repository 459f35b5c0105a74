"""How often an interval of the worst position's change misses it: 20 minutes.

Run it as `PYTHONPATH=tests python studies/mitigation/bounds.py`; docs/mitigate.md has the share of the interval in use.
Answers are drawn as models with a known curve give them, before and after a method, for 14 pairs of curves, 20 or 40
samples, 5 or 9 positions, right or wrong and continuous. Three intervals claim 95 %: a bootstrap over samples that
chooses the worst positions anew every time, the change at positions chosen on nine tenths of the samples and taken on
the others, and the one in use (`posbias.mitigation.judging`).
"""

import itertools
from collections.abc import Callable

import numpy as np
from scipy import stats

from planted import Planted, planted_scores
from posbias.evaluation.levels import WORST
from posbias.mitigation.judging import ArmScores, judge

RUNS, RESAMPLES, FOLDS = 400, 400, 10
NOISE = (None, 0.3)
SHAPES = {
    "flat": (0.5, 0.5, 0.5, 0.5, 0.5),
    "raised": (0.65, 0.65, 0.65, 0.65, 0.65),
    "low": (0.2, 0.2, 0.2, 0.2, 0.2),
    "high": (0.85, 0.85, 0.85, 0.85, 0.85),
    "u": (0.8, 0.5, 0.3, 0.5, 0.7),
    "hump": (0.3, 0.5, 0.8, 0.5, 0.4),
    "peak": (0.5, 0.5, 0.8, 0.5, 0.5),
    "dip": (0.5, 0.5, 0.2, 0.5, 0.5),
    "slope": (0.3, 0.4, 0.5, 0.6, 0.7),
    "back": (0.7, 0.6, 0.5, 0.4, 0.3),
    "near": (0.45, 0.4, 0.42, 0.5, 0.41),
}
PAIRS = (
    *(("flat", after) for after in ("flat", "peak", "dip", "raised", "slope")),
    *((before, "flat") for before in ("peak", "dip", "u")),
    *(("u", after) for after in ("u", "hump")),
    ("slope", "back"),
    ("near", "raised"),
    ("low", "low"),
    ("high", "near"),
)
Scores = np.ndarray
Bounds = Callable[[Scores, Scores, np.random.Generator], tuple[float, float]]


def choosing_again(before: Scores, after: Scores, generator: np.random.Generator) -> tuple[float, float]:
    """Percentiles of a bootstrap that repeats the choice."""
    rows = generator.integers(len(before), size=(RESAMPLES, len(before)))
    changes = after[rows].mean(axis=1).min(axis=1) - before[rows].mean(axis=1).min(axis=1)
    low, high = np.quantile(changes, [0.025, 0.975])
    return float(low), float(high)


def chosen_elsewhere(before: Scores, after: Scores, generator: np.random.Generator) -> tuple[float, float]:
    """The mean over samples, each at the positions that are worst on the other folds, by Student's t."""
    folds = generator.permutation(len(before)) % FOLDS
    changes = np.zeros(len(before))
    for fold in range(FOLDS):
        rest, own = folds != fold, folds == fold
        worst = after[rest].mean(axis=0).argmin(), before[rest].mean(axis=0).argmin()
        changes[own] = after[own, worst[0]] - before[own, worst[1]]
    half = stats.t.ppf(0.975, len(changes) - 1) * changes.std(ddof=1) / np.sqrt(len(changes))
    return float(changes.mean() - half), float(changes.mean() + half)


def over_all_pairs(before: Scores, after: Scores, _: np.random.Generator) -> tuple[float, float]:
    """As `posbias mitigate` says it."""
    (verdict,) = judge(before, [ArmScores("method", after)], positions=range(before.shape[1])).verdicts
    value = verdict.changes[WORST].value
    return value.low, value.high


WAYS: dict[str, Bounds] = {
    "bootstrap that repeats the choice": choosing_again,
    "choice made on other samples (ten folds)": chosen_elsewhere,
    "ends of all pairs of positions (used)": over_all_pairs,
}


def curve(shape: str, positions: int) -> tuple[float, ...]:
    """With so many positions, linearly between the five."""
    points = SHAPES[shape]
    return tuple(np.interp(np.linspace(0, 1, positions), np.linspace(0, 1, len(points)), points).tolist())


def missed(before: str, after: str, count: int, positions: int, noise: float | None) -> dict[str, tuple[float, float]]:
    """By way: the share of runs whose interval misses the true change, and the mean width."""
    old, new = curve(before, positions), curve(after, positions)
    true = min(new) - min(old)
    generator = np.random.default_rng(0)
    found: dict[str, list[tuple[bool, float]]] = {name: [] for name in WAYS}
    for _ in range(RUNS):
        scores, (changed,) = planted_scores(Planted(old, (new,)), count=count, generator=generator, noise=noise)
        for name, bounds in WAYS.items():
            low, high = bounds(scores, changed, generator)
            found[name].append((not low - 1e-9 <= true <= high + 1e-9, high - low))
    return {name: tuple(np.mean(rows, axis=0)) for name, rows in found.items()}


if __name__ == "__main__":
    settings = list(itertools.product(PAIRS, (20, 40), (5, 9), NOISE))
    tables = [missed(*pair, count, positions, noise) for pair, count, positions, noise in settings]
    print("| interval of the change, 95 % claimed | misses at worst | where | mean width |\n|---|---:|---|---:|")
    for name in WAYS:
        misses, widths = np.array([table[name] for table in tables]).T
        pair, count, positions, noise = settings[int(misses.argmax())]
        scores = "right or wrong" if noise is None else "continuous"
        where = f"{pair[0]} to {pair[1]}, {count} samples, {positions} positions, {scores}"
        print(f"| {name} | {misses.max():.0%} | {where} | {widths.mean():.2f} |")
