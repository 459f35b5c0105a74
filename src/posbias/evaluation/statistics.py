"""Paired statistics of scores by position: the contents are the independent units, every one asked at all positions.

Input is always score[content, position], such as 1 and 0 for right and wrong, or log-probabilities; NaN where an
example was skipped. Means use every score there is; comparisons use the contents that have a score at all positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.intervals import CONFIDENCE, DRAWS, Interval, bootstrap_mean, resampled_means

FOLDS = 10
"""Parts of the contents for cross-fitting: the best position is chosen on nine tenths, and judged on the tenth."""
CONTENTS_FOR_CLAIM = 6
"""Complete contents below which nothing is compared: with fewer, even contents that all agree do not reach 5 %."""
POWER = 0.8
"""Chance of finding an effect of the size that is called detectable."""
BISECTIONS = 60
"""Halvings of an interval of length 1; the root is then exact to double precision."""

Scores = Float64[np.ndarray, "n_contents n_positions"]


@dataclass(frozen=True)
class Difference:
    """One position against the best one, on the same contents."""

    position: int
    """Index of the position (column)."""
    bootstrap: Interval
    """Mean score minus that of the best position, <= 0, with a simultaneous interval over all pairs of positions."""
    cross_fitted: float
    """The same against the position that is best on the other contents: free of the luck by which a best one is chosen,
    not of that by which this one is not it (among equal positions under a third of the bias is left)."""
    mcnemar_p: float | None
    """Exact two-sided McNemar test of this pair alone; None where scores are not all 0 or 1."""
    adjusted_p: float | None
    """The same after Holm's correction over all pairs of positions, so that choosing the best is paid for."""
    mcnemar: Interval | None
    """Tango's score interval of the difference, Bonferroni-corrected over all pairs; None as `mcnemar_p`."""


@dataclass(frozen=True)
class Comparison:
    """All positions against the best one."""

    best: int
    """Index of the position with the highest mean; the first of several."""
    differences: tuple[Difference, ...]
    """One for each other position, in order."""
    n_contents: int


def complete_contents(scores: Scores) -> Float64[np.ndarray, "n_complete n_positions"]:
    """The contents that have a score at every position.

    Raises:
        UsageError: an infinite score, or no positions.
    """
    if scores.shape[1] < 1:
        raise UsageError("scores need at least 1 position, got none")
    if np.isinf(scores).any():
        raise UsageError("scores must be finite numbers, or NaN where an example was skipped; got an infinite one")
    complete: np.ndarray = scores[~np.isnan(scores).any(axis=1)]
    return complete


def is_binary(scores: Float64[np.ndarray, "..."]) -> bool:
    """Whether every score that is there is 0 or 1."""
    return bool(np.isin(scores[~np.isnan(scores)], (0.0, 1.0)).all())


def position_means(
    scores: Scores, *, generator: np.random.Generator, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> tuple[Interval, ...]:
    """Mean score at each position, each with its own (pointwise) interval.

    Wilson's interval where all scores are 0 or 1, which stays honest at 0 % and 100 %; else the expanded percentile
    bootstrap over contents.

    Args:
        scores: One row per content; NaN where skipped.
        generator: Source of the resamples.
        draws: Bootstrap draws.
        confidence: Coverage in (0, 1).

    Returns:
        One per position; NaN within (-inf, inf) where nothing was scored.
    """
    complete_contents(scores)
    if is_binary(scores):
        return tuple(wilson(column[~np.isnan(column)], confidence) for column in scores.T)
    found: list[Interval] = [Interval(np.nan, -np.inf, np.inf)] * scores.shape[1]
    there = ~np.isnan(scores)
    for pattern in np.unique(there.T, axis=0):
        columns = np.flatnonzero((pattern == there.T).all(axis=1))
        if not pattern.any():
            continue
        units = scores[np.ix_(pattern, columns)]
        low, high = bootstrap_mean(units, generator=generator, draws=draws, confidence=confidence)
        for place, column in enumerate(columns):
            found[column] = Interval(float(units[:, place].mean()), float(low[place]), float(high[place]))
    return tuple(found)


def wilson(values: Float64[np.ndarray, "n"], confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion; (0, 1) wide where there are no values.

    Source: Wilson 1927; it inverts the score test and has length above 0 at 0 % and 100 % too.
    """
    from scipy.special import ndtri

    n_values = len(values)
    if n_values == 0:
        return Interval(np.nan, -np.inf, np.inf)
    share, squared = float(values.mean()), float(ndtri((1 + confidence) / 2)) ** 2
    centre = (share + squared / (2 * n_values)) / (1 + squared / n_values)
    spread = np.sqrt(squared * (share * (1 - share) / n_values + squared / (4 * n_values**2)))
    half = float(spread / (1 + squared / n_values))
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def compare_to_best(
    scores: Scores, *, generator: np.random.Generator, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> Comparison:
    """Every position against the best one, with the choice of the best accounted for.

    The best of several equal positions looks better than it is. Three answers to that: intervals and p-values hold for
    all pairs of positions at once, hence for whichever pair is chosen afterwards; and `cross_fitted` estimates the
    difference with the best position chosen on other contents.

    Args:
        scores: At least 2 positions, and at least 6 contents that have a score at each.
        generator: Source of resamples and folds.
        draws: Bootstrap draws.
        confidence: Joint coverage of the intervals, in (0, 1).

    Raises:
        UsageError: fewer positions or contents, or an infinite score.
    """
    complete = complete_contents(scores)
    n_contents, n_positions = complete.shape
    if n_positions < 2 or n_contents < CONTENTS_FOR_CLAIM:
        raise UsageError(
            f"a comparison needs 2 positions and {CONTENTS_FOR_CLAIM} complete contents, "
            f"got {n_positions} and {n_contents}"
        )
    means = complete.mean(axis=0)
    best = int(np.argmax(means))
    half_widths = _half_widths(complete, best, generator, draws, confidence)
    fitted = _cross_fitted(complete, generator)
    exact = mcnemar_pairs(complete) if is_binary(complete) else None
    adjusted = _holm_of_pairs(exact) if exact is not None else None
    level = 1 - (1 - confidence) / (n_positions * (n_positions - 1) / 2)
    differences = [
        Difference(
            position=place,
            bootstrap=_around(float(means[place] - means[best]), float(half_widths[place])),
            cross_fitted=float(fitted[place]),
            mcnemar_p=None if exact is None else float(exact[place, best]),
            adjusted_p=None if adjusted is None else float(adjusted[place, best]),
            mcnemar=None if exact is None else tango(complete[:, place], complete[:, best], level),
        )
        for place in range(n_positions)
        if place != best
    ]
    return Comparison(best, tuple(differences), n_contents)


def mcnemar_pairs(scores: Scores) -> Float64[np.ndarray, "n_positions n_positions"]:
    """Exact two-sided McNemar p-value of every pair of positions: twice the smaller binomial tail, at most 1.

    Args:
        scores: 0 or 1, no NaN.

    Source: McNemar 1947; of the contents that are right at one position only, half should be right at either.
    """
    from scipy.special import bdtr

    only = scores.T @ (1 - scores)
    discordant = np.rint(only + only.T)
    p_values: np.ndarray = np.minimum(1.0, 2 * bdtr(np.rint(np.minimum(only, only.T)), discordant.astype(int), 0.5))
    return p_values


def tango(
    first: Float64[np.ndarray, "n_contents"], second: Float64[np.ndarray, "n_contents"], confidence: float = CONFIDENCE
) -> Interval:
    """Score interval of the difference of two paired proportions; it excludes 0 when McNemar's score test rejects.

    Args:
        first: 0 or 1 per content.
        second: 0 or 1 for the same contents.
        confidence: Coverage in (0, 1).

    Returns:
        Mean of `first` minus mean of `second`; never of length 0, also without any discordant content.

    Source: Tango 1998, "Equivalence test and confidence interval for the difference in proportions", eq. 9.
    """
    from scipy.special import ndtri

    n_contents = len(first)
    gained, lost = float((first * (1 - second)).sum()), float(((1 - first) * second).sum())
    critical = float(ndtri((1 + confidence) / 2))

    def score(difference: float) -> float:
        linear = (2 * n_contents - gained + lost) * difference - gained - lost
        product = -lost * difference * (1 - difference)
        other = (np.sqrt(max(linear**2 - 8 * n_contents * product, 0.0)) - linear) / (4 * n_contents)
        variance = n_contents * (2 * other + difference * (1 - difference))
        excess = gained - lost - n_contents * difference
        if variance > 0:
            return float(excess / np.sqrt(variance))
        return float(np.copysign(np.inf, excess)) if excess else 0.0

    value = (gained - lost) / n_contents
    return Interval(value, _root(score, critical, -1.0, value), _root(score, -critical, value, 1.0))


def holm(p_values: Float64[np.ndarray, "n_tests"]) -> Float64[np.ndarray, "n_tests"]:
    """Holm's step-down correction: the chance of any false rejection stays at the level, whatever the dependence."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    return adjusted


def detectable(spread: float, n_contents: int, *, alpha: float = 1 - CONFIDENCE, power: float = POWER) -> float:
    """Smallest true mean of a paired quantity that a two-sided t-test finds with the given power.

    (t[1 - alpha/2] + t[power]) spread / sqrt(n), quantiles of Student's t with n - 1 degrees of freedom.

    Args:
        spread: Standard deviation of the quantity over contents, >= 0.
        n_contents: At least 2.
        alpha: Level of the test in (0, 1); divide it by the number of comparisons where there are several.
        power: In [0.5, 1).

    Returns:
        In units of the score; infinite below 2 contents.

    Raises:
        UsageError: an argument out of range.
    """
    from scipy.special import stdtrit

    if not (0 < alpha < 1 and 0.5 <= power < 1 and spread >= 0):
        raise UsageError(
            f"detectable needs alpha in (0, 1), power in [0.5, 1) and spread >= 0, got {alpha}, {power} and {spread}"
        )
    if n_contents < 2:
        return float("inf")
    quantiles = stdtrit(n_contents - 1, 1 - alpha / 2) + stdtrit(n_contents - 1, power)
    return float(quantiles * spread / np.sqrt(n_contents))


def detectable_difference(scores: Scores, *, alpha: float = 1 - CONFIDENCE, power: float = POWER) -> float:
    """Smallest true difference between two positions that is found after Bonferroni's correction over all pairs.

    Rests on the most variable pair; where scores are 0 and 1, at least one content is taken to differ between them.

    Args:
        scores: At least 2 positions; contents that have a score at each count.
        alpha: Joint level over all pairs, in (0, 1).
        power: In [0.5, 1).
    """
    complete = complete_contents(scores)
    n_contents, n_positions = complete.shape
    if n_contents < 2 or n_positions < 2:
        return float("inf")
    spread = float(_pair_errors(complete).max() * np.sqrt(n_contents))
    return detectable(spread, n_contents, alpha=alpha / (n_positions * (n_positions - 1) / 2), power=power)


def _half_widths(
    scores: Scores, best: int, generator: np.random.Generator, draws: int, confidence: float
) -> Float64[np.ndarray, "n_positions"]:
    """Half-widths of joint intervals: the largest studentised deviation over all pairs of positions, per draw.

    The bootstrap's critical value is that of a normal law; Student's t with n - 1 degrees of freedom exceeds the one
    that is used as often, since the spread itself is estimated. Never below that of a single interval, which only
    matters where hardly any scores differ.
    """
    from scipy.special import ndtr, ndtri, stdtrit

    n_contents = len(scores)
    errors = _pair_errors(scores)
    moved = resampled_means(scores, generator=generator, draws=draws) - scores.mean(axis=0)
    largest = np.zeros(draws)
    for place in range(scores.shape[1]):
        usable = errors[place] > 0
        if usable.any():
            deviations = np.abs(moved[:, [place]] - moved[:, usable]) / errors[place, usable]
            largest = np.maximum(largest, deviations.max(axis=1))
    drawn = np.quantile(largest, confidence) * np.sqrt(n_contents / (n_contents - 1))
    critical = -stdtrit(n_contents - 1, ndtr(-max(drawn, ndtri((1 + confidence) / 2))))
    return np.asarray(critical * errors[best])


def _pair_errors(scores: Scores) -> Float64[np.ndarray, "n_positions n_positions"]:
    """Standard error of the mean difference of every pair of positions.

    Where scores are 0 and 1 and two positions never differ, that of one content that does (1 / n): never having seen a
    difference does not exclude one. Other scores: exactly 0 there.
    """
    centred = scores - scores.mean(axis=0)
    products = centred.T @ centred / (len(scores) - 1)
    variances = np.diag(products)[:, None] + np.diag(products)[None, :] - 2 * products
    unit = np.finfo(np.float64).eps * len(scores)
    rounding = unit * np.diag(products).max() + np.square(unit * np.abs(scores).max())
    errors: np.ndarray = np.sqrt(np.where(variances > rounding, variances, 0.0) / len(scores))
    if is_binary(scores):
        errors = np.maximum(errors, (1 - np.eye(len(errors))) / len(scores))
    return errors


def _cross_fitted(scores: Scores, generator: np.random.Generator) -> Float64[np.ndarray, "n_positions"]:
    """Mean difference of every position to the one that is best on the other folds."""
    n_contents = len(scores)
    fold = np.empty(n_contents, dtype=np.int64)
    fold[generator.permutation(n_contents)] = np.arange(n_contents) % min(FOLDS, n_contents)
    gaps = np.empty_like(scores)
    for number in range(fold.max() + 1):
        best = int(np.argmax(scores[fold != number].mean(axis=0)))
        gaps[fold == number] = scores[fold == number] - scores[fold == number][:, [best]]
    mean: np.ndarray = gaps.mean(axis=0)
    return mean


def _holm_of_pairs(
    p_values: Float64[np.ndarray, "n_positions n_positions"],
) -> Float64[np.ndarray, "n_positions n_positions"]:
    """Holm's correction over the pairs above the diagonal, written to both sides of it."""
    rows, columns = np.triu_indices(len(p_values), k=1)
    adjusted = np.ones_like(p_values)
    adjusted[rows, columns] = adjusted[columns, rows] = holm(p_values[rows, columns])
    return adjusted


def _around(value: float, half_width: float) -> Interval:
    return Interval(value, value - half_width, value + half_width)


def _root(score: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where the falling function `score` crosses `level` between `low` and `high`, by bisection."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > level else (low, middle)
    return (low + high) / 2
