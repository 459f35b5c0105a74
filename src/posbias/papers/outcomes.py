"""Trained members as a table: factors, seed, status and arrays, so that analysis knows nothing of the trainer.

Rows are selected by factors and stacked over seeds; members that failed or diverged are counted, never averaged in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.errors import RunError

FINISHED = ("done", "stopped_early")
"""Statuses of members whose numbers count."""

LEFT_OUT = "did not finish and are left out"


@dataclass(frozen=True, eq=False)
class Outcome:
    """One trained model."""

    factors: Mapping[str, Any]
    """What sets it apart from other members, the seed excluded: mask, encoding, depth, ..."""
    seed: int
    status: str
    arrays: Mapping[str, np.ndarray]
    """Evaluations and profiles by name, float64; all members of equal factors have equal shapes."""

    @property
    def finished(self) -> bool:
        """Whether its numbers count."""
        return self.status in FINISHED

    def has(self, factors: Mapping[str, Any]) -> bool:
        """Whether it has all these factors."""
        return self.factors.items() >= factors.items()


@dataclass(frozen=True, eq=False)
class Seeded:
    """A number of trained members by seed and place."""

    seeds: tuple[int, ...]
    """Increasing; a seed is here only where all its places are."""
    rows: Float64[np.ndarray, "n_seeds n_places"]

    def __len__(self) -> int:
        return len(self.seeds)

    def at(self, seeds: Sequence[int]) -> Float64[np.ndarray, "n_chosen n_places"]:
        """The rows of some of its seeds."""
        return self.rows[[self.seeds.index(seed) for seed in seeds]]


def paired(
    first: Seeded, second: Seeded
) -> tuple[Float64[np.ndarray, "n_pairs n_places"], Float64[np.ndarray, "n_pairs n_places"], int]:
    """Rows of the seeds that both have, in one order, and how many seeds have no partner and are left out."""
    shared = sorted(set(first.seeds) & set(second.seeds))
    return first.at(shared), second.at(shared), len(set(first.seeds) ^ set(second.seeds))


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Members of one or several studies."""

    members: Sequence[Outcome]

    def seeds(self, **factors: Any) -> list[int]:
        """Seeds of the finished members with these factors, in order."""
        return sorted({member.seed for member in self.members if member.finished and member.has(factors)})

    def values(self, name: str, factors: Mapping[str, Any], seeds: Sequence[int]) -> Float64[np.ndarray, "n_seeds ..."]:
        """One array of the member with these factors and each seed, stacked.

        Raises:
            RunError: no such finished member, or several.
        """
        having = [member for member in self.members if member.finished and member.has(factors)]
        rows = []
        for seed in seeds:
            found = [member for member in having if member.seed == seed and name in member.arrays]
            if len(found) != 1:
                raise RunError(f"{len(found)} finished members with {dict(factors)}, seed {seed} and {name!r}; need 1")
            rows.append(np.asarray(found[0].arrays[name], dtype=np.float64))
        return np.stack(rows)

    def common_seeds(self, *cells: Mapping[str, Any]) -> list[int]:
        """Seeds for which every cell has a finished member."""
        return sorted(set.intersection(*(set(self.seeds(**cell)) for cell in cells))) if cells else []

    def levels(self, name: str, **factors: Any) -> list[Any]:
        """Values a factor takes among members with the given ones, in order of appearance."""
        return list(dict.fromkeys(m.factors[name] for m in self.members if name in m.factors and m.has(factors)))

    def known(self, name: str, factors: Mapping[str, Any]) -> bool:
        """Whether all finished members with these factors have that array."""
        return all(name in member.arrays for member in self.members if member.finished and member.has(factors))

    def lost_sentence(self) -> list[str]:
        """What did not finish; nothing where all did."""
        lost = self.lost()
        if not lost:
            return []
        return [f"{len(lost)} of {len(self.members)} members {LEFT_OUT}: {'; '.join(lost[:8])}."]

    def lost(self) -> list[str]:
        """A line per member that did not finish: what it was, and how it ended."""
        return [
            f"{', '.join(f'{name} {value}' for name, value in each.factors.items())}, seed {each.seed}: {each.status}"
            for each in self.members
            if not each.finished
        ]
