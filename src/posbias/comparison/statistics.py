"""What one profile says in a few numbers: shares of its parts, its mean position, where its minimum lies.

All act on the last axis and broadcast over the ones before it. Position j is the cell [j/N, (j+1)/N) of the context,
so a tenth of it cuts through cells where N is not a multiple of 10, and a flat profile has exactly 0.1 in each.
Recency is reported twice, with and without the last position, whose spike is another matter (docs/theory, section 2).
"""

import numpy as np
from jaxtyping import Float64

from posbias.registry import Registry

STATISTICS: Registry[object] = Registry("statistic")

Distributions = Float64[np.ndarray, "*batch n_positions"]
"""One distribution over positions, or many along the leading axes."""
Values = Float64[np.ndarray, "..."]
"""One number per distribution."""

TENTH = 0.1
SIGNED = ("first_over_middle", "last_over_middle")
"""Differences of shares, in [-1, 1]; no other statistic is negative."""
RESAMPLED = ("minimum_position",)
"""Statistics that jump from one value to another, and have no standard error."""


def share_of_span(profiles: Distributions, start: float, stop: float) -> Values:
    """Share of influence between two fractions of the context, cells on the border counted by the part inside.

    Args:
        profiles: Distributions over N positions, each summing to 1.
        start: Begin of the span as a fraction of the context, in [0, 1].
        stop: End of the span, in [start, 1].

    Returns:
        Shares in [0, 1]; exactly stop - start for a flat profile.
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


@STATISTICS.register("interior_primacy")
def interior_primacy(profiles: Distributions) -> Values:
    """Share of the first tenth apart from the first position. Flat: 0.1 - 1/N; 0 where N < 10."""
    covered = min(TENTH * profiles.shape[-1], 1.0)
    return np.asarray(np.maximum(first_tenth(profiles) - covered * first_token(profiles), 0.0))


@STATISTICS.register("interior_recency")
def interior_recency(profiles: Distributions) -> Values:
    """Share of the last tenth apart from the last position. Flat: 0.1 - 1/N; 0 where N < 10."""
    covered = min(TENTH * profiles.shape[-1], 1.0)
    return np.asarray(np.maximum(last_tenth(profiles) - covered * last_token(profiles), 0.0))


@STATISTICS.register("first_over_middle")
def first_over_middle(profiles: Distributions) -> Values:
    """First tenth minus middle tenth: positive where the beginning outweighs the middle. Flat: 0."""
    return np.asarray(first_tenth(profiles) - middle_tenth(profiles))


@STATISTICS.register("last_over_middle")
def last_over_middle(profiles: Distributions) -> Values:
    """Last tenth, its last position left out and scaled to a full tenth, minus middle tenth. Flat: 0.

    Without the last position, so that a spike there does not pass for a rise towards the end; NaN where N < 20.
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

    Several equal minima (a dead zone) count as their middle one, the earlier of two. NaN where there is no minimum:
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
