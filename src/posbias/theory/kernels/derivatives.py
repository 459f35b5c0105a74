"""The walk up a context that differentiates causal heads by their slopes or exponents, and pushes a column (section 1).

Two tables depend on the heads alone and are made in chunks: each query's attention to itself, and the height of the
derivative of its key's logit above its mean over the keys before. Layers that share a kernel share the tables.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float64

from posbias.theory.kernels.base import Kernel, SumKernel
from posbias.theory.kernels.keys import KeyKernel
from posbias.theory.kernels.linear import LinearKernel
from posbias.theory.kernels.loops import derivative_tables, sweep_derivatives

CHUNK = 2**14
"""Entries of a table, positions times heads, per call of the compiled loops: the tables stay in the cache."""
KEPT_CHUNKS = 256
"""Chunks whose tables are kept for the next layer with the same kernel: 64 MB at most."""

Vector = Float64[np.ndarray, "n_positions"]
OfHeads = Float64[np.ndarray, "heads"]
Table = Float64[np.ndarray, "n heads"]


class Walk:
    """A walk for the causal heads of one kernel without content and sinks, in every layer that has it."""

    def __init__(self, kernel: LinearKernel | KeyKernel, parameters: OfHeads, *, keep: bool) -> None:
        """`parameters` are the rates of slopes or the exponents of gamma keys; `keep` the tables for a next call."""
        self.kernel, self.parameters, self.keep = kernel, parameters, keep
        self._kept: list[tuple[Table, Table]] = []
        start = 0.0 if self.decaying else 1.0
        self._behind = np.full(parameters.size, start), np.zeros(parameters.size)

    @property
    def decaying(self) -> bool:
        """True if the heads have slopes."""
        return isinstance(self.kernel, LinearKernel)

    def __call__(self, column: Vector, row: Vector) -> tuple[Vector, OfHeads, OfHeads]:
        """The layer's mean attention times a column; for every unique head, row (dA / d parameter) column.

        Returns:
            The product; the derivatives by slope or exponent; and those by the logit of a query's own position.
        """
        weights, pushed = self.kernel.weights, np.empty_like(column)
        carried, derivatives = ((np.zeros(weights.size), np.zeros(weights.size)) for _ in range(2))
        for part, tables in self._tables():
            sweep_derivatives(column[part], row[part], tables, weights, carried, pushed[part], derivatives)
        return pushed, *derivatives

    def _tables(self) -> Iterator[tuple[slice, tuple[Table, Table]]]:
        """The tables, chunk by chunk; those that are not kept share one place."""
        n_positions, heads = self.kernel.n_positions, self.parameters.size
        length, (last, ahead) = max(CHUNK // heads, 1), self._behind
        state, shared = (last.copy(), ahead.copy()), None
        for index, low in enumerate(range(0, n_positions, length)):
            part = slice(low, min(low + length, n_positions))
            if index < len(self._kept):
                yield part, self._kept[index]
                continue
            keeps = self.keep and index < KEPT_CHUNKS
            room = np.empty((2, length, heads)) if keeps or shared is None else shared
            shared = shared if keeps else room
            share, lead = room[:, : part.stop - low]
            derivative_tables(self.parameters, self.decaying, low, state, share, lead)
            if keeps:
                self._kept.append((share, lead))
                self._behind = state[0].copy(), state[1].copy()
            yield part, (share, lead)


def walks(kernels: Sequence[Kernel]) -> dict[Kernel, Walk]:
    """Walks by kernel, or part of one: causal heads with slopes or gamma keys, without content and sinks."""
    parts = [part for kernel in kernels for part in (kernel.parts if isinstance(kernel, SumKernel) else (kernel,))]
    by_part: dict[Kernel, Walk] = {}
    for part in parts:
        parameters = _walked(part)
        if parameters is not None and part not in by_part:
            assert isinstance(part, LinearKernel | KeyKernel)
            by_part[part] = Walk(part, parameters, keep=parts.count(part) > 1)
    return by_part


def _walked(kernel: Kernel) -> OfHeads | None:
    """Rates or exponents of heads that can be walked; None for others."""
    if isinstance(kernel, KeyKernel):
        return kernel.alphas
    if not isinstance(kernel, LinearKernel) or kernel.slopes.min() < 0:
        return None
    bare = not np.any(kernel.group.content) and bool(np.all(kernel.group.sinks == -np.inf))
    whole = kernel.window >= kernel.n_positions - 1 and kernel.prefix < 2
    return kernel.rates if bare and whole else None
