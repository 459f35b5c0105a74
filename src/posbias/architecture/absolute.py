"""Absolute positional encodings: vectors added to the input, which act on logits through given content vectors.

With queries from `query + p_i` and keys from `key + p_j`, the logit is scale * (query + p_i).(key + p_j). Terms of
the query alone cancel in the softmax, but `query.p_j` favours positions for every query and `p_i.p_j` joins pairs.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt
from jaxtyping import Float64, Int64

from posbias.architecture.encodings import ENCODINGS, Encoding
from posbias.checks import CELLS, Count
from posbias.errors import UsageError, check_most


@dataclass(frozen=True, kw_only=True)
class AbsoluteEncoding(Encoding):
    """An encoding whose bias depends on both positions, not on their distance alone; the same for every head."""

    relative = False
    query: Sequence[float] | None = None
    """Content of every query beside its position, `width` numbers; None: none."""
    key: Sequence[float] | None = None
    """Content of every key beside its position, `width` numbers; None: none."""
    scale: float | None = None
    """Factor of the product; None: 1 / sqrt(width)."""

    @abstractmethod
    def vectors_at(self, positions: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n feature"]:
        """The vector added to the input at each position.

        Raises:
            UsageError: a position that has no vector.
        """

    @property
    @abstractmethod
    def width(self) -> int:
        """Features of the vectors."""

    def logits(self, distance: Int64[np.ndarray, "n"], heads: int) -> Float64[np.ndarray, "heads n"]:
        """Refused: distance alone does not decide."""
        raise UsageError(f"encoding {self.name} depends on both positions, not on their distance alone")

    def pair_logits(
        self, query: Int64[np.ndarray, "n_queries"], key: Int64[np.ndarray, "n_keys"], heads: int
    ) -> Float64[np.ndarray, "heads n_queries n_keys"]:
        """scale * (query + p_i).(key + p_j)."""
        queries = self._content(self.query) + self.vectors_at(query)
        keys = self._content(self.key) + self.vectors_at(key)
        scale = self.width**-0.5 if self.scale is None else self.scale
        return np.broadcast_to(scale * queries @ keys.T, (heads, len(query), len(key)))

    def _content(self, vector: Sequence[float] | None) -> Float64[np.ndarray, "feature"]:
        return np.zeros(self.width) if vector is None else np.asarray(vector, dtype=np.float64)

    def _check_content(self) -> None:
        """Content vectors become tuples of the right length, or are refused."""
        for field in ("query", "key"):
            vector = getattr(self, field)
            if vector is None:
                continue
            values = np.asarray(vector, dtype=np.float64)
            if values.shape != (self.width,) or not np.all(np.isfinite(values)):
                raise UsageError(f"{self.name}: {field} must be {self.width} finite numbers, got shape {values.shape}")
            object.__setattr__(self, field, tuple(values.tolist()))
        if self.scale is not None and not np.isfinite(self.scale):
            raise UsageError(f"{self.name}: scale must be finite, got {self.scale}")


@ENCODINGS.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(AbsoluteEncoding):
    """Sines and cosines of the position at `width / 2` frequencies base^(-2k / width) (arXiv 1706.03762)."""

    width: Annotated[Count, Ge(2)] = 64
    """Features (even, >= 2)."""
    base: Annotated[float, Gt(1)] = 10000.0
    """Base of the geometric series of frequencies (> 1)."""

    def __post_init__(self) -> None:
        if self.width % 2:
            raise UsageError(f"sinusoidal: width must be an even number >= 2, got {self.width}")
        self._check_content()

    def vectors_at(self, positions: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n feature"]:
        """[sin, cos] pairs side by side, frequency by frequency."""
        check_most("sinusoidal: positions x width", len(positions) * self.width, CELLS)
        angles = positions[:, None] * self.base ** (-2 * np.arange(self.width // 2) / self.width)
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), self.width)


@ENCODINGS.register("learned")
@dataclass(frozen=True)
class Learned(AbsoluteEncoding):
    """A table of vectors, one per position; contexts are at most as long as the table."""

    vectors: Sequence[Sequence[float]]
    """[position][feature], finite."""

    def __post_init__(self) -> None:
        try:
            table = np.asarray(self.vectors, dtype=np.float64)
        except (TypeError, ValueError):
            table = np.zeros(0)
        if table.ndim != 2 or table.size == 0 or not np.all(np.isfinite(table)):
            raise UsageError("learned: vectors must be a table [position][feature] of finite numbers")
        object.__setattr__(self, "vectors", tuple(map(tuple, table.tolist())))
        self._check_content()

    @property
    def width(self) -> int:
        """Features of the table."""
        return len(self.vectors[0])

    def vectors_at(self, positions: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n feature"]:
        """Rows of the table."""
        if positions.size and positions.max() >= len(self.vectors):
            raise UsageError(f"learned: {len(self.vectors)} vectors given, position {positions.max()} asked")
        table = np.asarray(self.vectors, dtype=np.float64)
        return np.asarray(table[positions])
