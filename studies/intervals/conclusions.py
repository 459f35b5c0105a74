"""How often a conclusion is false: `python studies/intervals/conclusions.py` (some minutes) writes conclusions.csv.

In each row nothing is to be found (no effect, or a truth below the bound that is claimed); rates are in % of runs, with
their Wilson intervals, by the rule in use and by the one before it. Mitigation: every method changes all positions of a
sample alike, most samples gain a little, few lose much, and the mean change is 0.
"""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from scipy.stats import binom

from posbias.evaluation.curve import bounds_of, contrast_of
from posbias.evaluation.evaluation import judge_verdicts
from posbias.evaluation.levels import scale_of
from posbias.statistics import bounded_mean, mean_of, wilson

RUNS, SEED = 2000, 0
FEW = 500
"""Runs of what takes longer."""
HEADER = ("conclusion", "case", "units", "methods", "runs", "before", "now", "now, low", "now, high")
SPREADS = {"rare": 1.0, "rare, 3 nats": 2.0, "gamma": 1.0, "lognormal": 3.0}
"""Standard deviation of the unchanged log-probabilities."""


def changes(case: str, share: float, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Changes of mean 0: rare losses of 1 or 3 nats, or a long tail of losses (gamma, shape `share`; lognormal)."""
    if case == "gamma":
        return np.asarray((share - generator.gamma(share, size=shape)) / np.sqrt(share))
    if case == "lognormal":
        return np.asarray(np.exp(share**2 / 2) - generator.lognormal(0, share, size=shape))
    loss = 3.0 if case == "rare, 3 nats" else 1.0
    lost = generator.random(shape) < share
    return np.where(lost, -loss, share * loss / (1 - share) + 0.05 * generator.normal(size=shape))


def claims(change: np.ndarray, spread: float, n_methods: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each column is found to rise by the samples seen (before), and by both p-values (now); two endpoints."""
    mean, count = change.mean(axis=0), len(change)
    seen = (bounds_of(change, change, 0.05)[2] * 2 * n_methods < 0.05) & (mean > 0)
    scale = max(scale_of(np.zeros(1)), 2 * spread)
    return seen, seen & (2 * n_methods * (1 + np.maximum(mean, 0) / scale) ** -count < 0.05)


def recommended() -> Iterator[tuple[object, ...]]:
    """A method without effect is recommended."""
    cases = [("rare", share) for share in (0.02, 0.05, 0.1)]
    cases += [("rare, 3 nats", 0.05), ("gamma", 0.25), ("lognormal", 1.5)]
    for case, share in cases:
        for count in (16, 40, 80):
            drawn = changes(case, share, (count, RUNS * 16), np.random.default_rng(SEED))
            for n_methods in (1, 4, 16):
                found = claims(drawn[:, : RUNS * n_methods], SPREADS[case], n_methods)
                yield (
                    "a method is recommended",
                    f"{case} {share:g}",
                    count,
                    n_methods,
                    *(each.reshape(RUNS, n_methods).any(axis=1) for each in found),
                )


def power() -> Iterator[tuple[object, ...]]:
    """A true rise is found: of normal changes with standard deviation .5, where scores have 1."""
    for rise in (0.2, 0.3, 0.5, 1.0):
        for count in (16, 40, 80):
            drawn = np.random.default_rng(SEED).normal(rise, 0.5, (count, RUNS))
            for n_methods in (1, 4, 16):
                yield ("a true rise is found", f"+{rise:g}", count, n_methods, *claims(drawn, 1.0, n_methods))


def different() -> Iterator[tuple[object, ...]]:
    """Two evaluations of equal means are called different: one sample in ten loses all, the others gain a little."""
    for count in (8, 16, 40):
        generator = np.random.default_rng(SEED)
        luck = generator.random((RUNS, count, 1))
        gained, lost = (luck >= 0.1) & (luck < 0.6) & (np.arange(5) == 0), np.repeat(luck < 0.1, 5, axis=2)
        answers = np.concatenate([lost, gained], axis=2).astype(np.float64)
        found = np.array([contrast_of(run, np.repeat([-0.2, 0.2], 5)).p for run in answers])
        rise = (gained.mean(axis=2) - lost.mean(axis=2)).mean(axis=1)
        confirmed = (found < 0.05) & ((1 + np.abs(rise)) ** -count < 0.05)
        yield ("two subjects differ", "answers, one in ten loses all", count, "", found < 0.05, confirmed)
        drawn = changes("rare", 0.1, (count, RUNS), generator)
        seen = bounds_of(drawn, drawn, 0.05)[2] < 0.05
        rare = (1 + np.abs(drawn.mean(axis=0)) / 2) ** -count < 0.05
        yield ("two subjects differ", "log-probability, one in ten loses 1 nat", count, "", seen, seen & rare)


@cache
def low_ends(counts: tuple[int, ...]) -> tuple[float, float]:
    """Low ends of the mean of samples with 0 ... 5 right answers of five, if they matter: before, and now."""
    units = np.repeat(np.arange(6) / 5, counts)
    binary = bool(np.isin(units, (0, 1)).all())
    if units.mean() < 0.95:  # no low end lies above the estimate
        return 0.0, 0.0
    before = wilson(units) if binary else mean_of(units).interval(least=0.0, most=1.0)
    return before.low, bounded_mean(units).low


def required() -> Iterator[tuple[object, ...]]:
    """`mean>=.95` is claimed of .949: all failures together, six in ten of them, or each by itself."""
    alone, together = binom.pmf(np.arange(6), 5, 0.949), np.array([0.051, 0, 0, 0, 0, 0.949])
    some = np.array([0.03, 0, 0, 0, 0.105, 0.865])
    for case, chances in (("together", together), ("six in ten together", some), ("each alone", alone)):
        for count in (50, 100):
            runs = RUNS if case == "together" else FEW
            drawn = np.random.default_rng(SEED).multinomial(count, chances / chances.sum(), size=runs)
            ends = np.array([low_ends(tuple(run.tolist())) for run in drawn])
            yield ("mean>=.95 of .949 is met", f"failures {case}", count, "", *(ends >= 0.95).T)


def grouped() -> Iterator[tuple[object, ...]]:
    """Intervals of a judge's accuracy that miss: five pairs a question, four in five as the question's first."""
    chances, truth = (0.5, 0.2, 0.3), 0.65
    for n_questions in (10, 30):
        generator, missed = np.random.default_rng(SEED), []
        for _ in range(FEW):
            kinds = generator.choice(3, p=chances, size=(n_questions, 5))
            kinds = np.where(generator.random(kinds.shape) < 0.8, kinds[:, :1], kinds)
            right = np.array([1, 0, 0.5])[kinds]  # right, wrong, or the first slot: right in one order of two
            ends = mean_of(right.ravel()).interval(), bounded_mean(right.mean(axis=1))
            missed.append([each.excludes(truth) for each in ends])
        yield ("judges: accuracy is missed", "five pairs a question", n_questions, "", *np.array(missed).T)


@cache
def judged(right: int, wrong: int, follows: int) -> np.ndarray:
    """Ends of the first-pick rate, before and now, of pairs that are right in both orders, wrong in both, or answered
    by the first slot."""
    kinds = np.repeat([0, 1, 2], [right, wrong, follows])
    correct = np.column_stack([kinds != 1, kinds == 0]).astype(np.float64)
    chosen = np.where(correct == 1, [[0.0, 1.0]], [[1.0, 0.0]])
    found = judge_verdicts({"correct": correct, "first_pick": 1 - chosen, "tie": np.zeros_like(correct)})
    old = mean_of((chosen == 0).mean(axis=1)).interval(least=0.0, most=1.0)
    return np.array([old.low, old.high, found.first_pick.low, found.first_pick.high])


def judges() -> Iterator[tuple[object, ...]]:
    """Intervals of a judge's first-pick rate that miss."""
    for count in (16, 40, 100):
        for share in (0.03, 0.1, 0.3):
            drawn = np.random.default_rng(SEED).binomial(count, share, size=RUNS)
            found, truth = np.array([judged(count - run, 0, run) for run in drawn.tolist()]), 0.5 + share / 2
            missed = [(found[:, end] > truth) | (found[:, end + 1] < truth) for end in (0, 2)]
            yield ("judges: first-pick rate is missed", f"{share:.0%} follow the first slot", count, "", *missed)


ON_THE_PAGE = {
    "a method is recommended": ("rare 0.05", "40", "4"),
    "two subjects differ": ("answers", "16", ""),
    "mean>=.95 of .949 is met": ("failures six", "50", ""),
    "judges: accuracy is missed": ("five pairs", "10", ""),
    "a true rise is found": ("+0.3", "40", "4"),
}
"""Case, units and methods of each conclusion that the page shows; the others are in conclusions.csv."""


def tables() -> str:
    """The table of README.md."""
    with (Path(__file__).parent / "conclusions.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = ["| conclusion | case | n | rate |", "|---|---|---:|---:|"]
    for name, (case, units, methods) in ON_THE_PAGE.items():
        row = next(
            row
            for row in rows
            if row["conclusion"] == name
            and row["case"].startswith(case)
            and (row["units"], row["methods"]) == (units, methods)
        )
        cells = [name, row["case"], units, f"**{row['now']}** [{row['now, low']}, {row['now, high']}]"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate."""
    with (Path(__file__).parent / "conclusions.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for rows in (recommended, power, different, required, judges, grouped):
            for conclusion, case, count, n_methods, before, now in rows():
                interval = wilson(np.asarray(now, dtype=np.float64))
                rates = (100 * np.mean(before), 100 * interval.value, 100 * interval.low, 100 * interval.high)
                writer.writerow([conclusion, case, count, n_methods, len(now), *(f"{rate:.1f}" for rate in rates)])
                file.flush()


if __name__ == "__main__":
    main()
