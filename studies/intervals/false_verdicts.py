"""How often `posbias mitigate` says that a method helps or harms which does neither, by the distribution of changes.

Every method changes all positions of a sample alike, which is worst: mean and worst position are then found together.
A verdict is false where the smallest of two p-values a method, times their number (Holm's first step), is below 5 %.
Mirrored changes have the same rates; that a gain must also outweigh losses that no sample showed is left out here
(`conclusions.py`). `make_intervals.py` writes the rates.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import stdtr

from planted import Planted, verdict_rates
from posbias.evaluation.curve import bounds_of
from posbias.evaluation.levels import SAMPLES_FOR_MEANS
from posbias.mitigation.judging import GAINS, HARM
from posbias.statistics import mean_of

RUNS, RESAMPLED, PLANTED = 10_000, 1000, 200
COUNTS, METHODS = (6, 8, 12, 16, 20, 40, 80), (1, 4, 16)
RESAMPLES = 1999

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Test = Callable[[np.ndarray], np.ndarray]
"""Two-sided p-values of the means of columns."""
CHANGES: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "exponential": lambda generator, shape: generator.exponential(size=shape) - 1,
    "lognormal, sigma 1": lambda generator, shape: generator.lognormal(size=shape) - np.exp(0.5),
    "lognormal, sigma 1.5": lambda generator, shape: generator.lognormal(0, 1.5, size=shape) - np.exp(1.125),
}


def used(units: np.ndarray) -> np.ndarray:
    """As `posbias mitigate` tests scores other than right or wrong."""
    return bounds_of(units, units, 0.05)[2]


def studentised(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T, and the sample's skewness over sqrt(n)."""
    count, centred = len(units), units - units.mean(axis=0)
    second = np.square(centred).mean(axis=0)
    skewness = (centred**3).mean(axis=0) / second**1.5
    return units.mean(axis=0) / np.sqrt(second / (count - 1)), skewness / np.sqrt(count)


def student(units: np.ndarray) -> np.ndarray:
    """Student's t."""
    return 2 * stdtr(len(units) - 1, -np.abs(studentised(units)[0]))


def johnson(units: np.ndarray) -> np.ndarray:
    """Johnson 1978: T + g / 6 + g T^2 / 3, or Student's where that is more careful."""
    distance, skewness = studentised(units)
    moved = np.sign(distance) * (distance + skewness / 6 + skewness * distance**2 / 3)
    return 2 * stdtr(len(units) - 1, -np.maximum(0, np.minimum(np.abs(distance), moved)))


def doubled(units: np.ndarray) -> np.ndarray:
    """Hall's transformation with twice the skewness."""
    distance, skewness = studentised(units)
    twice = 2 * skewness
    moved = distance + twice * distance**2 / 3 + twice**2 * distance**3 / 27 + twice / 6
    least = np.minimum(np.abs(distance), np.sign(distance) * moved)
    return 2 * stdtr(len(units) - 1, -np.maximum(0, least))


def _among(drawn: Callable[[np.ndarray], np.ndarray], units: np.ndarray) -> np.ndarray:
    """Twice the share of drawn T's, of the columns in pieces, beyond those of the units, the nearer side."""
    found = []
    for start in range(0, units.shape[1], 200):
        part = units[:, start : start + 200]
        seen, others = studentised(part)[0], drawn(part)
        ends = ((others <= seen).sum(axis=0), (others >= seen).sum(axis=0))
        found.append(np.minimum(1, 2 * (np.minimum(*ends) + 1) / (len(others) + 1)))
    return np.concatenate(found)


def _ratio(means: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
    """T from means of values and of squares; infinite where all values are equal."""
    variance = np.maximum(squares - means**2, 1e-12 * squares)
    return np.divide(means * np.sqrt(count - 1), np.sqrt(variance), out=np.zeros_like(means), where=variance > 0)


def bootstrap(units: np.ndarray) -> np.ndarray:
    """Bootstrap-t: T of resamples of the units less their mean."""
    generator, count = np.random.default_rng(0), len(units)
    weights = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count

    def drawn(part: np.ndarray) -> np.ndarray:
        centred = part - part.mean(axis=0)
        return _ratio(weights @ centred, weights @ centred**2, count)

    return _among(drawn, units)


def flipped(units: np.ndarray) -> np.ndarray:
    """T under random signs: exact where changes are symmetric."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(RESAMPLES, len(units))) / len(units)
    return _among(lambda part: _ratio(signs @ part, np.square(part).mean(axis=0)[None], len(part)), units)


TESTS: dict[str, tuple[Test, int]] = {
    "Student's t": (student, RUNS),
    "random signs of T": (flipped, RESAMPLED),
    "Johnson's t and Student's": (johnson, RUNS),
    "bootstrap-t": (bootstrap, RESAMPLED),
    "Hall's transformation and Student's (used for other means)": (lambda units: mean_of(units).p(), RUNS),
    "the same, skewness doubled": (doubled, RUNS),
    "**cautious about skewness (used for verdicts)**": (used, RUNS),
}


def false_rate(test: Test, draw: Draw, count: int, n_methods: int, runs: int) -> float:
    """Percent of runs with a false verdict on any method."""
    p = test(draw(np.random.default_rng(count), (count, runs * n_methods))).reshape(runs, n_methods)
    return 100 * float(np.mean(p.min(axis=1) * 2 * n_methods < 0.05))


def detectable(test: Test, count: int, n_methods: int, runs: int) -> float:
    """Smallest mean of normal changes, in standard deviations, found in 80 % of runs."""
    noise, low, high = np.random.default_rng(count).normal(size=(count, runs)), 0.0, 8.0
    while high - low > 0.005:
        middle = (low + high) / 2
        found = np.mean(test(noise + middle) * 2 * n_methods < 0.05) >= 0.8
        low, high = (low, middle) if found else (middle, high)
    return high


def rates() -> dict[str, list[str]]:
    """Of the tests in use, by distribution and number of methods; in brackets where no verdict is given."""
    rows = {}
    for name, draw in CHANGES.items():
        for n_methods in METHODS:
            cells = [f"{false_rate(used, draw, count, n_methods, RUNS):.1f}" for count in COUNTS]
            brackets = [
                f"({cell})" if count < SAMPLES_FOR_MEANS else cell for cell, count in zip(cells, COUNTS, strict=True)
            ]
            rows[f"{name}, {n_methods} method{'s' * (n_methods > 1)}"] = brackets
    planted = Planted((0.8,) * 5, ((0.8,) * 5,) * 4)
    found = [verdict_rates(planted, count=count, runs=PLANTED) for count in COUNTS]
    wrong = [100 * sum(each.get(verdict, 0.0) for verdict in (*GAINS, HARM)) for each in found]
    rows["right or wrong, true .8, 4 methods"] = [f"{percent:.1f}" for percent in wrong]
    return rows


def procedures() -> dict[str, list[str]]:
    """What was tried: false verdicts on lognormal changes, and what is found of normal ones; four methods."""
    rows = {}
    for name, (test, runs) in TESTS.items():
        cells = [
            f"{false_rate(test, CHANGES[f'lognormal, sigma {sigma}'], count, 4, runs // 2):.1f}"
            for sigma in ("1", "1.5")
            for count in (8, 16, 40)
        ]
        rows[name] = [*cells, *(f"{detectable(test, count, 4, runs // 5):.2f}" for count in (16, 40))]
    return rows
