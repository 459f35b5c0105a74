"""`Design`, the result of a design; and targets: what a design aims at, on any number of positions.

A registered target is the shape of what attention moves; the residual stream adds its own share on the last position,
P0 = prod_l (1 - m_l), which no bias takes away. A given profile is the whole profile, that share included.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval as Range
from jaxtyping import Float64
from pydantic import ConfigDict, InstanceOf

from posbias.architecture import Architecture, KeyEncoding
from posbias.comparison.metrics import wasserstein
from posbias.errors import UsageError
from posbias.interventions.keys import KeyBiased
from posbias.profiles import Profile
from posbias.registry import Registry, Spelled
from posbias.results.records import MEASURED_PART, RECORD_FILE, Record, plain, read_record
from posbias.results.result import RESULTS, Result, as_stored, from_stored
from posbias.results.showing import INFLUENCE, Shown
from posbias.runs.parts import flat, nested
from posbias.statistics import StoredInterval

TARGETS: Registry["Target"] = Registry("target")
Vector = Float64[np.ndarray, "n_positions"]


class Target(Spelled, ABC):
    """A positive weight for every position of a context of any length."""

    whole: ClassVar[bool] = False
    """True for a whole profile, the residual stream's share on the last position included."""

    @abstractmethod
    def shape(self, n_positions: int) -> Vector:
        """Shares of the positions; they sum to 1."""

    def profile(self, n_positions: int, residual: float) -> Vector:
        """The whole profile when the residual stream keeps the share `residual` on the last position.

        Raises:
            UsageError: a whole profile with less than that on its last position.
        """
        shape = self.shape(n_positions)
        if not self.whole:
            shape = (1 - residual) * shape
            shape[-1] += residual
        elif shape[-1] <= residual:
            raise UsageError(
                f"the target's last position has {shape[-1]:.4g}, but the residual stream alone leaves "
                f"{residual:.4g} there; the last position needs more than that, or the mixing must be larger"
            )
        return shape


@TARGETS.register("flat")
@dataclass(frozen=True)
class Flat(Target):
    """An equal share for every position."""

    def shape(self, n_positions: int) -> Vector:
        """1/N everywhere."""
        return np.full(n_positions, 1 / n_positions)


@TARGETS.register("power")
@dataclass(frozen=True)
class Power(Target):
    """Gamma(j + 1 + exponent) / j!, nearly (j + 1)^exponent: the power laws that gamma keys hold at every length."""

    exponent: Annotated[float, Range(gt=-1, le=100)]
    """Exponent in (-1, 100]: above 0 recency, below 0 primacy, 0 flat."""

    def shape(self, n_positions: int) -> Vector:
        """Shares by running products, so that no two large log-gammas are subtracted."""
        steps = np.log1p(self.exponent / np.arange(1, max(n_positions, 1)))
        return _normalised(np.concatenate([[0.0], np.cumsum(steps)])[:n_positions])


@TARGETS.register("recency")
@dataclass(frozen=True)
class Recency(Target):
    """exp(rate (j + 1) / N): the last position outweighs the first by exp(rate); below 0 primacy."""

    rate: Annotated[float, Range(ge=-50, le=50)] = 3.0
    """Rate in [-50, 50]."""

    def shape(self, n_positions: int) -> Vector:
        """Exponential in the relative position."""
        return _normalised(self.rate * np.arange(1, n_positions + 1) / n_positions)


@TARGETS.register("u_shape")
@dataclass(frozen=True)
class UShape(Target):
    """middle + (1 - middle) (2x - 1)^2 over the context x in [0, 1]: the ends outweigh the middle; above 1 a hump."""

    middle: Annotated[float, Range(ge=0.001, le=1000)] = 0.25
    """Weight of the middle over that of the ends, in [0.001, 1000]."""

    def shape(self, n_positions: int) -> Vector:
        """A parabola."""
        along = np.linspace(-1, 1, n_positions) if n_positions > 1 else np.zeros(1)
        return _normalised(np.log(self.middle + (1 - self.middle) * along**2))


@dataclass(frozen=True, eq=False)
class Given(Target):
    """A profile in hand: measured, predicted, or from a file."""

    name: ClassVar[str] = "given"
    whole: ClassVar[bool] = True

    influence: Vector

    def __post_init__(self) -> None:
        values = self.influence
        if values.ndim != 1 or values.size < 2 or not np.all(np.isfinite(values)) or values.min() <= 0:
            low = values.min() if values.size else "none"
            raise UsageError(f"a target needs at least two values, all finite and > 0; the least is {low}")

    def shape(self, n_positions: int) -> Vector:
        """The profile itself; at another length its density on the relative position, the last position apart."""
        values = np.asarray(self.influence / self.influence.sum())
        if n_positions == values.size:
            return values
        last = values[-1]
        inner = np.interp(np.linspace(0, 1, n_positions - 1), np.linspace(0, 1, values.size - 1), values[:-1])
        return np.asarray(np.append(inner * (1 - last) / inner.sum(), last))

    def __str__(self) -> str:
        return f"a profile of {self.influence.size} positions"


def resolve_target(target: Any) -> Target:
    """A target from an object, its literal spelling, a `Profile`, a sequence of weights, a CSV file, or a finished run.

    A CSV file has one weight per line, or a header with a column `influence`. A run is given by its directory or its
    record.json; its measured profile is taken, otherwise the predicted one; if it has several, one is named behind a
    colon: `runs/x:measured/logprob`.

    Raises:
        UsageError: none of these; values that are not finite and positive; several profiles and none chosen.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, str | Path):
        directory, _, chosen = str(target).partition(":")
        if directory.endswith(".csv"):
            return Given(_read_csv(Path(target)))
        if isinstance(target, Path) or ("(" not in target and ("/" in directory or Path(directory).exists())):
            return Given(_read_run(Path(directory), chosen))
        return TARGETS.parse(target)
    try:
        weights = np.asarray(target.influence if isinstance(target, Profile) else target, dtype=np.float64)
    except (TypeError, ValueError):
        known = ", ".join(TARGETS)
        raise UsageError(
            f"{target!r} is no target; known: {known}, a Profile, weights, a run, or a .csv file"
        ) from None
    return Given(weights)


def _read_csv(path: Path) -> Vector:
    try:
        lines = path.read_text(encoding="utf-8").split()
        names = lines[0].split(",") if lines else []
        headed = "influence" in names
        column = names.index("influence") if headed else 0
        return np.loadtxt(lines[headed:], delimiter=",", usecols=column, ndmin=1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the target {path}: {error}; every line needs one number, or a header with a column influence"
        ) from None


def _read_run(directory: Path, chosen: str) -> Vector:
    record = read_record(directory.parent if directory.name == RECORD_FILE else directory)
    parts = {name.rpartition("/"): array for name, array in record.arrays.items()}
    stems = [stem for (stem, _, part), array in parts.items() if part == INFLUENCE and array.ndim == 1]
    measured = [name for name in stems if MEASURED_PART in name.split("/")]
    allowed = [chosen] if chosen in stems else [] if chosen else measured or stems
    if len(allowed) != 1:
        raise UsageError(
            f"the {record.verb} run {directory} has {len(stems)} profiles; as a target write "
            f"{directory}:NAME with one of {', '.join(sorted(stems))}"
            if stems
            else f"the {record.verb} run {directory} has no profile to aim at"
        )
    return np.asarray(record.arrays[f"{allowed[0]}/influence"], dtype=np.float64)


def _normalised(logs: Vector) -> Vector:
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


GAMMA_KEY, KEY_BIAS = OVER = ("gamma_key", "key_bias")
"""What may be free; `key_bias` has an exact solution for every target, at one length."""
TOLERANCE = 0.01
"""Largest W1 at which a target counts as met, the context scaled to [0, 1]: what designs of real initialisations are
held to, whose average over six networks lies about that far from itself (studies/design)."""
STORED = ("exact", "parameters", "residual", "lengths", "at_ends", "met", "range_nats")
"""What a record holds as it is."""


@dataclass(frozen=True, eq=False)
class MeasuredNetworks:
    """Jacobian profiles at initialisation at one length; each row a network of its own on a prompt of its own."""

    networks: InstanceOf[np.ndarray]
    """[networks n_positions]; rows sum to 1."""
    networks_before: InstanceOf[np.ndarray]
    """The same networks without the design."""
    distance: StoredInterval
    """W1 of the designed networks' average to the target, as `Design.distance` counts, over networks."""
    before: StoredInterval
    """W1 to the target without the design."""
    noise: float
    """W1 of one half of the designed networks to the other, on average: the distance of a perfect design."""

    @property
    def n_positions(self) -> int:
        """Length of the prompts."""
        return int(self.networks.shape[1])

    @property
    def profile(self) -> Profile:
        """Mean of the designed networks, with its interval."""
        return Profile.mean_of(self.networks)


@RESULTS.register("design")
@dataclass(frozen=True, eq=False, repr=False)
class Design(Result):
    """An architecture for a target, and what it does at several lengths.

    Arrays of the record, by length: `profile/N`, `before/N` and `target/N` [n_positions];
    `measured/N/{influence,low,high}` [n_positions] and `measured/N/{networks,networks_before}` [networks n_positions].
    """

    drawn_by: ClassVar = "posbias.designing.page:design_report"
    target: Target
    over: str
    """The free parameter."""
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
    targets: Mapping[int, InstanceOf[np.ndarray]]
    """Whole profiles that were aimed at; for a theory of models without the last position's own."""
    parameters: list[Any]
    """Exponents, layer 0 nearest the input, or the bias of every position."""
    residual: float
    """P0 = prod_l (1 - m_l): the least that any target has on the last position; 0 for mean field."""
    seed: int = 0
    """Seed of the random starts."""
    at_ends: int = 0
    """Values that lie at an end of the range searched."""
    model: Mapping[str, Any] | None = None
    """Description of the model that it is for; None for an architecture."""
    measured: tuple[MeasuredNetworks, ...] = ()
    """Measurements of a model's design, by length."""

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def from_record(cls, record: Record) -> "Design":
        """The design that a record holds."""
        resolved, scalars, arrays = record.resolved, record.scalars, nested(record.arrays)
        lengths = sorted(map(int, arrays["target"]))  # a file sorts names as text, so 16 stands before 8
        stems = ("profile", "before", "target")
        profiles, before, targets = ({n: arrays[stem][str(n)] for n in lengths} for stem in stems)
        if scalars["whole"]:  # a profile, which is among them unless it was given at a length of its own
            given = [Given(values) for values in targets.values()]
            target: Target = next((each for each in given if str(each) == resolved["target"]), given[-1])
        else:
            target = TARGETS.parse(resolved["target"])
        measured = [entry | arrays["measured"][str(entry["n_positions"])] for entry in scalars.get("measured", ())]
        read = {
            "target": target,
            "architecture": Architecture.from_description(resolved["architecture"]),
            "profiles": {n: Profile(values) for n, values in profiles.items()},
            "before": {n: Profile(values) for n, values in before.items()},
            "targets": targets,
            "seed": record.seeds["design"],
            "measured": measured,
        }
        return from_stored(cls, {**resolved, **scalars, **read}).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The design with what follows from it."""
        about = "an architecture" if self.model is None else str(self.model.get("source", "a model"))
        resolved = {
            "title": f"{self.target} over {self.over}, for {about}",
            "target": str(self.target),
            "over": self.over,
            "theory": self.theory,
            "architecture": self.architecture.describe(),
            "model": self.model,
        }
        scalars: dict[str, Any] = {
            **{name: getattr(self, name) for name in STORED},
            "tolerance": TOLERANCE,
            "whole": self.target.whole,
            "distances": [
                {"n_positions": n, "after": plain(after), "before": plain(before), "flat": self.flat[n]}
                for n, (after, before) in self.distances.items()
            ],
        }
        if self.measured:
            numbers = ("n_positions", "distance", "before", "noise")
            scalars["measured"] = [{name: as_stored(getattr(each, name)) for name in numbers} for each in self.measured]
        profiles = {"profile": self.profiles, "before": self.before}
        arrays = {f"{stem}/{n}": each.influence for stem, of in profiles.items() for n, each in of.items()}
        measured = {each.n_positions: {**vars(each.profile), **vars(each)} for each in self.measured}
        arrays |= flat({"target": self.targets, "measured": measured})
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
        """True if W1 is at most `TOLERANCE` at every length asked for."""
        return all(self.distances[n][0] <= TOLERANCE for n in self.lengths)

    @property
    def intervention(self) -> KeyBiased:
        """The intervention that gives a loaded model this key bias: `intervened(model, design.intervention)`."""
        return KeyBiased([str(groups[0].encoding) for groups in self.architecture.head_groups])

    def shown(self) -> Shown:
        """The profile designed, before and aimed at, at the longest length asked for; W1 to the target at all."""
        distances = ", ".join(f"N={n}: {after:.2g} (before {was:.2g})" for n, (after, was) in self.distances.items())
        apart = "" if self.target.whole else ", last position apart"
        met = "met" if self.met else "not met"
        title = f"{self.target} over {self.over}, {met}; W1 to the target{apart}: {distances}"
        n = max(self.lengths)
        target = Profile.normalised(self.targets[n]).curve("target")
        curves = (self.profiles[n].curve("designed"), self.before[n].curve("before"), target)
        return Shown(title, curves)


def distance_apart(profile: Profile, target: Vector) -> float:
    """W1 between the shapes of two profiles without their last positions, the rest of the context scaled to [0, 1].

    nan if the profile has nothing there, because attention moves nothing.
    """
    moved, aimed = profile.influence[:-1], target[:-1]
    if moved.sum() == 0:
        return float("nan")
    return float(wasserstein(moved / moved.sum(), aimed / aimed.sum()))
