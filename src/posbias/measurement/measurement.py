"""`measure`: influence profiles and mixing of a model over many prompts, with intervals over prompts.

Averaging `profiles` normalises every prompt and then averages, so that prompts count equally; `norms` averages the raw
norms and normalises once (arXiv 2602.16837's code), so that prompts with large gradients dominate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import check_seed, checked
from posbias.engines import Engine, Local, collect
from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import PrecisionLoss, PromptMeasurement, check_prompts, measure_prompt
from posbias.models.model import Model
from posbias.models.request import ModelRequest
from posbias.models.weights import joined_sha256, network_sha256
from posbias.parts import PartStore, made_by
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.statistics import CONFIDENCE, estimate, mean_ends

AVERAGINGS = ("profiles", "norms")


def average_profile(norms: Float64[np.ndarray, "count n_positions"], *, averaging: str) -> Profile:
    """The profile of several prompts.

    Args:
        norms: Raw norms per prompt, finite, >= 0, no prompt all zero.
        averaging: "profiles" or "norms", see above.
    """
    return Profile.normalised(_units(norms, averaging).mean(axis=0))


def profile_with_interval(
    norms: Float64[np.ndarray, "count n_positions"], *, averaging: str, confidence: float
) -> Profile:
    """`average_profile` with its pointwise interval, from the same statistic with each prompt left out.

    With a single prompt the interval is (-inf, inf).
    """
    units = _units(norms, averaging)
    count, total = len(units), units.sum(axis=0)
    profile = Profile.normalised(total)
    left_out = total - units if count > 1 else np.ones_like(units)
    influences = (1 - count) * left_out / left_out.sum(axis=1, keepdims=True)
    low, high = estimate(profile.influence, influences).ends(confidence, least=0.0, most=1.0)
    return Profile(profile.influence, low, high)


def _units(norms: Float64[np.ndarray, "count n_positions"], averaging: str) -> Float64[np.ndarray, "count n"]:
    """What is averaged over prompts."""
    return norms / norms.sum(axis=1, keepdims=True) if averaging == "profiles" else norms


@checked
@dataclass(frozen=True)
class RunOptions:
    """Where prompts are measured and kept; nothing here changes a number, but for the engine's threads."""

    engine: Engine = field(default_factory=Local)
    directory: Path | None = None
    """Where finished prompts are kept (in `parts/`) until `posbias.parts.clear_parts`; None: nowhere."""
    resume: bool = False
    """Take finished prompts of the same measurement from the directory; otherwise older ones are removed."""


@dataclass(frozen=True)
class PromptWork:
    """The prompts of one model as units of work."""

    request: ModelRequest | None
    network_sha256: str | None
    """None where no other process loads the model: hashing all weights takes a second per gigabyte."""
    token_ids: Int64[np.ndarray, "count n_positions"]
    kinds: tuple[Kind, ...]
    seed: int
    passes: PassOptions
    description: str = "measuring prompts"

    def prepare(self) -> Model:
        """The model, loaded."""
        return ModelRequest.load_same(self.request, self.network_sha256)

    def compute(self, prepared: Model, unit: int) -> dict[str, np.ndarray]:
        """One prompt, measured."""
        measured = measure_prompt(
            prepared, self.token_ids[unit], kinds=self.kinds, key=(self.seed, unit), options=self.passes
        )
        return measured.to_arrays()


@dataclass(frozen=True)
class MeasuredPrompts:
    """Every prompt of a measurement, in order."""

    prompts: list[PromptMeasurement]
    model: dict[str, Any] | None
    """What `Model.describe` said, where it was asked (it reads all weights): for finished prompts in a directory."""


def measure_prompts(
    model: Model, prompts: Prompts, *, kinds: Sequence[Kind], seed: int, options: "MeasureOptions"
) -> MeasuredPrompts:
    """Every prompt measured, in order.

    Raises:
        UsageError: workers are asked for a model they cannot load.
        RunError: a gradient is not finite, or a prompt lost its worker time and again.
    """
    run = options.run
    described = None if run.directory is None else model.describe()
    work = PromptWork(
        request=model.reload_request,
        network_sha256=None if run.engine.in_process else _network_hash(model, described),
        token_ids=prompts.token_ids,
        kinds=tuple(kinds),
        seed=seed,
        passes=options.passes,
    )
    settings: Mapping[str, Any] = {}
    if run.directory is not None:
        settings = {
            "model": described,
            "prompts": prompts.describe(),
            "kinds": [str(kind) for kind in kinds],
            "seed": seed,
            "passes": vars(options.passes),
            "threads": run.engine.pinned_threads,
            "made_by": made_by(),
        }
    store = PartStore(run.directory, settings, resume=run.resume)
    names = [f"prompt-{index:06d}" for index in range(prompts.count)]
    pieces = collect(work, names, engine=run.engine, store=store, prepared=model)
    return MeasuredPrompts([PromptMeasurement.from_arrays(piece) for piece in pieces], described)


def _network_hash(model: Model, described: Mapping[str, Any] | None) -> str:
    """The network's fingerprint, from those of its description where it has them: weights are read once."""
    told = described or {}
    parts = ("weights_sha256", "buffers_sha256", "config_sha256")
    if all(name in told for name in parts):
        return joined_sha256(*(told[name] for name in parts))
    return network_sha256(model.network)


DEFAULT_KINDS = ("jacobian", "probability")
KEEPS = ("prompts", "mean")


@checked
@dataclass(frozen=True)
class MeasureOptions:
    """How prompts are averaged, how intervals are made and how passes are run."""

    averaging: str = "profiles"
    """"profiles" (normalise each prompt, then average) or "norms" (average, then normalise once)."""
    confidence: float = CONFIDENCE
    """Coverage of the intervals over prompts, in (0, 1)."""
    passes: PassOptions = field(default_factory=PassOptions)
    """The output that is read, layers, precision check, memory against time."""
    keep: str = "prompts"
    """What a record stores: every prompt's own profile ("prompts"), or their average with its interval ("mean")."""
    run: RunOptions = field(default_factory=RunOptions)
    """Which processes or machines measure, and where finished prompts are kept."""

    def __post_init__(self) -> None:
        if self.averaging not in AVERAGINGS:
            raise UsageError(f"averaging must be one of {', '.join(AVERAGINGS)}, got {self.averaging!r}")
        if self.keep not in KEEPS:
            raise UsageError(f"keep must be one of {', '.join(KEEPS)}, got {self.keep!r}")
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence must lie in (0, 1), got {self.confidence}")


@dataclass(frozen=True, eq=False)
class DepthProfiles:
    """How the profile forms: the influence on the stream after each chosen layer."""

    layers: tuple[int, ...]
    """Ascending; layer 0 is nearest the input."""
    profiles: tuple[Profile, ...]
    """One per layer, averaged over prompts, with intervals."""
    per_prompt: Float64[np.ndarray, "count layers n_positions"]
    """Raw norms of every prompt, not normalised."""
    standard_errors: Float64[np.ndarray, "count layers n_positions"] | None
    """Of the raw norms, from the spread over probes."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """A model's influence profiles and mixing, with pointwise intervals over prompts."""

    kinds: tuple[Kind, ...]
    profiles: dict[str, Profile]
    """By kind name; `.influence` sums to 1, `.low` and `.high` are the interval's ends."""
    per_prompt: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Raw norms of every prompt, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "count n_positions"]]
    """Of the raw norms, for kinds estimated by random covectors."""
    mixing: Float64[np.ndarray, "layers"] | None
    """Mean over tokens and prompts of |a| / (|x| + |a|), what the published rollout uses; None if left out."""
    mixing_low: Float64[np.ndarray, "layers"] | None
    mixing_high: Float64[np.ndarray, "layers"] | None
    mixing_frobenius: Float64[np.ndarray, "layers"] | None
    """Mean over prompts of ||a||_F / (||x||_F + ||a||_F), the published definition; None if left out."""
    mixing_frobenius_low: Float64[np.ndarray, "layers"] | None
    mixing_frobenius_high: Float64[np.ndarray, "layers"] | None
    left_out: tuple[str, ...]
    """What could not be measured on this model, and why."""
    seeds: dict[str, int]
    options: MeasureOptions
    details: dict[str, dict[str, Float64[np.ndarray, "count"]]] = field(default_factory=dict)
    """What else kinds found on every prompt: {kind: {"completeness_gap": ...}}."""
    depth: DepthProfiles | None = None
    precision: dict[str, PrecisionLoss] = field(default_factory=dict)
    """By kind, for models below float32: the profiles of the first prompts against those of a float32 copy."""
    model: dict[str, Any] | None = None
    """What `Model.describe` said before the first prompt, where prompts were kept in a directory; None elsewhere."""

    @property
    def count(self) -> int:
        """Prompts measured."""
        return len(next(iter(self.per_prompt.values())))

    @property
    def n_positions(self) -> int:
        """Positions of every prompt."""
        return int(next(iter(self.per_prompt.values())).shape[1])

    def describe(self) -> dict[str, Any]:
        """Plain values for a record: what was measured and how."""
        return {
            "kinds": [str(kind) for kind in self.kinds],
            "count": self.count,
            "n_positions": self.n_positions,
            "seeds": dict(self.seeds),
            "left_out": list(self.left_out),
            **{name: value for name, value in asdict(self.options).items() if name != "run"},
            "output": self.options.passes.output,
            "engine": self.options.run.engine.describe(),
        }


def combine(
    measured: Sequence[PromptMeasurement],
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: int = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """The measurement that prompts measured one by one amount to; `measure` is `measure_prompt` and then this.

    Args:
        measured: One per prompt, in the order of the prompts.
        kinds: The kinds they were measured with.
        seed: The seed they were measured with.
        options: Averaging and intervals.

    Raises:
        UsageError: no prompt, or one without a kind asked for.
        RunError: a prompt has no influence at all.
    """
    resolved = resolve_kinds(kinds)
    options = options or MeasureOptions()
    check_seed(seed)
    if not measured:
        raise UsageError("no measured prompt to combine; give at least 1")
    per_prompt = {kind.name: _stack([prompt.norms.get(kind.name) for prompt in measured], kind) for kind in resolved}
    for kind in resolved:
        for index in np.flatnonzero(per_prompt[kind.name].sum(axis=1) == 0):
            raise RunError(f"{kind}: every position of prompt {index} has zero influence, so it has no profile")
    profiles = {name: _profile(norms, options) for name, norms in per_prompt.items()}
    errors = {
        kind.name: _stack([prompt.standard_errors.get(kind.name) for prompt in measured], kind)
        for kind in resolved
        if kind.sampled
    }
    missing = () if measured[0].mixing is not None else ("mixing: the model's family has no description",)
    left_out = dict.fromkeys([*missing, *(reason for prompt in measured for reason in prompt.left_out)])
    tokens = _mean_with_interval([prompt.mixing for prompt in measured], options)
    frobenius = _mean_with_interval([prompt.mixing_frobenius for prompt in measured], options)
    return Measurement(
        kinds=resolved,
        profiles=profiles,
        per_prompt=per_prompt,
        standard_errors=errors,
        mixing=tokens[0],
        mixing_low=tokens[1],
        mixing_high=tokens[2],
        mixing_frobenius=frobenius[0],
        mixing_frobenius_low=frobenius[1],
        mixing_frobenius_high=frobenius[2],
        left_out=tuple(left_out),
        seeds={"measure": seed},
        options=options,
        details=_details(measured),
        depth=_depth(measured, options),
        precision=_precision(measured, resolved),
    )


def _profile(norms: Float64[np.ndarray, "count n_positions"], options: MeasureOptions) -> Profile:
    """The prompts' average with its interval."""
    return profile_with_interval(norms, averaging=options.averaging, confidence=options.confidence)


def _details(measured: Sequence[PromptMeasurement]) -> dict[str, dict[str, Float64[np.ndarray, "count"]]]:
    return {
        kind: {name: np.array([prompt.details[kind][name] for prompt in measured]) for name in names}
        for kind, names in measured[0].details.items()
    }


def _depth(measured: Sequence[PromptMeasurement], options: MeasureOptions) -> DepthProfiles | None:
    found = [prompt.depth for prompt in measured if prompt.depth is not None]
    if len(found) < len(measured):
        return None
    layers = found[0].layers
    per_prompt = np.stack([entry.norms for entry in found])
    for row, layer in enumerate(layers):
        for index in np.flatnonzero(per_prompt[:, row].sum(axis=1) == 0):
            raise RunError(f"layers: layer {layer} on prompt {index} depends on no position, so it has no profile")
    errors = [entry.standard_errors for entry in found if entry.standard_errors is not None]
    return DepthProfiles(
        layers=layers,
        profiles=tuple(_profile(per_prompt[:, row], options) for row in range(len(layers))),
        per_prompt=per_prompt,
        standard_errors=np.stack(errors) if errors else None,
    )


def _precision(measured: Sequence[PromptMeasurement], kinds: Sequence[Kind]) -> dict[str, PrecisionLoss]:
    checked = [prompt for prompt in measured if prompt.full_precision]
    if not checked:
        return {}
    return {
        kind.name: PrecisionLoss.between(
            np.stack([prompt.norms[kind.name] for prompt in checked]),
            np.stack([prompt.full_precision[kind.name] for prompt in checked]),
        )
        for kind in kinds
    }


def _stack(
    rows: Sequence[Float64[np.ndarray, "n_positions"] | None], kind: Kind
) -> Float64[np.ndarray, "count n_positions"]:
    """The prompts' arrays of one kind, one row each."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        raise UsageError(f"{len(rows) - len(present)} of {len(rows)} prompts were measured without kind {kind}")
    if len({row.size for row in present}) > 1:
        raise UsageError(f"prompts of {sorted({row.size for row in present})} positions; all must be equally long")
    return np.stack(present)


def _mean_with_interval(
    rows: Sequence[Float64[np.ndarray, "layers"] | None], options: MeasureOptions
) -> tuple[Float64[np.ndarray, "layers"] | None, ...]:
    """Mean over prompts with the ends of its interval; three times None unless every prompt has a value."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        return None, None, None
    units = np.stack(present)
    return units.mean(axis=0), *mean_ends(units, confidence=options.confidence, least=0.0, most=1.0)


@checked
def measure(
    model: Model,
    prompts: Prompts,
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: int = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Measure how much every input position influences the output, and how strongly each layer mixes.

    Per prompt: one forward pass without gradients (mixing), one with, and one backward pass for every covector (4 for
    the default `jacobian`, 1 for `probability`), each 2 P N flops for P weights outside the embedding table. Memory
    beyond the weights is one prompt's saved activations, of order L N d numbers, whatever the number of prompts;
    nothing of size N x vocabulary is formed.

    Args:
        model: What `posbias.load_model` returns.
        prompts: Equally long prompts, at least 1.
        kinds: Kinds of influence, objects or literals such as `"jacobian(probes=8)"`, each at most once.
        seed: Of the random probes, >= 0.
        options: Averaging, intervals; in `options.passes`, the output (the last position's by default), layers, the
            precision check, memory; in `options.run`, the engine and where finished prompts are kept.

    Returns:
        Profiles by kind name, raw norms per prompt, mixing; `left_out` says what the model does not allow.

    Raises:
        UsageError: an unknown kind, one that cannot be measured on the output, or prompts the model cannot take.
        RunError: a gradient is not finite, or a prompt has no influence at all.
    """
    resolved = resolve_kinds(kinds)
    check_seed(seed)
    check_prompts(model, prompts)
    options = options or MeasureOptions()
    for kind in resolved:
        kind.check_output(options.passes.read_output)
    measured = measure_prompts(model, prompts, kinds=resolved, seed=seed, options=options)
    measurement = combine(measured.prompts, kinds=resolved, seed=seed, options=options)
    return replace(measurement, model=measured.model)
