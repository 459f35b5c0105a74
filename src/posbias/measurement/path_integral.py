"""Integrals of a gradient along a straight path, refined where the score itself says that they are off.

The gradient's integral over a piece of the path must be the change of the score over the piece, which costs nothing to
know. So the error of every piece is measured, not estimated, and the worst are halved until the rest is small.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

FINEST = 2.0**-20
"""Width from which on no piece is halved: float32 embeddings move in steps of 2^-24. A jump of the score, where other
experts are chosen, is narrowed down to this and stays in the gap."""

Evaluate = Callable[[list[float]], tuple[Float64[np.ndarray, "place"], Float64[np.ndarray, "place n"]]]
"""Places in (0, 1] to the scores there and the slopes d score / d place, shared out among n inputs."""


@dataclass(frozen=True, eq=False)
class PathIntegral:
    """The score's change between the ends, shared out."""

    values: Float64[np.ndarray, "n"]
    """Signed."""
    gap: float
    """Sum over the pieces of |what the values miss of the score's change there|."""
    steps: int
    """Places that were evaluated."""


def integrate_path(
    evaluate: Evaluate, ends: tuple[float, float], *, steps: int, tolerance: float, at_once: int = 1
) -> PathIntegral:
    """Simpson's rule on pieces of [0, 1], the midpoint rule on the first: networks may have no gradient at 0 itself.

    Args:
        evaluate: Scores and slopes at places of the path.
        ends: The scores at 0 and 1.
        steps: Places evaluated at most, >= 1; 1 is the midpoint of the whole path.
        tolerance: Stop when the gap of what can still be halved is at most this share of the sum of |values|, >= 0.
        at_once: Places per call of `evaluate` at most, >= 1.

    Returns:
        The integral; not finite where a score or slope is not.
    """
    path = _Path(evaluate, ends, at_once)
    path.visit({0.5})
    pieces = [path.piece(0.0, 1.0)]
    while True:
        values = np.sum([piece.values for piece in pieces], axis=0)
        halvable = sorted((piece for piece in pieces if piece.high - piece.low > FINEST), key=lambda piece: piece.gap)
        open_gap = sum(piece.gap for piece in halvable)
        if not np.isfinite(open_gap) or open_gap <= tolerance * np.abs(values).sum():
            break
        alike = [piece for piece in halvable if piece.gap >= halvable[-1].gap / 2]
        chosen = alike[-max(1, (steps - path.steps) // 2) :]
        halves = [half for piece in chosen for half in piece.halves]
        wanted = path.missing(halves)
        if path.steps + len(wanted) > steps:
            break
        path.visit(wanted)
        pieces = [piece for piece in pieces if piece not in chosen] + [path.piece(low, high) for low, high in halves]
    return PathIntegral(values, float(np.sum([piece.gap for piece in pieces])), path.steps)


@dataclass(frozen=True, eq=False)
class _Piece:
    low: float
    high: float
    values: Float64[np.ndarray, "n"]
    gap: float
    """|what the values miss of the score's change|."""

    @property
    def halves(self) -> tuple[tuple[float, float], tuple[float, float]]:
        middle = (self.low + self.high) / 2
        return (self.low, middle), (middle, self.high)


class _Path:
    """What is known of the places that were evaluated."""

    def __init__(self, evaluate: Evaluate, ends: tuple[float, float], at_once: int) -> None:
        self._evaluate, self._at_once = evaluate, at_once
        self._scores = dict(zip((0.0, 1.0), ends, strict=True))
        self._slopes: dict[float, np.ndarray] = {}

    @property
    def steps(self) -> int:
        return len(self._slopes)

    def missing(self, halves: list[tuple[float, float]]) -> set[float]:
        """Places that the rules on these pieces need."""
        needed = {place for low, high in halves for place in (low, (low + high) / 2, high) if low > 0}
        needed |= {high / 2 for low, high in halves if low == 0}
        return needed - self._slopes.keys()

    def visit(self, wanted: set[float]) -> None:
        places = sorted(wanted)
        for begin in range(0, len(places), self._at_once):
            chunk = places[begin : begin + self._at_once]
            scores, slopes = self._evaluate(chunk)
            self._scores |= dict(zip(chunk, scores.tolist(), strict=True))
            self._slopes |= dict(zip(chunk, slopes, strict=True))

    def piece(self, low: float, high: float) -> _Piece:
        middle = self._slopes[(low + high) / 2]
        values = high * middle
        if low > 0:
            values = (high - low) / 6 * (self._slopes[low] + 4 * middle + self._slopes[high])
        return _Piece(low, high, values, abs(float(values.sum()) - (self._scores[high] - self._scores[low])))
