"""Writes README.md and rates.csv in minutes: `PYTHONPATH=tests python studies/intervals/make_intervals.py`."""

import csv
from collections.abc import Callable
from pathlib import Path

import conclusions
import false_verdicts
import numpy as np

from posbias.comparison.metrics import wasserstein
from posbias.evaluation.curve import compare_to_best, middle_loss
from posbias.statistics import jackknife, leave_one_out, mean_ends, paired_shares, wilson

SEED, MEANS, PROFILES, SCORES = 0, 100_000, 4000, 2000
COUNTS = (6, 8, 16, 32)
N_POSITIONS, CHANCE = 32, 0.8

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
DRAWS: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.normal(5, 1, shape),
    "exponential": lambda generator, shape: generator.exponential(size=shape),
    "lognormal": lambda generator, shape: generator.lognormal(size=shape),
    "binary": lambda generator, shape: (generator.random(shape) < CHANCE).astype(np.float64),
}
TRUTHS = {"normal": 5.0, "exponential": 1.0, "lognormal": float(np.exp(0.5)), "binary": CHANCE}

HEADER = f"""# Study: how often the intervals miss

**Question:** how often does a printed 95 % interval leave out the truth, by number of prompts? **Answer:** 4 to 5 %
of the time for symmetric units; 6 to 11 % for heavy tails, even with 32 units; joint intervals less often. Verdicts on
methods (`posbias mitigate`) and other conclusions are [false](#false-conclusions) in at most 5 % of runs. How they are
made: [intervals](../../docs/intervals.md).

`PYTHONPATH=tests python studies/intervals/make_intervals.py` (a few minutes, seed {SEED}) writes this page and
[`rates.csv`](rates.csv), which has every rate. {MEANS:,} repetitions for means, {PROFILES:,} for profiles, {SCORES:,}
for scores; a rate of 5 % then has a standard error of .07, .34 and .49 points. All in %; 5 is right.
"""

VERDICTS = f"""
- Student's interval alone misses the mean of lognormal units (sigma 1) in 18, 17, 14 and 11 %, a bootstrap as often.
- A W1 cannot be negative, and noise only adds to it: near a perfect theory it is estimated too large, and so is the
  difference to the uniform baseline. "Wrongly closer": a theory as far as it is called closer.
- Joint intervals over positions are conservative: 0 to 4.2 % with 3 positions, 0 to 3.0 % with 10.

## False verdicts of `posbias mitigate`

How often do these tests say that a method helps or harms which does neither? In at most 5 % of runs if a verdict is
given: for changes of log-probability from 16 samples on (lognormal ones with sigma 1 for up to 16 methods, sigma 1.5
for up to four), for right and wrong answers from 6 on. The false ones are warnings: most samples lose a little, and
rare gains are not seen. {false_verdicts.RUNS:,} runs a cell (standard error of 5 %: .22 points),
{false_verdicts.PLANTED} whole judgements of right and wrong answers (1.5); in brackets: no verdict is given. Normal and
exponential changes err in .5 to 2.1 %.
"""

FOOTER = """
- Other tests do not hold 5 % on lognormal changes (sigma 1, 16 samples, four methods): Student's t 24.0 %, random signs
  21.6, bootstrap-t 10.8, Hall's transformation 8.6; the one used here 1.8.
"""


CONCLUSIONS = """
## False conclusions

Nothing is to be found except in the last row, so a conclusion is false. Rates in % of runs [95 %];
[`conclusions.csv`](conclusions.csv) has all (debiasing of judges: until e7562a46), by `python
studies/intervals/conclusions.py` (seed 0; 500 to 2,000 runs a cell). *Rare*: one sample in twenty loses 1 nat, others
gain; the mean is 0.
"""


def outside(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    """Percent of intervals that leave out the truth; rounding at an end that is the truth does not count."""
    return float(100 * np.mean((low > truth + 1e-12) | (high < truth - 1e-12)))


def of_a_mean(name: str, count: int, generator: np.random.Generator) -> float:
    """One sample."""
    if name == "binary":
        ends = {right: wilson(np.r_[np.ones(right), np.zeros(count - right)]) for right in range(count + 1)}
        drawn = [ends[int(right)] for right in generator.binomial(count, CHANCE, MEANS)]
        return outside(np.array([found.low for found in drawn]), np.array([found.high for found in drawn]), CHANCE)
    return outside(*mean_ends(DRAWS[name](generator, (count, MEANS))), TRUTHS[name])


def of_a_difference(name: str, count: int, generator: np.random.Generator) -> float:
    """Two quantities on the same units, of equal means."""
    first, second = (DRAWS[name](generator, (count, MEANS if name != "binary" else SCORES)) for _ in range(2))
    if name == "binary":
        found = [paired_shares(one, other)[0] for one, other in zip(first.T, second.T, strict=True)]
        return outside(np.array([entry.low for entry in found]), np.array([entry.high for entry in found]), 0.0)
    return outside(*mean_ends(first - second), 0.0)


def profiles(generator: np.random.Generator, runs: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """U-shaped profiles of prompts that differ in tilt, bend and single positions, [runs count n]; and their tilt."""
    relative = np.linspace(0, 1, N_POSITIONS)
    shape = 1 + 6 * np.exp(-20 * relative) + 3 * np.exp(-20 * (1 - relative))
    tilt, bend = generator.normal(size=(2, runs, count, 1))
    noise = 0.2 * generator.normal(size=(runs, count, N_POSITIONS))
    units = shape * np.exp(0.8 * tilt * (relative - 0.5) + 0.3 * bend * np.cos(2 * np.pi * relative) + noise)
    return units / units.sum(axis=2, keepdims=True), tilt[..., 0]


def averages(name: str, count: int, runs: int, generator: np.random.Generator) -> np.ndarray:
    """Average profiles with no unit and with each unit left out, [count + 1, runs, n]; totals of the named sort."""
    units, tilt = profiles(generator, runs, count)
    totals = np.ones((runs, count)) if name == "equal" else DRAWS[name](generator, (runs, count)) * np.exp(0.3 * tilt)
    weights = leave_one_out(count)[:, None, :] * totals
    return np.einsum("wru,run->wrn", weights / weights.sum(axis=2, keepdims=True), units)


def of_profiles(name: str, count: int, generator: np.random.Generator) -> list[float]:
    """First tenth; W1 of a far, a near and the exact theory; and a theory as far as the flat line called closer."""
    truth = _truth(name)
    drawn = averages(name, count, PROFILES, generator)
    flat = np.full(N_POSITIONS, 1 / N_POSITIONS)
    share = int(0.1 * N_POSITIONS)
    found = [outside(*jackknife(drawn[..., :share].sum(axis=2)).ends(), float(truth[:share].sum()))]
    for theory in (truth[::-1], 0.7 * truth + 0.3 * flat, truth):
        values = wasserstein(theory, drawn)
        found.append(outside(*jackknife(values).ends(least=0.0, most=1.0), float(wasserstein(theory, truth))))
    mirrored = 2 * truth - flat  # as far from the truth as the flat line, on the other side
    found.append(100 * float(np.mean(jackknife(wasserstein(mirrored, drawn) - wasserstein(flat, drawn)).ends()[1] < 0)))
    return found


def _truth(name: str) -> np.ndarray:
    """The average of very many prompts."""
    generator, total, weight = np.random.default_rng(SEED + 1), np.zeros(N_POSITIONS), 0.0
    for _ in range(40):
        units, tilt = profiles(generator, 1, 50_000)
        totals = np.ones(50_000) if name == "equal" else DRAWS[name](generator, (50_000,)) * np.exp(0.3 * tilt[0])
        total, weight = total + totals @ units[0], weight + totals.sum()
    return total / weight


def of_scores(name: str, count: int, generator: np.random.Generator) -> list[float]:
    """Equal positions: any of 3, or of 10, called different from the best; and a loss in the middle found."""
    found = []
    for n_positions in (3, 10):
        missed = 0
        for _ in range(SCORES):
            scores = DRAWS[name](generator, (count, n_positions))
            differences = compare_to_best(scores).differences
            missed += any(difference.interval.excludes(0.0) for difference in differences)
        found.append(100 * missed / SCORES)
    losses = [middle_loss(DRAWS[name](generator, (count, 5))).value.excludes(0.0) for _ in range(SCORES)]
    return [*found, 100 * float(np.mean(losses))]


def table(title: str, first: str, columns: list[str], rows: dict[str, list[str]], only: tuple[str, ...] = ()) -> str:
    """Markdown, of the columns and rows whose names have `only` in them if any do."""
    shown = [number for number, name in enumerate(columns) if name in only] or range(len(columns))
    columns = [columns[number] for number in shown]
    rows = {name: [cells[number] for number in shown] for name, cells in rows.items()}
    rows = {name: cells for name, cells in rows.items() if name.endswith(only)} or rows
    lines = [f"\n**{title}**\n", "| " + " | ".join([first, *columns]) + " |", "|---" + "|---:" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join([name, *cells]) + " |" for name, cells in rows.items())]) + "\n"


def main() -> None:
    """Simulate and write the page and the rates beside this file."""
    generator = np.random.default_rng(SEED)
    counts = [f"n = {count}" for count in COUNTS]
    found: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
    for title, function in (("mean", of_a_mean), ("paired difference", of_a_difference)):
        rows = {name: [f"{function(name, count, generator):.1f}" for count in COUNTS] for name in DRAWS}
        found[title] = counts, rows
    rows = {
        f"{'`profiles`' if name == 'equal' else f'`norms`, {name} totals'}, n = {count}": [
            f"{value:.1f}" for value in of_profiles(name, count, generator)
        ]
        for name in ("equal", "normal", "exponential", "lognormal")
        for count in COUNTS
    }
    headings = ["first tenth", "W1, far theory", "W1, near theory", "W1, exact theory", "wrongly closer"]
    found["averaged profiles"] = headings, rows
    rows = {
        f"{name}, n = {count}": [f"{value:.1f}" for value in of_scores(name, count, generator)]
        for name in DRAWS
        for count in COUNTS
    }
    found["equal positions"] = ["any of 3 positions", "any of 10 positions", "loss in the middle of 5"], rows
    found["false verdicts"] = [f"n = {count}" for count in false_verdicts.COUNTS], false_verdicts.rates()
    headings = [f"sigma {sigma}, n = {count}" for sigma in ("1", "1.5") for count in (8, 16, 40)]
    found["tests of a mean"] = [*headings, "found, n = 16", "found, n = 40"], false_verdicts.procedures()
    write(found)


def write(found: dict[str, tuple[list[str], dict[str, list[str]]]]) -> None:
    """The page, and every rate as CSV: table, row, column, value."""
    here = Path(__file__).parent
    page = HEADER + table("Mean of n units (binary: share of right answers, true .8)", "units", *found["mean"])
    ends = ("n = 6", "n = 32")
    columns, rows = found["averaged profiles"]
    skewed = {name: cells for name, cells in rows.items() if "normal totals" not in name.replace("lognormal", "")}
    page += table("Averaged profiles of 32 positions", "averaging, units", columns, skewed, ends) + VERDICTS
    shown = ("n = 8", "n = 16", "n = 40")
    columns, rows = found["false verdicts"]
    left_out = ("normal", "exponential")  # which err less often than the others
    several = {name: cells for name, cells in rows.items() if name[-1] == "s" and not name.startswith(left_out)}
    page += table("False verdicts, in % of runs", "changes", columns, several, shown)
    (here / "README.md").write_text(page + FOOTER + CONCLUSIONS + "\n" + conclusions.tables())
    with (here / "rates.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["table", "row", "column", "value"])
        for title, (columns, rows) in found.items():
            for name, cells in rows.items():
                plain = name.replace("`", "").replace("*", "")
                writer.writerows([title, plain, *pair] for pair in zip(columns, cells, strict=True))


if __name__ == "__main__":
    main()
