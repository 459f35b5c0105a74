"""Paired statistics of scores by position: the samples are the independent units, every one put at all positions.

Input is always score[sample, position], such as 1 and 0 for right and wrong, or log-probabilities; NaN where an
example was skipped. Means use every score there is; comparisons use the samples that have a score at all positions.
Scores that all lie in 0 ... 1 are taken for shares: neither they nor their differences leave that range.
"""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.statistics import (
    CONFIDENCE,
    Estimate,
    Interval,
    detectable,
    estimate,
    mean_of,
    paired_shares,
    wilson,
)

FOLDS = 10
"""Parts of the samples for cross-fitting: the best position is chosen on nine tenths, and judged on the tenth."""
SAMPLES_FOR_CLAIM = 6
"""Complete samples below which nothing is compared: with fewer, even samples that all agree do not reach 5 %."""
AGREEMENT = 1e-9
"""Relative differences between samples that count as none, far above rounding."""

Scores = Float64[np.ndarray, "n_samples n_positions"]
Weights = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of scores over positions, whose weights sum to 0, tested over samples."""

    value: Interval
    """Mean over samples, in units of the score; it leaves out 0 exactly where `p` is below 1 - its confidence."""
    p: float
    """Two-sided p-value; of n samples that all agree 2^(1-n), what so many could show at most."""

    def p_one_sided(self, sign: int) -> float:
        """One-sided p-value for a value above (1) or below (-1) 0."""
        return self.p / 2 if sign * self.value.value > 0 else 1 - self.p / 2


@dataclass(frozen=True)
class Difference:
    """One position against the best one, on the same samples."""

    position: int
    """Index of the position (column)."""
    interval: Interval
    """Mean score minus that of the best position, <= 0, with an interval that holds jointly over all pairs of positions
    (Bonferroni): Tango's where scores are 0 and 1."""
    cross_fitted: float
    """The same against the position that is best on the other samples: free of the luck by which a best one is chosen,
    not of that by which this one is not it (among equal positions under a third of the bias is left)."""
    p: float
    """Two-sided p-value of this pair alone: McNemar's exact test where scores are 0 and 1."""
    adjusted_p: float
    """The same times the number of pairs, so that choosing the best is paid for; below 1 - confidence exactly where
    `interval` leaves out 0."""


@dataclass(frozen=True)
class Comparison:
    """All positions against the best one."""

    best: int
    """Index of the position with the highest mean; the first of several."""
    differences: tuple[Difference, ...]
    """One for each other position, in order."""
    n_samples: int


def complete_samples(
    scores: Scores, purpose: str = "", *, n_positions: int = 2
) -> Float64[np.ndarray, "n_complete n_positions"]:
    """The samples that have a score at every position.

    Refused are infinite scores, no positions, and, for a named purpose, too few samples or positions for a claim.
    """
    if scores.shape[1] < 1:
        raise UsageError("scores need at least 1 position, got none")
    if np.isinf(scores).any():
        raise UsageError("scores must be finite numbers, or NaN where an example was skipped; got an infinite one")
    complete: np.ndarray = scores[~np.isnan(scores).any(axis=1)]
    if purpose and (complete.shape[1] < n_positions or len(complete) < SAMPLES_FOR_CLAIM):
        raise UsageError(
            f"{purpose} needs {n_positions} positions and {SAMPLES_FOR_CLAIM} complete samples, "
            f"got {complete.shape[1]} and {len(complete)}"
        )
    return complete


def is_binary(scores: Float64[np.ndarray, "..."]) -> bool:
    """Whether every score that is there is 0 or 1."""
    return bool(np.isin(scores[~np.isnan(scores)], (0.0, 1.0)).all())


def position_means(scores: Scores) -> tuple[Interval, ...]:
    """Mean score at each position, each with its own (pointwise) interval.

    Wilson's interval where all scores are 0 or 1, which stays honest at 0 % and 100 %; NaN within (-inf, inf) where
    nothing was scored.
    """
    complete_samples(scores)
    columns = [column[~np.isnan(column)] for column in scores.T]
    if is_binary(scores):
        return tuple(wilson(column) for column in columns)
    least, most = _limits(scores, np.ones(1))
    unscored = Interval(np.nan, -np.inf, np.inf)
    return tuple(mean_of(column).interval(least=least, most=most) if len(column) else unscored for column in columns)


def compare_to_best(scores: Scores, *, generator: np.random.Generator, confidence: float = CONFIDENCE) -> Comparison:
    """Every position against the best one, with the choice of the best accounted for.

    The best of several equal positions looks better than it is. Two answers to that: intervals and p-values hold for
    all pairs of positions at once, hence for whichever pair is chosen afterwards; and `cross_fitted` estimates the
    difference with the best position chosen on other samples.

    Args:
        scores: At least 2 positions, and at least 6 samples that have a score at each.
        generator: Source of the folds.
        confidence: Joint coverage of the intervals, in (0, 1).

    Raises:
        UsageError: fewer positions or samples, or an infinite score.
    """
    complete = complete_samples(scores, "a comparison")
    n_samples, n_positions = complete.shape
    best, pairs = int(np.argmax(complete.mean(axis=0))), n_positions * (n_positions - 1) // 2
    fitted, binary = _cross_fitted(complete, generator), is_binary(complete)
    differences = []
    for position in range(n_positions):
        if position == best:
            continue
        if binary:
            interval, p = paired_shares(complete[:, position], complete[:, best], 1 - (1 - confidence) / pairs)
        else:
            tested = contrast_of(complete, _pair_weights(n_positions, position, best), (1 - confidence) / pairs)
            interval, p = tested.value, tested.p
        differences.append(Difference(position, interval, float(fitted[position]), p, min(1.0, pairs * p)))
    return Comparison(best, tuple(differences), n_samples)


def contrast_of(scores: Scores, weights: Weights, alpha: float = 1 - CONFIDENCE) -> Contrast:
    """Test and interval of a contrast over samples: Student's and the one corrected for skewness, at once.

    Scores of 0 and 1: the error is at least that of one sample which differs at one position, since never having seen
    a difference does not exclude one.

    At least 2 samples, no NaN; the weights sum to 0; the interval covers 1 - alpha.
    """
    found = _mean_contrast(scores, weights)
    values = scores @ weights
    agree = np.ptp(values) <= AGREEMENT * np.abs(values).max()
    p = max(float(found.p()), 2.0 ** (1 - len(scores)) if agree else 0.0)
    least, most = _limits(scores, weights)
    interval = found.interval(1 - alpha, least=least, most=most)
    return Contrast(interval if p < alpha else interval.including(0.0), p)


def spread_of(scores: Scores, weights: Weights) -> float:
    """Standard deviation of a contrast over samples, as `contrast_of` takes it."""
    return float(_mean_contrast(scores, weights).error * np.sqrt(len(scores)))


def detectable_difference(scores: Scores) -> float:
    """Smallest true difference between two positions found with 80 % power after Bonferroni's correction over pairs.

    Rests on the most variable pair of at least 2 positions, and on the samples that have a score at each; where scores
    are 0 and 1, at least one sample is taken to differ between them.
    """
    complete = complete_samples(scores)
    pairs = list(combinations(range(complete.shape[1]), 2))
    spread = max(spread_of(complete, _pair_weights(complete.shape[1], *pair)) for pair in pairs)
    return detectable(spread, len(complete), alpha=(1 - CONFIDENCE) / len(pairs))


def _pair_weights(n_positions: int, first: int, second: int) -> Weights:
    """First position minus second."""
    weights = np.zeros(n_positions)
    weights[first], weights[second] = 1.0, -1.0
    return weights


def _mean_contrast(scores: Scores, weights: Weights) -> Estimate:
    """Mean of a contrast over samples, with the least error that so many samples can have."""
    count, values, scale = len(scores), scores @ weights, float(np.abs(weights).sum() * np.abs(scores).max())
    mean = float(values.mean())
    if abs(mean) <= np.finfo(np.float64).eps * len(weights) * scale:
        mean = 0.0
    found = estimate(np.array(mean), values, scale=scale)
    least = np.abs(weights).max() / count if is_binary(scores) else 0.0
    if found.error >= least:
        return found
    return replace(found, error=np.array(least), skewness=np.zeros(()), freedom=np.array(count - 1.0))


def _limits(scores: Float64[np.ndarray, "..."], weights: Weights) -> tuple[float, float]:
    """Between which values a weighted sum of such scores must lie; finite where they are shares."""
    shares = bool(np.nanmin(scores, initial=0.0) >= 0 and np.nanmax(scores, initial=0.0) <= 1)
    return (float(weights[weights < 0].sum()), float(weights[weights > 0].sum())) if shares else (-np.inf, np.inf)


def _cross_fitted(scores: Scores, generator: np.random.Generator) -> Float64[np.ndarray, "n_positions"]:
    """Mean difference of every position to the one that is best on the other folds."""
    n_samples = len(scores)
    fold = np.empty(n_samples, dtype=np.int64)
    fold[generator.permutation(n_samples)] = np.arange(n_samples) % min(FOLDS, n_samples)
    gaps = np.empty_like(scores)
    for number in range(fold.max() + 1):
        best = int(np.argmax(scores[fold != number].mean(axis=0)))
        gaps[fold == number] = scores[fold == number] - scores[fold == number][:, [best]]
    mean: np.ndarray = gaps.mean(axis=0)
    return mean
