"""Distances between two profiles, each a small function of two float64 distributions over the same positions.

All act on the last axis and broadcast over the ones before it, so that thousands of bootstrap draws cost one call.
What a pair leaves undefined is NaN, what is infinite is infinite; both become None in a record (`finite`).
Docs/theory, section 6. To add a distance, register it here: comparisons, tables and reports pick it up.
"""

import math

import numpy as np
from jaxtyping import Float64

from posbias.comparison.statistics import minimum_position
from posbias.registry import Registry

METRICS: Registry[object] = Registry("metric")

Distributions = Float64[np.ndarray, "*#batch n_positions"]
"""One distribution over positions, or many along the leading axes."""
Values = Float64[np.ndarray, "..."]
"""One number per pair of distributions."""


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
    """Rank correlation over positions, ties at their mean rank; NaN where either profile is constant.

    Nearly automatic for two monotone profiles: never read it alone.
    """
    first, second = _centred_ranks(predicted), _centred_ranks(measured)
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

    A position where both are zero adds nothing; where only one is zero the divergence is infinite.
    """
    logarithm = _log_ratio(predicted, measured)
    differing = predicted != measured
    terms = np.multiply(predicted - measured, logarithm, out=np.zeros_like(logarithm), where=differing)
    return np.asarray(terms.sum(axis=-1) / 2)


@METRICS.register("log_error")
def log_error(predicted: Distributions, measured: Distributions) -> Values:
    """Median over positions of |log(p_j / q_j)|: the typical relative error, small influences counted like large ones.

    Natural logarithm: 0.1 means that half of the positions are predicted within a factor exp(0.1) = 1.105. Two zeros
    agree (error 0), a zero beside a positive value is infinitely wrong.
    """
    return np.asarray(np.median(np.abs(_log_ratio(predicted, measured)), axis=-1))


@METRICS.register("minimum_shift")
def minimum_shift(predicted: Distributions, measured: Distributions) -> Values:
    """Positions from the measured interior minimum to the predicted one; negative: predicted too early.

    NaN where either profile has no interior minimum (see `minimum_position`), as the flat line.
    """
    return np.asarray(minimum_position(predicted) - minimum_position(measured))


def finite(value: float) -> float | None:
    """`value` for a record: None where it is infinite or undefined, since JSON knows neither."""
    return float(value) if math.isfinite(value) else None


def _centred_ranks(profiles: Distributions) -> Distributions:
    from scipy.stats import rankdata  # half a second to import

    ranks = np.asarray(rankdata(profiles, axis=-1), dtype=np.float64)
    centred: np.ndarray = ranks - (profiles.shape[-1] + 1) / 2
    return centred


def _log_ratio(predicted: Distributions, measured: Distributions) -> Float64[np.ndarray, "... n_positions"]:
    """log(p / q) per position: 0 where both vanish, +-infinite where one does."""
    shape = np.broadcast_shapes(predicted.shape, measured.shape)
    with np.errstate(divide="ignore"):
        first, second = np.log(predicted), np.log(measured)
    unequal = np.broadcast_to(predicted != measured, shape)
    ratio: np.ndarray = np.subtract(first, second, out=np.zeros(shape), where=unequal)
    return ratio
