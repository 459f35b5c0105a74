"""Settings of `design`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from posbias.checks import CELLS, RESIDUAL_MIXING, Count, Flag, Natural, OneOf, checked
from posbias.errors import check_most
from posbias.registry import read_literal, split_numbers

STARTS = {"rollout": 8, "mean_field": 2}
"""Searches that each theory tries by default: for a rollout as many as there are sorts of starts, for networks, which
are slow, the likeliest."""

Length = Annotated[int, Ge(3)]


@checked
@dataclass(frozen=True)
class DesignOptions:
    """Settings of `design`."""

    depth: Annotated[int, Ge(1)] | None = None
    """Layers; needed unless an architecture or a model is given, which has its own."""
    heads: Annotated[int, Ge(1)] = 1
    """Heads per layer."""
    mixing: Annotated[Any, read_literal] = RESIDUAL_MIXING
    """Share of attention in each layer's update, 0 to 1: number, or list per layer; 0.1 is a residual network, 1 is
    attention alone."""
    theory: Annotated[str, OneOf(*STARTS), Flag(None)] = "rollout"
    """The theory that gives the profiles: "rollout", or for a model at initialisation "mean_field"."""
    n_positions: Annotated[Length | Annotated[Sequence[Length], MinLen(1), split_numbers], Flag("length")] = 512
    """Context length N >= 3, or several with commas, whose misfits are averaged."""
    starts: Count | None = None
    """Searches, of which the best counts; by default 8, of a model 2."""
    seed: Natural = 0
    """Seed of random starting points of searches."""

    def __post_init__(self) -> None:
        check_most("the profile at twice n_positions", 2 * max(self.lengths), CELLS)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths, ascending, each once."""
        listed = self.n_positions if isinstance(self.n_positions, Sequence) else [self.n_positions]
        return tuple(sorted(set(listed)))
