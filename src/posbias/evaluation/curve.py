"""The curve of scores over positions with everything that is said of it, as one object and as a plain record."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.shape import MiddleLoss, Shape, middle_loss, shape_of
from posbias.evaluation.statistics import (
    CONTENTS_FOR_CLAIM,
    Comparison,
    Scores,
    compare_to_best,
    complete_contents,
    detectable_difference,
    position_means,
)
from posbias.statistics import CONFIDENCE, Interval


@dataclass(frozen=True)
class CurveOptions:
    """How intervals and tests are made."""

    confidence: float = CONFIDENCE
    """Coverage of intervals in (0, 1); tests are at 1 minus it."""
    seed: int = 0
    """Of the folds, >= 0."""

    def __post_init__(self) -> None:
        if self.seed < 0 or not 0 < self.confidence < 1:
            raise UsageError(f"a curve needs confidence in (0, 1) and seed >= 0, got {self.confidence} and {self.seed}")


@dataclass(frozen=True)
class PositionCurve:
    """Scores by position of the moved item."""

    positions: tuple[int, ...]
    """Places of the item, ascending."""
    means: tuple[Interval, ...]
    """Mean score at each place, pointwise interval."""
    counts: tuple[int, ...]
    """Contents scored at each place; the others were skipped."""
    n_contents: int
    """Contents asked."""
    n_complete: int
    """Contents scored at every place; comparisons rest on these."""
    options: CurveOptions
    comparison: Comparison | None = None
    """Every place against the best; None below 2 places or 6 complete contents."""
    shape: Shape | None = None
    """U, monotone or flat; None below 2 places or 6 complete contents."""
    middle_loss: MiddleLoss | None = None
    """Ends minus middle; None below 3 places or 6 complete contents."""
    detectable: float | None = None
    """Smallest true difference between two places that is found with 80 % power after correction over all pairs."""
    gold_tokens: tuple[float, ...] | None = None
    """Mean token index of the item at each place, where the tokenizer is known."""
    findings: tuple[str, ...] = field(default=())
    """What is established, and what is not, one line each."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for a record; None where a number is infinite or undefined."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def position_curve(
    scores: Scores,
    *,
    positions: Sequence[int],
    gold_tokens: Sequence[float] | None = None,
    options: CurveOptions | None = None,
) -> PositionCurve:
    """Everything that paired scores say about positions.

    Args:
        scores: score[content, position], NaN where an example was skipped.
        positions: Place of each column, ascending.
        gold_tokens: Mean token index of the item in each column.
        options: Confidence and seed.

    Raises:
        UsageError: positions that do not ascend or do not fit the columns, or infinite scores.
    """
    options = options or CurveOptions()
    places = tuple(positions)
    if len(places) != scores.shape[1] or any(later <= earlier for earlier, later in itertools.pairwise(places)):
        raise UsageError(f"positions must ascend, one for each of the {scores.shape[1]} columns, got {list(places)}")
    if gold_tokens is not None and len(gold_tokens) != len(places):
        raise UsageError(f"{len(gold_tokens)} token places for {len(places)} positions; one is needed for each")
    complete = complete_contents(scores)
    comparison = shape = loss = smallest = None
    if len(complete) >= CONTENTS_FOR_CLAIM and len(places) >= 2:
        shape = shape_of(complete, positions=np.array(places, dtype=np.float64), alpha=1 - options.confidence)
        comparison = compare_to_best(
            complete, generator=np.random.default_rng(options.seed), confidence=options.confidence
        )
        smallest = detectable_difference(complete, alpha=1 - options.confidence)
        if len(places) > 2:
            loss = middle_loss(complete, confidence=options.confidence)
    return PositionCurve(
        positions=places,
        means=position_means(scores, confidence=options.confidence),
        counts=tuple(int(count) for count in (~np.isnan(scores)).sum(axis=0)),
        n_contents=len(scores),
        n_complete=len(complete),
        options=options,
        comparison=comparison,
        shape=shape,
        middle_loss=loss,
        detectable=smallest,
        gold_tokens=None if gold_tokens is None else tuple(float(place) for place in gold_tokens),
        findings=tuple(_findings(places, len(complete), comparison, shape, loss, smallest)),
    )


SHAPES = {
    "u": "a U: both ends are above the middle",
    "inverted_u": "an inverted U: both ends are below the middle",
    "rising": "a rise from first to last position; no U is established",
    "falling": "a fall from first to last position; no U is established",
    "unclear": "not flat, but neither a U nor a trend is established",
    "flat": "no dependence on the position is established",
}
"""What the labels of shapes say."""


def _findings(
    places: tuple[int, ...],
    n_complete: int,
    comparison: Comparison | None,
    shape: Shape | None,
    loss: MiddleLoss | None,
    smallest: float | None,
) -> Iterator[str]:
    """What is established, in words, every number with its interval or p-value."""
    if shape is None:
        yield (
            f"{n_complete} contents scored at every one of {len(places)} positions: too few for a claim, which "
            f"needs {CONTENTS_FOR_CLAIM} contents and 2 positions"
        )
    else:
        yield f"{SHAPES[shape.label]} (p against flat {shape.p_flat:.2g}, against no U {shape.p_u:.2g})"
    if loss is not None:
        yield f"ends minus middle {loss.value} (p {loss.p:.2g}; {loss.detectable:.3f} would be found with 80 % power)"
    if comparison is not None and smallest is not None:
        worst = min(comparison.differences, key=lambda difference: difference.interval.value)
        yield (
            f"position {places[worst.position]} against the best, {places[comparison.best]}: {worst.interval} jointly "
            f"over all pairs, {worst.cross_fitted:.3f} with the best chosen on other contents; "
            f"{smallest:.3f} would be found with 80 % power"
        )


def _plain(value: Any) -> Any:
    """JSON values: lists for tuples, None for numbers that are infinite or undefined."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
