"""Cells of the in-context retrieval studies: which members belong together, and their gaps and sinks over seeds.

A gap is accuracy where place a holds the right label and place b a copy of its item, minus the same with the labels'
roles exchanged: positive means a bias towards the earlier place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.papers.outcomes import Outcomes
from posbias.papers.paired import Difference, difference

GAPS = ("first vs middle", "first vs last", "middle vs last")
FIRST_MIDDLE, FIRST_LAST, MIDDLE_LAST = range(3)
PLAIN: dict[str, Any] = {
    "mask": "causal",
    "encoding": "none",
    "depth": 2,
    "residual": False,
    "answers": "any",
    "items": "mixture",
    "scale": "variance",
}
"""What a cell is unless it says otherwise."""
ENCODINGS = {"none": "none", "decay": "decay", "rope": "RoPE", "sinusoidal": "sin"}
"""Encodings as figures name them."""

PerSeedGaps = Float64[np.ndarray, "n_seeds 3"]


@dataclass(frozen=True, eq=False)
class Cells:
    """The outcomes of one variant of the task (mixture or fixed vocabulary, one scale)."""

    outcomes: Outcomes
    base: Mapping[str, Any]
    """Factors that all its cells share, over those of `PLAIN`."""
    design: str = "gaps"
    """`gaps`: the source's evaluation sets; `unconfounded`: the right label stands nowhere else in the context."""

    def factors(self, **changed: Any) -> dict[str, Any]:
        """All factors of a cell."""
        return {**PLAIN, **self.base, **changed}

    def has(self, *cells: Mapping[str, Any]) -> bool:
        """Whether all these cells have finished members of common seeds."""
        return bool(self.outcomes.common_seeds(*(self.factors(**cell) for cell in cells)))

    def values(self, name: str, *cells: Mapping[str, Any]) -> list[Float64[np.ndarray, "n_seeds ..."]]:
        """An array of every cell over their common seeds."""
        chosen = [self.factors(**cell) for cell in cells]
        seeds = self.outcomes.common_seeds(*chosen)
        return [self.outcomes.values(name, cell, seeds) for cell in chosen]

    def gaps(self, *cells: Mapping[str, Any]) -> list[PerSeedGaps]:
        """The three gaps of every cell over their common seeds."""
        return self.values(self.design, *cells)

    def depths(self, **changed: Any) -> list[int]:
        """Depths that were trained for a cell, in order."""
        factors = self.factors(**changed)
        del factors["depth"]
        return sorted(
            depth for depth in self.outcomes.levels("depth", **factors) if self.has({**changed, "depth": depth})
        )


def slope(rows: Sequence[Float64[np.ndarray, "n_seeds"]], at: Sequence[int]) -> Difference:
    """Least-squares slope per unit of `at`, seed by seed."""
    centred = np.asarray(at, dtype=np.float64) - np.mean(at)
    return difference(centred @ np.stack(rows) / np.sum(centred**2))


class Figures:
    """Numbers of the source's figures for a variant of the task."""

    def __init__(self, items: str) -> None:
        mixture = items == "mixture"
        self.fixed = not mixture
        self.depth = "Figures 2 and 4" if mixture else "Figure 9"
        self.residual = "Figures 2 and 5" if mixture else "Figure 10"
        self.ends = "Figure 3" if mixture else "Figure 11a"
        self.places = "Figure 6" if mixture else "Figures 11b-d"
        self.sinks = "Figure 8" if mixture else "Figure 13"
