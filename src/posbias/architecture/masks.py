"""Attention masks: the keys that each query sees.

Every mask here is an interval mask: query i sees keys max(0, i - reach + 1) ... i, and positions inside the mutual
prefix also see each other forwards. Two numbers therefore describe a mask at a given length, and every kernel in
`theory` works from these two (docs/theory, section 1).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, final

import numpy as np
from annotated_types import Ge
from jaxtyping import Bool, Int64

from posbias.registry import Registry, Spelled

MASKS: Registry["Mask"] = Registry(
    "mask", left={"chunks": "no family whose rollout is known has it; sliding_window stays"}
)


class Mask(Spelled, ABC):
    """A rule for the keys that each query sees."""

    def reach(self, n_positions: int) -> int:
        """Number of keys a query sees looking back, its own included (positions, 1 ... n_positions)."""
        return n_positions

    @final
    def keys_before(self, query: Any, n_positions: int) -> Any:
        """Number of keys that each query sees before its own position, the nearest ones.

        Args:
            query: Positions, an array of numpy or a tensor of torch, like what is returned.
            n_positions: Length of the context.
        """
        return query.clip(max=self.reach(n_positions) - 1)

    @abstractmethod
    def mutual_prefix(self, n_positions: int) -> int:
        """Number of leading positions that also see each other forwards (0 ... n_positions; below 2 means none)."""

    def visible(
        self, n_positions: int, queries: Int64[np.ndarray, "query"] | None = None
    ) -> Bool[np.ndarray, "query key"]:
        """The mask as a matrix, for small checks and dense fallbacks; of some queries only, if they are given."""
        query = np.arange(n_positions)[:, None] if queries is None else queries[:, None]
        key = np.arange(n_positions)[None, :]
        prefix = self.mutual_prefix(n_positions)
        backward = (key <= query) & (key >= query - self.keys_before(query, n_positions))
        forward = (key > query) & (query < prefix) & (key < prefix)
        return np.asarray(backward | forward)


@MASKS.register("causal")
@dataclass(frozen=True)
class Causal(Mask):
    """Each query sees itself and everything before it."""

    def mutual_prefix(self, n_positions: int) -> int:
        """No position sees forwards."""
        return 0


@MASKS.register("sliding_window")
@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Each query sees itself and the `width - 1` positions before it."""

    width: Annotated[int, Ge(1)]
    """Visible keys, the query's own position included (positions, >= 1)."""

    def reach(self, n_positions: int) -> int:
        """The window, or everything if the context is shorter."""
        return min(self.width, n_positions)

    def mutual_prefix(self, n_positions: int) -> int:
        """No position sees forwards."""
        return 0


@MASKS.register("prefix")
@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions see each other both ways; the rest is causal."""

    length: Annotated[int, Ge(1)]
    """Positions that see each other (>= 1; 1 is plain causal)."""

    def mutual_prefix(self, n_positions: int) -> int:
        """The prefix, or everything if the context is shorter."""
        return min(self.length, n_positions)


@MASKS.register("full")
@dataclass(frozen=True)
class Full(Mask):
    """Every position sees every position (no mask, as in an encoder)."""

    def mutual_prefix(self, n_positions: int) -> int:
        """All positions see each other."""
        return n_positions
