"""Integrals of a gradient along a straight path, refined where the score or the last refinement says that they are off.

The gradient's integral over a piece of the path must be the change of the score over the piece, which costs nothing to
know; what the piece misses of it is its gap. A gap may be small by chance while the shares are wrong, since it sees
their sum alone. So the error of a piece is the larger of its gap and what halving last changed in the shares there, and
the worst pieces are halved until the rest is small.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    error: float
    """Sum over the pieces of their gap or, where it is larger, of the shares that the last halving changed there; all
    of the shares where the path was never halved."""
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
        tolerance: Stop when the error of what can still be halved is at most this share of the sum of |values|, >= 0.
        at_once: Places per call of `evaluate` at most, >= 1.

    Returns:
        The integral; not finite where a score or slope is not.
    """
    path = _Path(evaluate, ends, at_once)
    path.visit({0.5})
    whole = path.piece(0.0, 1.0)
    pieces = [replace(whole, change=float(np.abs(whole.values).sum()))]
    while True:
        values = np.sum([piece.values for piece in pieces], axis=0)
        halvable = sorted((piece for piece in pieces if piece.high - piece.low > FINEST), key=lambda piece: piece.error)
        open_error = sum(piece.error for piece in halvable)
        if not np.isfinite(open_error) or open_error <= tolerance * np.abs(values).sum():
            break
        alike = [piece for piece in halvable if piece.error >= halvable[-1].error / 2]
        chosen = alike[-max(1, (steps - path.steps) // 2) :]
        halves = [half for piece in chosen for half in piece.halves]
        wanted = path.missing(halves)
        if path.steps + len(wanted) > steps:
            break
        path.visit(wanted)
        pieces = [piece for piece in pieces if piece not in chosen]
        pieces += [half for piece in chosen for half in path.halved(piece)]
    gap, error = (float(np.sum([getattr(piece, name) for piece in pieces])) for name in ("gap", "error"))
    return PathIntegral(values, gap, error, path.steps)


@dataclass(frozen=True, eq=False)
class _Piece:
    low: float
    high: float
    values: Float64[np.ndarray, "n"]
    gap: float
    """|what the values miss of the score's change|."""
    change: float = 0.0
    """Half of what the halving that made this piece changed, summed over |shares|."""

    @property
    def error(self) -> float:
        return max(self.gap, self.change)

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

    def halved(self, piece: _Piece) -> list[_Piece]:
        """Its two halves, with what they say otherwise than the whole."""
        first, second = (self.piece(low, high) for low, high in piece.halves)
        change = float(np.abs(first.values + second.values - piece.values).sum()) / 2
        return [replace(first, change=change), replace(second, change=change)]
