"""A finished design as its record holds it, with the fields of `Design`, as far as they are stored.

Arrays, by length: `profile/N`, `before/N`, `target/N` and `choice/NAME/N` [n_positions]; `measured/N/{influence,low,
high}` [n_positions] and `measured/N/{networks,networks_before}` [networks n_positions]; `rows` [n_positions
n_positions], every row of a short rollout at the longest length asked for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import InstanceOf

from posbias.display.showing import Series, Shown
from posbias.profiles import Profile
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result, from_stored
from posbias.statistics import StoredInterval, StoredNumber

Arrays = Mapping[int, InstanceOf[np.ndarray]]
Profiles = Mapping[int, InstanceOf[Profile]]
ENDS = ("influence", "low", "high")


@dataclass(frozen=True)
class TriedDesign:
    """Another design, searched for because the first misses its target."""

    over: tuple[str, ...]
    mixing: float
    """Mean over layers."""
    met: bool
    left: Mapping[int, StoredNumber]
    """W1 to the target, by length asked for."""


@dataclass(frozen=True)
class MeasuredNetworks:
    """Networks at initialisation with the design and without, each with weights and a prompt of its own."""

    n_positions: int
    networks: int
    distance: StoredInterval
    """W1 of the designed networks' average to the target."""
    before: StoredInterval
    """W1 to the target without the design."""
    noise: StoredNumber
    """W1 of one half of the designed networks to the other, on average."""
    profile: InstanceOf[Profile]
    """Mean of the designed networks, with its interval."""


@RESULTS.register("design")
@dataclass(frozen=True, eq=False, repr=False)
class DesignRun(Result):
    """A finished design as stored."""

    record: InstanceOf[Record]
    title: str = ""
    """Target, free parameters, and what was designed."""
    target: str = ""
    """Spelling of the target."""
    whole: bool = False
    """True if the target says what the last position has."""
    over: tuple[str, ...] = ()
    theory: str = ""
    exact: bool = False
    met: bool = False
    tolerance: float = math.nan
    """Largest W1 at which the target counted as met."""
    lengths: tuple[int, ...] = ()
    """Lengths asked for; `profiles` and `distances` have others too."""
    profiles: Profiles = field(default_factory=dict)
    before: Profiles = field(default_factory=dict)
    targets: Arrays = field(default_factory=dict)
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of every free parameter, layer 0 nearest the input."""
    residual: float = 0.0
    range_nats: float = 0.0
    distances: Mapping[int, tuple[StoredNumber, StoredNumber]] = field(default_factory=dict)
    """W1 of the profile to the target by length, designed and before; NaN if attention moves nothing."""
    flat: Mapping[int, StoredNumber] = field(default_factory=dict)
    """W1 of the flat line to the target, by length."""
    at_ends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of values of a free parameter that lie at an end of the range searched, and of all its values."""
    alternatives: tuple[TriedDesign, ...] = ()
    choices: Mapping[str, Profiles] = field(default_factory=dict)
    """Designed profiles of every norm placement that could be chosen, by name."""
    choices_left: Mapping[str, Mapping[int, StoredNumber]] = field(default_factory=dict)
    """W1 to the target of every norm placement, by name and length."""
    measured: tuple[MeasuredNetworks, ...] = ()
    """Measurements of a model's design, by length."""
    rows: InstanceOf[np.ndarray] | None = None
    """Every row of the designed rollout at the longest length asked for, if that is short."""

    @classmethod
    def from_record(cls, record: Record) -> "DesignRun":
        """The design that a record holds; nothing but the record if it failed."""
        if record.status != "done":
            return cls(record)
        scalars, arrays = record.scalars, record.arrays
        at = {entry["n_positions"]: entry for entry in scalars["distances"]}
        choices = scalars.get("choices", {})
        read = {
            **{name: record.resolved[name] for name in ("title", "target", "over", "theory")},
            **{name: scalars[name] for name in ("whole", "exact", "met", "tolerance", "lengths", "parameters")},
            **{name: scalars[name] for name in ("residual", "range_nats")},
            "record": record,
            "profiles": _profiles(arrays, "profile/"),
            "before": _profiles(arrays, "before/"),
            "targets": {int(n): values for n, values in below(arrays, "target/").items()},
            "distances": {n: (entry["after"], entry["before"]) for n, entry in at.items()},
            "flat": {n: entry["flat"] for n, entry in at.items()},
            "at_ends": {name: (ended["count"], ended["of"]) for name, ended in scalars["at_ends"].items()},
            "alternatives": [{**tried, "left": _left(tried["distances"])} for tried in scalars["alternatives"]],
            "choices": {name: _profiles(arrays, f"choice/{name}/") for name in choices},
            "choices_left": {name: _left(entries) for name, entries in choices.items()},
            "measured": [
                {**entry, "profile": Profile(*(arrays[f"measured/{entry['n_positions']}/{part}"] for part in ENDS))}
                for entry in scalars.get("measured", ())
            ],
            "rows": arrays.get("rows"),
        }
        return from_stored(cls, read)

    def shown(self) -> Shown:
        """The profile designed, before and aimed at, at the longest length asked for."""
        if not self.profiles:
            return Shown(self.record.line)
        n = max(self.lengths)
        target = Series("target", self.targets[n] / self.targets[n].sum())
        curves = (self.profiles[n].series("designed"), self.before[n].series("before"), target)
        return Shown(self.title, curves, facts=self.facts())


def _left(entries: Sequence[Mapping[str, Any]]) -> dict[int, float | None]:
    """W1 of the designed profile by length."""
    return {entry["n_positions"]: entry["after"] for entry in entries}


def _profiles(arrays: Mapping[str, np.ndarray], stem: str) -> dict[int, Profile]:
    return {int(n): Profile(values) for n, values in below(arrays, stem).items()}
