"""Kernels of interval masks: keys within a reach looking back, and forward keys inside a mutual prefix.

A = lower + upper + diagonal, each row divided by its normaliser, and each part a sum over distances
(docs/theory, section 1). The diagonal is kept apart throughout, so that content offsets of hundreds of nats neither
overflow nor swallow the off-diagonal part. Subclasses say how to sum over distances.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from posbias.architecture import HeadGroup
from posbias.theory.kernels.base import Kernel

Side = Literal["lower", "upper"]
"""Keys before the query, or after it."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The split of each row of one head: its off-diagonal part, and its diagonal."""

    off: Float64[np.ndarray, "n"]
    """Attention per unit of off-diagonal weight: 1 / normaliser."""
    diagonal: Float64[np.ndarray, "n"]
    """Attention of each query to itself."""


def split_rows(off: Float64[np.ndarray, "n"], diagonal_logit: float, sink_logit: float) -> Shares:
    """Normalise rows of off-diagonal weight `off` (0 for none) with a diagonal and a sink key, in log space.

    Both logits are relative to the unit of `off`. The largest of the three counts as 1, so nothing overflows and no
    digit is lost for offsets of any size.
    """
    top = max(0.0, diagonal_logit, sink_logit)
    unit = np.exp(-top)
    diagonal = np.exp(diagonal_logit - top)
    total = off * unit + diagonal + np.exp(sink_logit - top)
    alone = 1.0 if sink_logit == -np.inf else 1 / (1 + np.exp(np.minimum(sink_logit - diagonal_logit, 700.0)))
    safe = np.where(off > 0, total, 1.0)
    return Shares(np.where(off > 0, unit / safe, 0.0), np.where(off > 0, diagonal / safe, alone))


class IntervalKernel(Kernel):
    """Heads of one group, equal ones merged; each unique head h carries `weights[h]` of its layer."""

    def __init__(self, group: HeadGroup, n_positions: int) -> None:
        self.group = group
        self.n_positions = n_positions
        self.window = group.mask.reach(n_positions) - 1
        """Keys seen before the query's own position."""
        self.prefix = group.mask.mutual_prefix(n_positions)
        self.members: tuple[np.ndarray, ...] = self._unique_heads()
        """Heads of the group that each unique head stands for."""
        self.weights = np.array([len(member) for member in self.members]) / group.n_heads

    @abstractmethod
    def _unique_heads(self) -> tuple[Int64[np.ndarray, "members"], ...]:
        """The group's heads, equal ones together."""

    @abstractmethod
    def shares(self, head: int) -> Shares:
        """The split of the rows of a unique head."""

    @abstractmethod
    def scan(self, head: int, side: Side, signal: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """out_t = sum over d >= 1 of weight(d) signal_(t-d): distances on one side of the query, along the array."""

    def _lower(self, head: int, signal: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "n"]:
        if self.window == 0:
            return np.zeros_like(signal)
        if pull:
            return self.scan(head, "lower", signal[::-1].copy())[::-1]
        return self.scan(head, "lower", signal)

    def _upper(self, head: int, signal: Float64[np.ndarray, "n"], *, pull: bool) -> Float64[np.ndarray, "prefix"]:
        inner = signal[: self.prefix]
        if pull:
            return self.scan(head, "upper", inner.copy())
        return self.scan(head, "upper", inner[::-1].copy())[::-1]

    def pull_head(self, head: int, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """row @ A_head for one unique head."""
        shares = self.shares(head)
        scaled = row * shares.off
        out = np.asarray(self._lower(head, scaled, pull=True) + shares.diagonal * row)
        if self.prefix > 1:
            out[: self.prefix] += self._upper(head, scaled, pull=True)
        return out

    def push_head(self, head: int, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """A_head @ column for one unique head."""
        shares = self.shares(head)
        off = self._lower(head, column, pull=False).copy()
        if self.prefix > 1:
            off[: self.prefix] += self._upper(head, column, pull=False)
        return np.asarray(off * shares.off + shares.diagonal * column)

    def pull(self, row: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """Every head's pull, weighted."""
        total = np.zeros(self.n_positions)
        for head, weight in enumerate(self.weights):
            total += weight * self.pull_head(head, row)
        return total

    def push(self, column: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "n_positions"]:
        """Every head's push, weighted."""
        total = np.zeros(self.n_positions)
        for head, weight in enumerate(self.weights):
            total += weight * self.push_head(head, column)
        return total
