"""`Design`, the result of a design: an architecture for a target, and the record that holds it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture, KeyEncoding
from posbias.comparison.metrics import finite, wasserstein
from posbias.designing.solving import NEAR_END, Mixings
from posbias.designing.targets import TARGETS, Given, Target
from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.interventions.keys import KeyBiased
from posbias.profiles import Profile
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result
from posbias.statistics import Interval
from posbias.theory.rollout import rollout_rows

KEY_BIAS = "key_bias"
"""The free parameter that has an exact solution for every target, at one length."""
TOLERANCE = 0.01
"""Largest W1 at which a target counts as met, the context scaled to [0, 1]: what designs of real initialisations are
held to, whose average over six networks lies about that far from itself (studies/design)."""
STORED = ("exact", "parameters", "residual")
"""Fields that a record holds as they are."""
DRAWN_ROWS = 512
"""Contexts whose rows are all kept, for the heat map."""
Vector = Float64[np.ndarray, "n_positions"]
Profiles = Float64[np.ndarray, "networks n_positions"]


@dataclass(frozen=True, eq=False)
class MeasuredNetworks:
    """Jacobian profiles at initialisation at one length; each row a network of its own on a prompt of its own."""

    designed: Profiles
    undesigned: Profiles
    distance: Interval
    """W1 of the designed networks' average to the target, as `Design.distance` counts, over networks."""
    before: Interval
    """W1 to the target without the design."""
    noise: float
    """W1 of one half of the designed networks to the other, on average: the distance of a perfect design."""

    @property
    def n_positions(self) -> int:
        """Length of the prompts."""
        return int(self.designed.shape[1])

    @property
    def profile(self) -> Profile:
        """Mean of the designed networks, with its interval."""
        return Profile.mean_of(self.designed)


@RESULTS.register("design")
@dataclass(frozen=True, eq=False, repr=False)
class Design(Result):
    """An architecture for a target, and what it does at several lengths.

    Arrays of the record, by length: `profile/N`, `before/N` and `target/N` [n_positions];
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
    seed: int = 0
    """Seed of the random starts."""
    at_ends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of values of a free parameter that lie at an end of the range searched, and of all its values."""
    model: Mapping[str, Any] | None = None
    """Description of the model that it is for; None for an architecture."""
    measured: tuple[MeasuredNetworks, ...] = ()
    """Measurements of a model's design, by length."""

    @classmethod
    def from_record(cls, record: Record) -> "Design":
        """The design that a record holds."""
        resolved, scalars, arrays = record.resolved, record.scalars, record.arrays
        targets = _by_length(arrays, "target/")
        profiles, before = (
            {n: Profile(values) for n, values in _by_length(arrays, stem).items()} for stem in ("profile/", "before/")
        )
        return cls(
            target=_target_of(resolved["target"], targets, whole=scalars["whole"]),
            over=tuple(resolved["over"]),
            theory=resolved["theory"],
            architecture=Architecture.from_description(resolved["architecture"]),
            **{name: scalars[name] for name in STORED},
            lengths=tuple(scalars["lengths"]),
            at_ends={name: tuple(ended) for name, ended in scalars["at_ends"].items()},
            profiles=profiles,
            before=before,
            targets=targets,
            seed=record.seeds["design"],
            model=resolved["model"],
            measured=tuple(_networks_of(entry, arrays) for entry in scalars.get("measured", ())),
        ).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The design with what follows from it."""
        about = "an architecture" if self.model is None else str(self.model.get("source", "a model"))
        resolved = {
            "title": f"{self.target} over {', '.join(self.over)}, for {about}",
            "target": str(self.target),
            "over": list(self.over),
            "theory": self.theory,
            "architecture": self.architecture.describe(),
            "model": self.model,
            "command": "",
        }
        scalars: dict[str, Any] = {
            **{name: getattr(self, name) for name in (*STORED, "lengths", "at_ends", "met", "range_nats")},
            "tolerance": TOLERANCE,
            "whole": self.target.whole,
            "distances": [
                {"n_positions": n, "after": finite(after), "before": finite(before), "flat": self.flat[n]}
                for n, (after, before) in self.distances.items()
            ],
        }
        arrays: dict[str, np.ndarray] = {} if self.rows is None else {"rows": self.rows}
        for n, profile in self.profiles.items():
            arrays |= {f"profile/{n}": profile.influence, f"before/{n}": self.before[n].influence}
            arrays[f"target/{n}"] = self.targets[n]
        for networks in self.measured:
            scalars.setdefault("measured", []).append(
                {
                    "n_positions": networks.n_positions,
                    "networks": len(networks.designed),
                    "distance": networks.distance.as_record(),
                    "before": networks.before.as_record(),
                    "noise": networks.noise,
                }
            )
            rows = {"networks": networks.designed, "networks_before": networks.undesigned}
            named = {**vars(networks.profile), **rows}
            arrays |= {f"measured/{networks.n_positions}/{name}": values for name, values in named.items()}
        return Record("design", {}, resolved, scalars, arrays, seeds={"design": self.seed})

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
        return Shown(title, curves, facts=self.facts())


def _target_of(spelled: str, targets: Mapping[int, Vector], *, whole: bool) -> Target:
    """The target of a record: by its spelling, or a profile that was given."""
    if not whole:
        return TARGETS.parse(spelled)
    given = [Given(values) for values in targets.values()]
    # One of them is the profile itself, unless it was given at another length than those asked for.
    return next((target for target in given if str(target) == spelled), given[-1])


def _networks_of(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> MeasuredNetworks:
    rows = below(arrays, f"measured/{entry['n_positions']}/")
    distance, before = (Interval.of_record(entry[name]) for name in ("distance", "before"))
    return MeasuredNetworks(rows["networks"], rows["networks_before"], distance, before, noise=entry["noise"])


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
