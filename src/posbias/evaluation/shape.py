"""Is a curve of scores over positions a U, monotone or flat? Tests on paired contents that do not assume its form.

Two questions, in this order. Is it flat: linear and quadratic orthogonal contrasts, corrected by Holm. If not, is it a
U: both ends above the middle, each tested on its own; a monotone curve cannot satisfy both, whatever its form.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.evaluation.statistics import (
    CONTENTS_FOR_CLAIM,
    Contrast,
    Scores,
    Weights,
    complete_contents,
    contrast_of,
    spread_of,
)
from posbias.statistics import CONFIDENCE, Interval, detectable, holm

END_SHARE = 5
"""An end is one fifth of the positions, rounded down, at least one; the middle is all between the two ends."""


@dataclass(frozen=True)
class Shape:
    """What the contents establish about the form of the curve."""

    label: str
    """`u`, `inverted_u`, `rising`, `falling`, `unclear` (not flat, but none of these) or `flat` (not shown otherwise).
    `rising` and `falling` say that the trend is established and no U is, not that every step goes that way; `flat`
    says that nothing is established, so read it beside the detectable effect."""
    p_flat: float
    """Holm-corrected p-value of the null hypothesis that the curve is flat: the smaller of trend's and bend's."""
    p_u: float
    """p-value against every curve that is not a U: the larger of the two one-sided ones; 1 with 2 positions."""
    p_inverted_u: float
    """The same for an inverted U."""
    linear: Contrast
    """Trend: fitted change of the score from the first position to the last."""
    quadratic: Contrast | None
    """Bend: fitted height of the ends over the centre; None with 2 positions."""
    first_end: Contrast | None
    """Mean of the first end minus mean of the middle; None with 2 positions."""
    last_end: Contrast | None
    """Mean of the last end minus mean of the middle; None with 2 positions."""
    n_contents: int
    alpha: float


@dataclass(frozen=True)
class MiddleLoss:
    """How much is lost in the middle."""

    value: Interval
    """Mean of the two ends minus mean of the middle; its interval leaves out 0 exactly where `p` is below 1 - the
    confidence."""
    p: float
    """Two-sided p-value of no loss, as of any `Contrast`."""
    detectable: float
    """Smallest true loss that so many contents of this spread find with 80 % power; at 5 %, or 1 - the confidence."""
    end_size: int
    """Positions in each end."""
    n_contents: int


def shape_of(scores: Scores, *, positions: Weights | None = None, alpha: float = 1 - CONFIDENCE) -> Shape:
    """Decide between U, inverted U, rising, falling and flat.

    1. Flat unless the Holm-corrected p-value of the linear or of the quadratic contrast is at most alpha: of flat
       curves at most a share alpha gets any other label.
    2. Then a U if both ends lie above the middle, each one-sided at alpha (an intersection-union test: of monotone
       curves, of whatever form, at most a share alpha is called a U); an inverted U if both lie below.
    3. Else rising or falling if the trend is established; else unclear.

    Args:
        scores: One row per content, NaN where skipped; at least 2 positions and 6 complete contents.
        positions: Places of the columns, ascending; None: 0, 1, 2 ...
        alpha: Level, in (0, 1).

    Raises:
        UsageError: fewer positions or contents, positions that do not ascend, an infinite score, alpha out of range.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must lie in (0, 1), got {alpha}")
    complete = complete_contents(scores)
    n_contents, n_positions = complete.shape
    if n_positions < 2 or n_contents < CONTENTS_FOR_CLAIM:
        raise UsageError(
            f"a shape needs 2 positions and {CONTENTS_FOR_CLAIM} complete contents, got {n_positions} and {n_contents}"
        )
    weights = polynomial_weights(np.arange(n_positions, dtype=np.float64) if positions is None else positions)
    if len(weights[0]) != n_positions:
        raise UsageError(f"{len(weights[0])} positions named for {n_positions} columns of scores")
    linear = contrast_of(complete, weights[0], alpha)
    if n_positions == 2:
        return Shape(_trend(linear, linear.p, alpha), linear.p, 1.0, 1.0, linear, None, None, None, n_contents, alpha)
    quadratic = contrast_of(complete, weights[1], alpha)
    first, last = (contrast_of(complete, row, alpha) for row in end_weights(n_positions))
    adjusted = holm(np.array([linear.p, quadratic.p]))
    p_u, p_inverted = max(first.p_above, last.p_above), max(first.p_below, last.p_below)
    if adjusted.min() > alpha:
        label = "flat"
    elif p_u <= alpha:
        label = "u"
    elif p_inverted <= alpha:
        label = "inverted_u"
    else:
        label = _trend(linear, float(adjusted[0]), alpha, otherwise="unclear")
    return Shape(
        label,
        float(adjusted.min()),
        p_u,
        p_inverted,
        linear,
        quadratic,
        first,
        last,
        n_contents=n_contents,
        alpha=alpha,
    )


def middle_loss(scores: Scores, *, confidence: float = CONFIDENCE) -> MiddleLoss:
    """Mean of the two ends minus mean of the middle, on contents that have a score at every position.

    Args:
        scores: One row per content, NaN where skipped.
        confidence: Coverage of the interval, in (0, 1).

    Raises:
        UsageError: fewer than 3 positions or 6 complete contents, or an infinite score.
    """
    complete = complete_contents(scores)
    n_contents, n_positions = complete.shape
    if n_positions < 3 or n_contents < CONTENTS_FOR_CLAIM:
        raise UsageError(
            f"a middle needs 3 positions and {CONTENTS_FOR_CLAIM} complete contents, got {n_positions} and {n_contents}"
        )
    weights = end_weights(n_positions).mean(axis=0)
    tested = contrast_of(complete, weights, 1 - confidence)
    return MiddleLoss(
        value=tested.value,
        p=tested.p,
        detectable=detectable(spread_of(complete, weights), n_contents, alpha=1 - confidence),
        end_size=end_size(n_positions),
        n_contents=n_contents,
    )


def polynomial_weights(positions: Weights) -> Float64[np.ndarray, "two n_positions"]:
    """Weights of the orthogonal linear and quadratic contrasts, in units of the score.

    Applied to scores: the change from first to last position of the fitted line, and the height of the ends over the
    centre of the fitted parabola. Both sum to 0; the second is orthogonal to every line.

    Args:
        positions: Finite, strictly ascending, at least 2. With 2 the quadratic weights are 0.

    Raises:
        UsageError: positions that are not.
    """
    if len(positions) < 2 or not (np.isfinite(positions).all() and (np.diff(positions) > 0).all()):
        raise UsageError(f"positions must ascend and be at least 2, got {positions.tolist()}")
    scaled = 2 * (positions - positions[0]) / (positions[-1] - positions[0]) - 1
    line = scaled - scaled.mean()
    bend = scaled**2 - (scaled**2).mean()
    bend = bend - line * (line @ bend) / (line @ line)
    curved = bend / (bend @ bend) if len(positions) > 2 else np.zeros(2)
    return np.stack([2 * line / (line @ line), curved])


def end_size(n_positions: int) -> int:
    """Positions that form one end."""
    return max(1, n_positions // END_SHARE)


def end_weights(n_positions: int) -> Float64[np.ndarray, "two n_positions"]:
    """Weights of first end minus middle, and of last end minus middle; at least 3 positions."""
    size = end_size(n_positions)
    first = np.zeros(n_positions)
    first[size : n_positions - size] = -1 / (n_positions - 2 * size)
    last = first.copy()
    first[:size] = 1 / size
    last[-size:] = 1 / size
    return np.stack([first, last])


def _trend(linear: Contrast, p: float, alpha: float, otherwise: str = "flat") -> str:
    if p > alpha:
        return otherwise
    return "rising" if linear.value.value > 0 else "falling"
