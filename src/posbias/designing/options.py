"""Settings of a design: the stack to be designed if no architecture is given, the theory, lengths and search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from posbias.architecture.mixing import RESIDUAL_MIXING
from posbias.checks import check_seed, check_size, check_whole, checked
from posbias.errors import UsageError
from posbias.limits import CELLS, REPEATS
from posbias.registry import split_numbers

STARTS = {"rollout": 8, "mean_field": 2}
"""Searches that each theory tries by default: for a rollout as many as there are sorts of starts, for networks, which
are slow, the likeliest."""


@checked
@dataclass(frozen=True)
class DesignOptions:
    """Settings of `design`."""

    depth: int | None = None
    """Layers L; needed unless an architecture or a model is given, which has its own."""
    heads: int = 1
    """Heads per layer."""
    mixing: Any = RESIDUAL_MIXING
    """Mixing as in `Architecture`; by default that of a residual network."""
    theory: str = "rollout"
    """The theory that gives the profiles: "rollout", or for a model at initialisation "mean_field"."""
    n_positions: int | Annotated[Sequence[int], split_numbers] = 512
    """Context length N >= 3, or several, whose misfits are averaged."""
    starts: int | None = None
    """Number of searches, of which the best counts; None: 8, and by mean field 2."""
    seed: int = 0
    """Seed of random starting points of searches, >= 0."""

    def __post_init__(self) -> None:
        if self.theory not in STARTS:
            raise UsageError(f"theory must be one of {', '.join(STARTS)}, got {self.theory!r}")
        check_seed(self.seed)
        check_size("starts", self.n_starts, REPEATS)
        asked = _listed(self.n_positions)
        for length in asked:
            check_whole("n_positions", length, least=3, numpy=True)
            CELLS.check("the profile at twice n_positions", 2 * int(length))
        if not asked:
            raise UsageError("n_positions needs at least one length")

    @property
    def n_starts(self) -> int:
        """Number of searches."""
        return STARTS[self.theory] if self.starts is None else self.starts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths, ascending, each once."""
        return tuple(sorted({int(length) for length in _listed(self.n_positions)}))


def _listed(n_positions: int | Sequence[int]) -> list[int]:
    return list(n_positions) if isinstance(n_positions, Sequence) else [n_positions]
