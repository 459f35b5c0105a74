"""One profile in a few numbers, and distances between two: small functions of float64 distributions.

All act on the last axis and broadcast over the ones before it, so that thousands of bootstrap draws cost one call.
Position j is the cell [j/N, (j+1)/N) of the context, so a tenth of it cuts through cells if N is not a multiple of
10, and a flat profile has exactly 0.1 in each. Recency is reported twice, with and without the last position, whose
spike is another matter (docs/theory, section 2). What is undefined is NaN, what is infinite is infinite; both become
None in a record. To add one, register it here (docs/theory, section 6).
"""

import numpy as np
from jaxtyping import Float64

from posbias.registry import Registry

STATISTICS: Registry[object] = Registry("statistic")
METRICS: Registry[object] = Registry("metric")

Distributions = Float64[np.ndarray, "*#batch n_positions"]
"""One distribution over positions, or many along the leading axes."""
Values = Float64[np.ndarray, "..."]
"""One number per distribution, or per pair of them."""

TENTH = 0.1
SIGNED = ("first_over_middle", "last_over_middle")
"""Differences of shares, in [-1, 1]; no other statistic is negative."""
RESAMPLED = ("minimum_position",)
"""Statistics that jump from one value to another, and have no standard error."""


def share_of_span(profiles: Distributions, start: float, stop: float) -> Values:
    """Share of influence between two fractions of the context, cells on the border counted by the part inside.

    0 <= start <= stop <= 1; exactly stop - start for a flat profile.
    """
    n_positions = profiles.shape[-1]
    cells = np.arange(n_positions, dtype=np.float64)
    inside = np.minimum(cells + 1, stop * n_positions) - np.maximum(cells, start * n_positions)
    return np.asarray(profiles @ np.maximum(inside, 0.0))


@STATISTICS.register("first_tenth")
def first_tenth(profiles: Distributions) -> Values:
    """Share of the first tenth of the context: primacy. Flat: 0.1."""
    return share_of_span(profiles, 0.0, TENTH)


@STATISTICS.register("middle_tenth")
def middle_tenth(profiles: Distributions) -> Values:
    """Share of the tenth around the centre, 0.45 to 0.55. Flat: 0.1."""
    return share_of_span(profiles, 0.45, 0.55)


@STATISTICS.register("last_tenth")
def last_tenth(profiles: Distributions) -> Values:
    """Share of the last tenth of the context: recency. Flat: 0.1."""
    return share_of_span(profiles, 1 - TENTH, 1.0)


@STATISTICS.register("first_token")
def first_token(profiles: Distributions) -> Values:
    """Share of the first position alone. Flat: 1/N."""
    return np.asarray(profiles[..., 0])


@STATISTICS.register("last_token")
def last_token(profiles: Distributions) -> Values:
    """Share of the last position alone. Flat: 1/N."""
    return np.asarray(profiles[..., -1])


@STATISTICS.register("interior_recency")
def interior_recency(profiles: Distributions) -> Values:
    """Share of the last tenth apart from the last position. Flat: 0.1 - 1/N; 0 if N < 10."""
    covered = min(TENTH * profiles.shape[-1], 1.0)
    return np.asarray(np.maximum(last_tenth(profiles) - covered * last_token(profiles), 0.0))


@STATISTICS.register("first_over_middle")
def first_over_middle(profiles: Distributions) -> Values:
    """First tenth minus middle tenth: positive if the beginning outweighs the middle. Flat: 0."""
    return np.asarray(first_tenth(profiles) - middle_tenth(profiles))


@STATISTICS.register("last_over_middle")
def last_over_middle(profiles: Distributions) -> Values:
    """Last tenth, its last position left out and scaled to a full tenth, minus middle tenth. Flat: 0.

    Without the last position, so that a spike there does not pass for a rise towards the end; NaN if N < 20.
    """
    n_positions = profiles.shape[-1]
    if n_positions < 20:
        return np.full(profiles.shape[:-1], np.nan)
    tenth = interior_recency(profiles) * (TENTH / (TENTH - 1 / n_positions))
    return np.asarray(tenth - middle_tenth(profiles))


@STATISTICS.register("mean_position")
def mean_position(profiles: Distributions) -> Values:
    """Centre of mass on positions / (N - 1), in [0, 1]. Flat: 0.5."""
    n_positions = profiles.shape[-1]
    return np.asarray(profiles @ (np.arange(n_positions, dtype=np.float64) / max(n_positions - 1, 1)))


@STATISTICS.register("minimum_position")
def minimum_position(profiles: Distributions) -> Values:
    """Position of the smallest influence between the first and the last position, both left out.

    Several equal minima (a dead zone) count as their middle one, the earlier of two. NaN if there is no minimum:
    a constant interior, or fewer than 3 positions.
    """
    interior = profiles[..., 1:-1]
    if interior.shape[-1] == 0:
        return np.full(profiles.shape[:-1], np.nan)
    smallest = interior.min(axis=-1, keepdims=True)
    lowest = interior == smallest
    rank = np.cumsum(lowest, axis=-1)
    middle = (rank[..., -1:] + 1) // 2
    position = np.argmax(rank >= middle, axis=-1) + 1.0
    return np.asarray(np.where(lowest.all(axis=-1), np.nan, position))


@METRICS.register("wasserstein")
def wasserstein(predicted: Distributions, measured: Distributions) -> Values:
    """Wasserstein-1 distance with positions scaled to j / (N - 1).

    sum_j |F_j - G_j| / (N - 1) over the cumulative sums F, G: the share of influence times the share of the context
    it has to travel. In [0, 1]; 0 for a single position.
    """
    gaps = np.abs(np.cumsum(predicted - measured, axis=-1)[..., :-1])
    return np.asarray(gaps.sum(axis=-1) / max(predicted.shape[-1] - 1, 1))


@METRICS.register("spearman")
def spearman(predicted: Distributions, measured: Distributions) -> Values:
    """Rank correlation over positions, ties at their mean rank; NaN if either profile is constant.

    Nearly automatic for two monotone profiles: never read it alone.
    """
    from scipy.stats import rankdata  # half a second to import

    middle = (predicted.shape[-1] + 1) / 2
    first, second = (np.asarray(rankdata(each, axis=-1), np.float64) - middle for each in (predicted, measured))
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    product = (first * second).sum(axis=-1)
    return np.asarray(np.divide(product, scale, out=np.full(np.shape(scale), np.nan), where=scale > 0))


@METRICS.register("total_variation")
def total_variation(predicted: Distributions, measured: Distributions) -> Values:
    """Half the absolute differences: the share of influence that sits at the wrong positions, in [0, 1]."""
    return np.asarray(np.abs(predicted - measured).sum(axis=-1) / 2)


@METRICS.register("symmetric_kl")
def symmetric_kl(predicted: Distributions, measured: Distributions) -> Values:
    """Mean of the two Kullback-Leibler divergences, sum_j (p_j - q_j) log(p_j / q_j) / 2, in nats.

    A position where both are zero adds nothing; if only one is zero the divergence is infinite.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = (predicted - measured) * (np.log(predicted) - np.log(measured))
    return np.asarray(np.where(predicted == measured, 0.0, terms).sum(axis=-1) / 2)


@METRICS.register("log_error")
def log_error(predicted: Distributions, measured: Distributions) -> Values:
    """Median over positions of |log(p_j / q_j)|: the typical relative error, small influences counted like large ones.

    Natural logarithm: 0.1 means that half of the positions are predicted within a factor exp(0.1) = 1.105. Two zeros
    agree (error 0), a zero beside a positive value is infinitely wrong.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(np.log(predicted) - np.log(measured))
    return np.asarray(np.median(np.where(predicted == measured, 0.0, error), axis=-1))


@METRICS.register("minimum_shift")
def minimum_shift(predicted: Distributions, measured: Distributions) -> Values:
    """Positions from the measured interior minimum to the predicted one; negative: predicted too early.

    NaN if either profile has no interior minimum (see `minimum_position`), as the flat line.
    """
    return np.asarray(minimum_position(predicted) - minimum_position(measured))
