"""`Design`, the result of a design: an architecture for a target, and the record that holds it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64
from pydantic import InstanceOf

from posbias.architecture import Architecture, KeyEncoding
from posbias.comparison.metrics import finite, wasserstein
from posbias.designing.solving import NEAR_END, GammaKeys, Mixings, SplineKeys
from posbias.designing.targets import TARGETS, Given, Target
from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.interventions.keys import KeyBiased
from posbias.profiles import Profile
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, FailedRun, Result, from_stored
from posbias.statistics import StoredInterval, StoredNumber
from posbias.theory.rollout import rollout_rows

KEY_BIAS = "key_bias"
"""The free parameter that has an exact solution for every target, at one length."""
NORM_PLACEMENT = "norm_placement"
"""Where norms stand, a choice that mean field alone tells apart."""
TOLERANCE = 0.01
"""Largest W1 at which a target counts as met, the context scaled to [0, 1]: what designs of real initialisations are
held to, whose average over six networks lies about that far from itself (studies/design)."""
DRAWN_ROWS = 512
"""Contexts whose rows are all kept, for the heat map."""
Vector = Float64[np.ndarray, "n_positions"]


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
class Design(Result):
    """An architecture for a target, and what it does at several lengths.

    Arrays of the record, by length: `profile/N`, `before/N`, `target/N` and `choice/NAME/N` [n_positions];
    `measured/N/{influence,low,high}` [n_positions] and `measured/N/{networks,networks_before}` [networks n_positions];
    `rows` [n_positions n_positions], every row of a short rollout at the longest length asked for.
    """

    target: Target
    over: tuple[str, ...]
    """Free parameters of the design."""
    theory: str
    architecture: Architecture
    """The designed architecture; that of a model has mixing 1, which mean field does not need."""
    exact: bool
    """True if the target is met to rounding at the length asked for, not searched for."""
    lengths: tuple[int, ...]
    """Lengths asked for; `profiles` has half the least and twice the largest, too, if the bias reaches them."""
    profiles: Mapping[int, Profile]
    before: Mapping[int, Profile]
    """Profiles of the architecture before it was changed."""
    targets: Mapping[int, Vector]
    """Whole profiles that were aimed at; for a theory of models without the last position's own."""
    parameters: dict[str, list[Any]]
    """Values of every free parameter, layer 0 nearest the input."""
    residual: float
    """P0 = prod_l (1 - m_l): the least that any target has on the last position; 0 for mean field."""
    search: Callable[[tuple[str, ...]], "Design"] | None = None
    """Finds the design over other free parameters; None if there is none to find, or if the design was stored."""
    seed: int = 0
    """Seed of the random starts."""
    at_ends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of values of a free parameter that lie at an end of the range searched, and of all its values."""
    choices: Mapping[str, Mapping[int, Profile]] = field(default_factory=dict)
    """Designed profiles of every norm placement that could be chosen, by name; empty if norms stay where they are."""
    measured: tuple[MeasuredNetworks, ...] = ()
    """Measurements of a stored model's design, by length."""

    @classmethod
    def from_record(cls, record: Record) -> Result:
        """The design that a record holds."""
        if record.status != "done":
            return FailedRun(record)
        return _of_record(record).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for: it may search for others
        """The record that the shell writes of the same design."""
        return self.to_record({})

    def to_record(
        self, arguments: Mapping[str, Any], *, command: str = "", model: Mapping[str, Any] | None = None
    ) -> Record:
        """The design as a record, with what the user passed, what repeats it, and the model it is for."""
        about = "an architecture" if model is None else str(model.get("source", "a model"))
        resolved = {
            "title": f"{self.target} over {', '.join(self.over)}, for {about}",
            "target": str(self.target),
            "over": list(self.over),
            "theory": self.theory,
            "architecture": self.architecture.describe(),
            "model": model,
            "command": command,
        }
        scalars, arrays = _distances_of(self), _profiles_of(self)
        return Record("design", dict(arguments), resolved, scalars, arrays, seeds={"design": self.seed})

    @property
    def range_nats(self) -> float:
        """Largest difference between the biases of two keys in any layer, at the longest length asked for; else 0."""
        groups = [group for groups in self.architecture.head_groups for group in groups]
        keyed = [group for group in groups if isinstance(group.encoding, KeyEncoding)]
        biases = [group.encoding.key_logits(max(self.lengths), group.n_heads) for group in keyed]  # type: ignore[attr-defined]
        return max((float(np.ptp(bias, axis=1).max()) for bias in biases), default=0.0)

    @cached_property
    def distances(self) -> dict[int, tuple[float, float]]:
        """W1 of the profile to the target by length, designed and before; NaN if attention moves nothing."""
        return {n: (self.distance(self.profiles[n]), self.distance(self.before[n])) for n in self.profiles}

    @cached_property
    def flat(self) -> dict[int, float]:
        """W1 of the flat line to the target, by length."""
        return {n: self.distance(Profile.uniform(n)) for n in self.profiles}

    @property
    def choices_left(self) -> dict[str, dict[int, float]]:
        """W1 to the target of every norm placement, by name and length."""
        return {name: {n: self.distance(at[n]) for n in at} for name, at in self.choices.items()}

    def distance(self, profile: Profile) -> float:
        """W1 of a profile to the target at its length: the last position apart, unless the target says what it has."""
        target = self.targets[profile.n_positions]
        if self.target.whole:
            return float(wasserstein(profile.influence, target / target.sum()))
        return distance_apart(profile, target)

    @property
    def met(self) -> bool:
        """True if W1 is at most `TOLERANCE` at every length asked for, by layers that mix positions at all.

        If every free mixing ends at its lower end, attention is off: what little it moves has the target's profile.
        """
        ended, count = self.at_ends.get(Mixings.name, (0, 0))
        low, high = Mixings.range
        off = 0 < ended == count and bool((self.architecture.layer_mixing <= low + NEAR_END * (high - low)).all())
        return not off and all(self.distances[n][0] <= TOLERANCE for n in self.lengths)

    @cached_property
    def alternatives(self) -> tuple[TriedDesign, ...]:
        """Other designs for a rollout that misses its target, up to the first that meets it; searched when asked for.

        A key bias (at one length), gamma keys, gamma keys beside another mixing in every layer, splines.
        """
        if self.search is None or self.met:
            return ()
        candidates: list[tuple[str, ...]] = [(KEY_BIAS,)] if len(self.lengths) == 1 else []
        candidates += [(GammaKeys.name,), (GammaKeys.name, Mixings.name), (SplineKeys.name,)]
        tried: list[TriedDesign] = []
        for names in candidates:
            if names == self.over or (tried and tried[-1].met):
                continue
            with suppress(UsageError):  # masks, content or a span that this one does not allow
                other = self.search(names)
                mixing = float(other.architecture.layer_mixing.mean())
                tried.append(TriedDesign(names, mixing, other.met, {n: other.distances[n][0] for n in other.lengths}))
        return tuple(tried)

    @cached_property
    def rows(self) -> Float64[np.ndarray, "n_positions n_positions"] | None:
        """Every row of the designed rollout at the longest length asked for, for the heat map; None if that is long."""
        longest = max(self.lengths)
        if self.theory != "rollout" or longest > DRAWN_ROWS:
            return None
        return rollout_rows(self.architecture, np.arange(longest), n_positions=longest)

    @property
    def intervention(self) -> KeyBiased:
        """The intervention that gives a loaded model this key bias: `intervened(model, design.intervention)`.

        Raises:
            UsageError: the design is not a key bias alone.
        """
        if self.choices:
            raise UsageError(
                f"norms of a loaded model stay where they are; build it with norm placement "
                f"{self.parameters[NORM_PLACEMENT][0]}"
            )
        layers = [groups[0].encoding for groups in self.architecture.head_groups]
        if not all(isinstance(encoding, KeyEncoding) for encoding in layers):
            raise UsageError(f"a design over {', '.join(self.over)} is no key bias, so no model can be given it")
        return KeyBiased([str(encoding) for encoding in layers])

    def shown(self) -> Shown:
        """The profile designed, before and aimed at, at the longest length asked for; W1 to the target at all."""
        distances = ", ".join(f"N={n}: {after:.2g} (before {was:.2g})" for n, (after, was) in self.distances.items())
        apart = "" if self.target.whole else ", last position apart"
        met = "met" if self.met else "not met"
        title = f"{self.target} over {', '.join(self.over)}, {met}; W1 to the target{apart}: {distances}"
        n = max(self.lengths)
        target = Series("target", self.targets[n] / self.targets[n].sum())
        curves = (self.profiles[n].series("designed"), self.before[n].series("before"), target)
        # The verdict of a fresh design may have to search for others first.
        return Shown(title, curves, facts=self.facts() if self.search is None else {})


def _of_record(record: Record) -> Design:
    """A finished design from its record."""
    resolved, scalars, arrays = record.resolved, record.scalars, record.arrays
    targets = _by_length(arrays, "target/")
    design = Design(
        target=_target_of(resolved["target"], targets, whole=scalars["whole"]),
        over=tuple(resolved["over"]),
        theory=resolved["theory"],
        architecture=Architecture.from_description(resolved["architecture"]),
        exact=scalars["exact"],
        lengths=tuple(scalars["lengths"]),
        profiles=_profiles_below(arrays, "profile/"),
        before=_profiles_below(arrays, "before/"),
        targets=targets,
        parameters=scalars["parameters"],
        residual=scalars["residual"],
        seed=record.seeds["design"],
        at_ends={name: (ended["count"], ended["of"]) for name, ended in scalars["at_ends"].items()},
        choices={name: _profiles_below(arrays, f"choice/{name}/") for name in scalars.get("choices", {})},
        measured=tuple(_networks_of(entry, arrays) for entry in scalars.get("measured", ())),
    )
    tried = [
        {**other, "left": {entry["n_positions"]: entry["after"] for entry in other["distances"]}}
        for other in scalars["alternatives"]
    ]
    vars(design)["alternatives"] = tuple(from_stored(TriedDesign, other) for other in tried)
    vars(design)["rows"] = arrays.get("rows")
    return design


def _target_of(spelled: str, targets: Mapping[int, Vector], *, whole: bool) -> Target:
    """The target of a record: by its spelling, or a profile that was given."""
    if not whole:
        return TARGETS.parse(spelled)
    given = [Given(values) for values in targets.values()]
    # One of them is the profile itself, unless it was given at another length than those asked for.
    return next((target for target in given if str(target) == spelled), given[-1])


def _networks_of(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> MeasuredNetworks:
    ends = (arrays[f"measured/{entry['n_positions']}/{end}"] for end in ("influence", "low", "high"))
    return from_stored(MeasuredNetworks, {**entry, "profile": Profile(*ends)})


def _profiles_below(arrays: Mapping[str, np.ndarray], stem: str) -> dict[int, Profile]:
    return {n: Profile(values) for n, values in _by_length(arrays, stem).items()}


def _by_length(arrays: Mapping[str, np.ndarray], stem: str) -> dict[int, Vector]:
    """Arrays by length, ascending: a file sorts their names as text."""
    at = {int(n): values for n, values in below(arrays, stem).items()}
    return dict(sorted(at.items()))


def distance_apart(profile: Profile, target: Vector) -> float:
    """W1 between the shapes of two profiles without their last positions, the rest of the context scaled to [0, 1].

    nan if the profile has nothing there, because attention moves nothing.
    """
    moved, aimed = profile.influence[:-1], target[:-1]
    if moved.sum() == 0:
        return float("nan")
    return float(wasserstein(moved / moved.sum(), aimed / aimed.sum()))


def _distances_of(design: Design) -> dict[str, Any]:
    """Distances to the target at every length, of the design and of what else was tried, and its parameters."""
    scalars: dict[str, Any] = {
        "exact": design.exact,
        "met": design.met,
        "tolerance": TOLERANCE,
        "whole": design.target.whole,
        "at_ends": {name: {"count": count, "of": of} for name, (count, of) in design.at_ends.items()},
        "alternatives": [
            {
                "over": list(other.over),
                "mixing": other.mixing,
                "met": other.met,
                "distances": [{"n_positions": n, "after": finite(after)} for n, after in other.left.items()],
            }
            for other in design.alternatives
        ],
        "lengths": list(design.lengths),
        "distances": [
            {
                "n_positions": n,
                "after": finite(after),
                "before": finite(before),
                "flat": design.flat[n],
            }
            for n, (after, before) in design.distances.items()
        ],
        "range_nats": design.range_nats,
        "residual": design.residual,
        "parameters": {name: list(values) for name, values in design.parameters.items()},
    }
    if design.choices:
        scalars["choices"] = {
            name: [{"n_positions": n, "after": after} for n, after in left.items()]
            for name, left in design.choices_left.items()
        }
    return scalars


def _profiles_of(design: Design) -> dict[str, np.ndarray]:
    """Profiles of the design, of every choice, before and aimed at; of a short rollout all rows, for the heat map."""
    arrays: dict[str, np.ndarray] = {}
    for name, profiles in design.choices.items():
        arrays |= {f"choice/{name}/{n}": profile.influence for n, profile in profiles.items()}
    for n, profile in design.profiles.items():
        arrays |= {f"profile/{n}": profile.influence, f"before/{n}": design.before[n].influence}
        arrays[f"target/{n}"] = design.targets[n]
    if design.rows is not None:
        arrays["rows"] = design.rows
    return arrays
