"""Orders of passages, and the curve they are made from: interpolated to the slots, shrunk towards flat.

An order is an array of slots: the r-th most relevant passage stands in `slots[r]`. Everything here takes many
resamples of the contents at once, as rows of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError
from posbias.evaluation.statistics import Scores

FLAT_LEVEL = 0.05
"""A curve counts as flat unless its F-test against flat reaches this."""

Slots = Int64[np.ndarray, "n_slots"]
Curves = Float64[np.ndarray, "draws n_slots"]


def best_first(n_slots: int) -> Slots:
    """Most relevant first: what most pipelines do."""
    return np.arange(n_slots)


def best_last(n_slots: int) -> Slots:
    """Most relevant last, next to the question that follows the passages."""
    return np.arange(n_slots)[::-1].copy()


def alternating(n_slots: int) -> Slots:
    """First, last, second, last but one ...: the least relevant passages in the middle."""
    places = np.arange(n_slots)
    return np.where(places % 2 == 0, places // 2, n_slots - 1 - places // 2)


REFERENCES: dict[str, Callable[[int], Slots]] = {
    "best_first": best_first,
    "best_last": best_last,
    "alternating": alternating,
}
"""The usual orders, which need no curve."""


def order_by_curve(curves: Curves) -> Int64[np.ndarray, "draws n_slots"]:
    """For every curve the slots from the best to the worst; equal slots from the front.

    Sum_r s_r c_slots[r] with s falling is then largest among all orders (rearrangement inequality; Hardy, Littlewood
    and Polya 1934, theorem 368).
    """
    return np.argsort(-curves, axis=1, kind="stable")


def slot_weights(positions: Sequence[int], *, n_items: int, n_slots: int) -> Float64[np.ndarray, "n_positions n_slots"]:
    """Matrix that carries a curve over measured positions to slots, linearly between relative positions j / (n - 1).

    Slots before the first or after the last measured position take its value. Columns sum to 1; the identity where all
    positions of as many items were measured.

    Args:
        positions: Measured places, ascending.
        n_items: Items in the measured contexts.
        n_slots: Passages to place, >= 1; one alone stands at relative position 0.

    Raises:
        UsageError: no slot.
    """
    if n_slots < 1:
        raise UsageError(f"placing needs at least 1 passage, got {n_slots}")
    measured = np.array(positions, dtype=np.float64) / max(n_items - 1, 1)
    wanted = np.arange(n_slots) / max(n_slots - 1, 1)
    return np.stack([np.interp(wanted, measured, row) for row in np.eye(len(measured))])


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Curves of many resamples, each shrunk by its own noise."""

    curves: Float64[np.ndarray, "draws n_positions"]
    kept: Float64[np.ndarray, "draws"]
    """Share of the differences kept, 0 where they do not stand out."""
    p_flat: Float64[np.ndarray, "draws"]


def shrink_to_flat(scores: Scores, weights: Float64[np.ndarray, "draws n_contents"]) -> Shrunk:
    """Mean curves, their differences multiplied by 1 - 1/F; exactly flat unless F is significant at 5 %.

    F is that of a two-way layout without replication (contents times positions): spread between positions over what
    contents and positions leave unexplained. 1 - 1/F is the share of that spread that is not noise.

    Args:
        scores: No NaN; at least 2 positions.
        weights: How often each content counts in each resample, >= 0; a resample of fewer than 2 contents is flat.

    Source: Morris 1983, "Parametric empirical Bayes inference", with the moment estimate of the signal; that a curve
    that is not significant is flat is our own, stricter rule.
    """
    from scipy.special import fdtrc

    n_positions = scores.shape[1]
    centred = scores - scores.mean(axis=1, keepdims=True)
    sizes = weights.sum(axis=1)
    safe = np.maximum(sizes, 1.0)
    means = weights @ scores / safe[:, None]
    deviations = weights @ centred / safe[:, None]
    between = safe * np.square(deviations).sum(axis=1) / (n_positions - 1)
    residual = (weights @ np.square(centred)).sum(axis=1) - safe * np.square(deviations).sum(axis=1)
    degrees = np.maximum(sizes - 1, 1) * (n_positions - 1)
    rounding = np.finfo(np.float64).eps * (1 + np.square(scores).sum())
    noise = np.where(residual > rounding, residual, 0.0) / degrees
    ratio = np.divide(between, noise, out=np.where(between > rounding, np.inf, 0.0), where=noise > 0)
    p_flat = np.where(np.isinf(ratio), 0.0, fdtrc(n_positions - 1, degrees, np.where(np.isinf(ratio), 0.0, ratio)))
    p_flat = np.where(sizes < 2, 1.0, p_flat)
    kept = np.where(p_flat <= FLAT_LEVEL, 1 - 1 / np.maximum(ratio, 1.0), 0.0)
    level = means.mean(axis=1, keepdims=True)
    return Shrunk(level + kept[:, None] * deviations, kept, p_flat)
