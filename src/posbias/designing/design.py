"""`design`: the architecture, or the bias of a given model, whose profile is the one that is asked for.

Where a solution is exact it is used: gamma keys whose exponents telescope (power laws, flat included, at every length),
a key bias for any target at one length. Everything else is searched for.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64
from pydantic import InstanceOf

from posbias.architecture import Architecture, Causal, GammaKey, KeyBias, KeyEncoding, NoEncoding
from posbias.architecture.keys import MAX_ALPHA
from posbias.checks import checked
from posbias.comparison.metrics import finite, wasserstein
from posbias.designing.exact import key_bias_for, telescoping_alphas
from posbias.designing.initialisation import Initialisation, solve_at_initialisation
from posbias.designing.options import DesignOptions
from posbias.designing.solving import (
    FREE,
    NEAR_END,
    AlibiSlopes,
    Free,
    GammaKeys,
    Mixings,
    Problem,
    SlopedGammaKeys,
    SplineKeys,
)
from posbias.designing.targets import TARGETS, Flat, Given, Power, Target, resolve_target
from posbias.display.showing import Series, Shown
from posbias.errors import UsageError
from posbias.interventions.keys import KeyBiased
from posbias.limits import STEPS
from posbias.profiles import Profile
from posbias.registry import split_literals
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, FailedRun, Result, from_stored
from posbias.statistics import StoredInterval, StoredNumber
from posbias.theory.mean_field.prediction import check_drawn
from posbias.theory.mean_field.spec import PLACEMENTS, spec_of
from posbias.theory.rollout import rollout_profile, rollout_rows

SEARCH = 300
"""Passes through all layers and positions that a search from one start takes at most, about, with gradients."""
KEY_BIAS = "key_bias"
"""The free parameter that has an exact solution for every target, at one length."""
KEYED = (GammaKeys.name, SlopedGammaKeys.name, SplineKeys.name)
"""Free key biases that are defined at every length."""
NORM_PLACEMENT = "norm_placement"
"""Where norms stand, a choice that mean field alone tells apart."""
RESIDUAL_SCALE = "residual_scale"
OF_MODELS = (*KEYED, AlibiSlopes.name)
"""What mean field searches; a norm placement may be chosen beside."""
TOLERANCE = 0.01
"""Largest W1 at which a target counts as met, the context scaled to [0, 1]: what designs of real initialisations are
held to, whose average over six networks lies about that far from itself (studies/design)."""
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
    base: Architecture | None = None
    """The architecture before it was changed; None for a stored design."""
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
        design = _of_record(record)
        vars(design)["record"] = record
        return design

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

    @property
    def distances(self) -> dict[int, tuple[float, float]]:
        """W1 of the profile to the target by length, designed and before; NaN if attention moves nothing."""
        return {n: (self.distance(self.profiles[n]), self.distance(self.before[n])) for n in self.profiles}

    @property
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
        if self.base is None or self.met or self.theory != "rollout":
            return ()
        candidates: list[tuple[str, ...]] = [(KEY_BIAS,)] if len(self.lengths) == 1 else []
        candidates += [(GammaKeys.name,), (GammaKeys.name, Mixings.name), (SplineKeys.name,)]
        tried: list[TriedDesign] = []
        for names in candidates:
            if names == self.over or (tried and tried[-1].met):
                continue
            with suppress(UsageError):  # masks, content or a span that this one does not allow
                other = _by_rollout(self.base, self.target, names, self.lengths, starts=4, seed=self.seed)
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
        return Shown(title, curves, facts=self.facts() if self.base is None else {})


def _of_record(record: Record) -> Design:
    """A finished design from its record."""
    resolved, scalars, arrays = record.resolved, record.scalars, record.arrays
    targets = {int(n): values for n, values in below(arrays, "target/").items()}
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
    """Profiles by length, ascending."""
    at = {int(n): values for n, values in below(arrays, stem).items()}
    return {n: Profile(at[n]) for n in sorted(at)}


def distance_apart(profile: Profile, target: Vector) -> float:
    """W1 between the shapes of two profiles without their last positions, the rest of the context scaled to [0, 1].

    nan if the profile has nothing there, because attention moves nothing.
    """
    moved, aimed = profile.influence[:-1], target[:-1]
    if moved.sum() == 0:
        return float("nan")
    return float(wasserstein(moved / moved.sum(), aimed / aimed.sum()))


@checked
def design(
    target: Any = "flat",
    over: str | Sequence[str] = "gamma_key",
    *,
    architecture: Architecture | None = None,
    model: Any = None,
    options: DesignOptions | None = None,
) -> Design:
    """Find the architecture whose profile is the target.

    Args:
        target: "flat", "power(exponent=1.0)", "recency(rate=3.0)", "u_shape(middle=0.25)", a `Profile`, one positive
            weight per position, a .csv file of them, or a finished run ("runs/x").
        over: Free parameters: "key_bias" (one bias for all layers, exact at its own length), "gamma_key" (an exponent
            per layer: exact at every length for flat and power targets), "gamma_alibi" (the same, and a slope per
            head), "spline" (a smooth bias of ln(1 + j) per layer), "alibi" (a slope per head), "windows" (a width per
            layer), "mixing" (m_l of every layer, which is the scale of its attention branch beside the stream),
            "sinks" (a logit per layer), or one encoding and any of the last three, as a list
            or with commas. For a model also "norm_placement": pre, post, output or sandwich.
        architecture: The architecture to change, in place of depth, heads and mixing among the options.
        model: A model at initialisation, whose theory is `mean_field`; over "gamma_key", "gamma_alibi", "alibi" (both
            in place of the model's own slopes) or "spline", "norm_placement", or one of the first and the last.
        options: Depth, heads and mixing unless an architecture or a model has them, theory, lengths and search.

    Returns:
        The design with its profiles at the lengths asked for, at half the least and at twice the largest. A search may
        miss the target: `met` tells, and `alternatives` has designs that may meet it.

    Raises:
        UsageError: an unknown target or parameter, a target below the residual stream's share on the last position
            (the message names it), or values beyond the range of a solver.

    Source: ours (docs/design).
    """
    options = DesignOptions() if options is None else options
    names = _checked_names(over, options.theory)
    aim, search = resolve_target(target), {"starts": options.n_starts, "seed": options.seed}
    if options.theory == "mean_field":
        return _by_mean_field(model, aim, names, options.lengths, **search)
    return _by_rollout(_base(architecture, model, options), aim, names, options.lengths, **search)


def _checked_names(over: str | Sequence[str], theory: str) -> tuple[str, ...]:
    """Names of the free parameters, at least one, all of which the theory has."""
    names = tuple(split_literals(over) if isinstance(over, str) else over)
    if not names:
        raise UsageError(f"nothing is free; over takes {KEY_BIAS} or some of {', '.join(FREE)}")
    if RESIDUAL_SCALE in names:
        raise UsageError(f"over {RESIDUAL_SCALE}: a branch added s times is mixing s / (1 + s); ask for over='mixing'")
    if NORM_PLACEMENT in names and theory != "mean_field":
        raise UsageError(f"over {NORM_PLACEMENT}: a rollout has no norms; allowed with a model and theory='mean_field'")
    return names


def _by_rollout(
    base: Architecture, aim: Target, names: tuple[str, ...], lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    residual = float(np.prod(1 - base.layer_mixing))
    for length in lengths:
        aim.profile(length, residual)
    _check_encodings(base, names)
    if residual == 1 and Mixings.name not in names:
        raise UsageError("mixing is 0 in every layer: attention moves nothing, and no design changes the profile")
    bare = not np.any(base.layer_content) and bool(np.all(base.layer_sinks == -np.inf))
    task = _Task(
        base,
        aim,
        names,
        lengths,
        theory="rollout",
        profile=lambda changed, n: rollout_profile(changed, n_positions=n),
        seed=seed,
    )
    if names == (KEY_BIAS,):
        if not bare:
            raise UsageError(f"{KEY_BIAS} is designed without content and sinks; gamma_key is searched for with them")
        if len(lengths) > 1:
            raise UsageError(f"a key bias is exact at one length; {len(lengths)} are given: take gamma_key for several")
        bias = key_bias_for(aim.profile(lengths[0], residual), base.layer_mixing).tolist()
        return task.design(replace(base, encoding=KeyBias(bias)), {KEY_BIAS: bias}, exact=True)
    if names == (GammaKeys.name,) and bare and isinstance(aim, Flat | Power):
        alphas = telescoping_alphas(aim.exponent if isinstance(aim, Power) else 0.0, base.layer_mixing)
        if alphas.max() <= MAX_ALPHA:
            keyed = replace(base, encoding=[GammaKey(alpha) for alpha in alphas.tolist()])
            return task.design(keyed, {GammaKeys.name: alphas.tolist()}, exact=True)
    steps = SEARCH * starts * base.depth * base.heads * sum(lengths)
    STEPS.check(f"a search from {starts} starts through {base.depth} layers at {sum(lengths):,} positions", steps)
    free = [FREE.build(name) for name in names]
    values = Problem(base, free, aim, lengths).solve(starts=starts, seed=seed)
    return task.searched(free, values)


def _base(architecture: Architecture | None, model: Any, options: DesignOptions) -> Architecture:
    if architecture is not None:
        return architecture
    if model is not None:
        return Architecture.from_model(model, mixing=options.mixing)
    if options.depth is None:
        raise UsageError("depth is missing: give depth (and heads, mixing), an architecture or a model")
    return Architecture(depth=options.depth, heads=options.heads, mixing=options.mixing)


def _check_encodings(base: Architecture, names: tuple[str, ...]) -> None:
    """Refuse key biases for layers that are not causal or have another encoding: a head has one."""
    encodings = [name for name in names if name in {KEY_BIAS, *KEYED, AlibiSlopes.name}]
    if len(encodings) > 1:
        raise UsageError(f"over {', '.join(names)}: a head has one encoding; allowed: {' or '.join(encodings)}")
    keyed = next((name for name in encodings if name != AlibiSlopes.name), None)
    if keyed is None:
        return
    groups = [group for groups in base.head_groups for group in groups]
    for group in groups:
        if not isinstance(group.mask, Causal) or not isinstance(group.encoding, NoEncoding):
            raise UsageError(
                f"{keyed} is designed for causal layers with encoding none; got mask {group.mask} and encoding "
                f"{group.encoding}"
            )


@dataclass(frozen=True, eq=False)
class _Task:
    """The task of a design, and the theory that gives its profiles."""

    base: Architecture
    target: Target
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    theory: str
    profile: Callable[[Architecture, int], Vector]
    seed: int
    reach: float = np.inf
    """The longest context whose profile is known."""

    def searched(self, free: Sequence[Free], values: Float64[np.ndarray, "_"]) -> Design:
        """The design with these values of its free parameters."""
        problem = Problem(self.base, free, self.target, self.lengths)
        parameters = {sort.name: sort.plain(part) for sort, part in zip(free, problem.split(values), strict=True)}
        ends = {
            sort.name: (int(ended.sum()), ended.size)
            for sort, ended in zip(free, problem.at_ends(values), strict=True)
            if ended.any()
        }
        return replace(self.design(problem.architecture(values), parameters), at_ends=ends)

    def design(self, designed: Architecture, parameters: dict[str, list[Any]], *, exact: bool = False) -> Design:
        """The design with its profiles at the lengths asked for, half the least and twice the largest."""
        reach = min(self.reach, len(parameters.get(KEY_BIAS, [])) or np.inf)
        lengths = {max(min(self.lengths) // 2, 3), *self.lengths, 2 * max(self.lengths)}
        within_reach = [n for n in sorted(lengths) if n <= reach]
        # Energies add in mean field: what the residual stream keeps there is no share of a target.
        residual = float(np.prod(1 - designed.layer_mixing)) if self.theory == "rollout" else 0.0
        return Design(
            target=self.target,
            over=self.names,
            theory=self.theory,
            architecture=designed,
            exact=exact,
            lengths=self.lengths,
            profiles={n: Profile.normalised(self.profile(designed, n)) for n in within_reach},
            before={n: Profile.normalised(self.profile(self.base, n)) for n in within_reach},
            targets={
                n: self.target.shape(n) if self.target.whole else self.target.profile(n, residual) for n in within_reach
            },
            parameters=parameters,
            residual=residual,
            base=self.base,
            seed=self.seed,
        )


def _by_mean_field(
    model: Any, target: Target, names: tuple[str, ...], lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    if model is None:
        raise UsageError("theory mean_field needs a model at initialisation: model=load_model('config:DIR')")
    keyed = [name for name in names if name != NORM_PLACEMENT]
    if len(keyed) > 1 or not set(keyed) <= set(OF_MODELS):
        raise UsageError(
            f"over {', '.join(names)}: mean field designs over one of {', '.join(OF_MODELS)} and {NORM_PLACEMENT}; "
            "windows and residual scale of a model are set by hand: window(width=W), attention_scaled(factor=F)"
        )
    check_drawn(model)
    search = {"starts": starts, "seed": seed}
    if NORM_PLACEMENT not in names:
        return _born(Initialisation(model, seed=seed), target, names, lengths, **search)
    parallel = any(layer.parallel for layer in spec_of(model).layers)
    designs = {
        placement: _born(Initialisation(model, seed, placement), target, names, lengths, **search)
        for placement in PLACEMENTS
        if placement != "post" or not parallel
    }
    best = min(designs, key=lambda placement: sum(designs[placement].distances[n][0] for n in lengths))
    return replace(
        designs[best],
        before=_born(Initialisation(model, seed), target, (), lengths, **search).profiles,
        parameters=designs[best].parameters | {NORM_PLACEMENT: [best]},
        choices={placement: design.profiles for placement, design in designs.items()},
    )


def _born(
    born: Initialisation, target: Target, names: tuple[str, ...], lengths: tuple[int, ...], *, starts: int, seed: int
) -> Design:
    """The design of a model's key bias, its norms staying where they are; without free biases, the model as it is."""
    base = Architecture.from_model(born.model, mixing=1.0)
    if len(born.spec.layers) != base.depth:
        raise UsageError("mean field and the architecture see different layers of this model")
    task = _Task(base, target, names, lengths, theory="mean_field", profile=born.full, seed=seed, reach=born.reach)
    sorts = [FREE.build(name).of_model() for name in names if name in OF_MODELS]
    born.check_lengths(lengths)
    if not sorts:
        return task.design(base, {})
    return task.searched(sorts, solve_at_initialisation(born, base, sorts, target, lengths, starts=starts, seed=seed))


DRAWN_ROWS = 512
"""Contexts whose rows are all kept, for the heat map."""


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
