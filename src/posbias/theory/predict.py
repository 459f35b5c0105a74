"""`predict`: one theory's profile for an architecture or a model. A theory is one registered function.

A theory maps (subject, n_positions, prompts) to a `Forecast`; one that cannot use the subject says so. Theories of a
loaded model have parameters, spelled as a literal call: `power_rollout(form=isotropic, key_path=False)`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture, Causal
from posbias.architecture.encodings import NoEncoding
from posbias.checks import check_seed, check_whole, checked
from posbias.errors import UsageError
from posbias.limits import CELLS, STEPS
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.records import Record
from posbias.registry import Registry, parse_literal_call
from posbias.statistics import Interval
from posbias.theory.closed_form import closed_form, continuous_profile
from posbias.theory.rollout import rollout_profile

THEORIES: Registry["Theory"] = Registry("theory")
BARE_WORD = re.compile(r"(=\s*)(?!(?:True|False|None)\b)([A-Za-z_]\w*)(?=\s*[,)])")
"""A parameter's value that is a single word: `form=isotropic` needs no quotation marks."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a theory computes, before it is labelled."""

    influence: Float64[np.ndarray, "n_positions"]
    """Influence of each input position, >= 0; sums to 1, or to 1 minus the sinks' share."""
    architecture: Architecture | None
    """What was evaluated: as given, or with what the theory ignores taken out; None for theories of a model."""
    low: Float64[np.ndarray, "n_positions"] | None = None
    """Lower end of the pointwise interval over prompts, where the theory reads prompts."""
    high: Float64[np.ndarray, "n_positions"] | None = None
    per_prompt: Float64[np.ndarray, "count n_positions"] | None = None
    """Each prompt's own profile; rows sum to 1."""
    found: Mapping[str, Interval | float] = field(default_factory=dict)
    """Numbers that the theory finds beside the profile, by name."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the same sort, by slash-separated name."""
    caveats: tuple[str, ...] = ()
    """What bounds the trust in it, one sentence each."""


class ModelTheory(ABC):
    """A theory of a loaded model; its fields are its parameters."""

    name: ClassVar[str]
    reads_prompts: ClassVar[bool] = True

    @abstractmethod
    def forecast(self, subject: Any, n_positions: int, prompts: Any, *, seed: int) -> Forecast:
        """What the theory says of a model.

        Args:
            subject: What `load_model` returns.
            n_positions: Context length N, >= 1.
            prompts: What `load_prompts` returns; None where none are given.
            seed: Of everything that the theory draws, its intervals included.

        Raises:
            UsageError: the theory does not apply to the subject, or lacks prompts.
        """

    def describe(self) -> dict[str, Any]:
        """The parameters as plain values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


Theory = Callable[[Any, int, Any], Forecast] | ModelTheory


@dataclass(frozen=True, eq=False)
class Prediction:
    """A theory's profile and what it was computed for."""

    profile: Profile
    """Influence of every input position on the last one."""
    theory: str
    """Name in `THEORIES`."""
    architecture: Architecture | None
    """The architecture, as the theory used it; None where the theory works from a model."""
    n_positions: int
    """Context length N."""
    sink_share: float = 0.0
    """Share of the last position that comes from attention sinks; the profile is what comes from positions, scaled to
    sum to 1."""
    spelled: str = ""
    """The theory with its parameters as a literal call; empty: its name alone."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """All parameters as resolved; none for theories of architectures."""
    per_prompt: Float64[np.ndarray, "count n_positions"] | None = None
    """Each prompt's own profile, where the theory reads prompts; rows sum to 1."""
    found: Mapping[str, Interval | float] = field(default_factory=dict)
    """Numbers beside the profile, by name, such as the value path's `score_path_share`."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays beside the profile, by slash-separated name."""
    caveats: tuple[str, ...] = ()
    """What bounds the trust in this prediction, one sentence each."""
    seed: int = 0

    def record(
        self,
        arguments: Mapping[str, Any],
        *,
        command: str = "",
        model: Mapping[str, Any] | None = None,
        prompts: Mapping[str, Any] | None = None,
    ) -> Record:
        """The prediction as a record that reports can draw.

        Args:
            arguments: What the user passed.
            command: What repeats it in a shell.
            model: `describe()` of the model, where the theory read one.
            prompts: `describe()` of the prompts, where it read any.
        """
        about = "an architecture" if model is None else str(model.get("source", "a model"))
        resolved = {
            "title": f"{self.spelled or self.theory} of {about}",
            "theory": self.theory,
            "parameters": dict(self.parameters),
            "n_positions": self.n_positions,
            "architecture": None if self.architecture is None else self.architecture.describe(),
            "model": model,
            "prompts": prompts,
            "command": command,
        }
        record = Record("predict", dict(arguments), resolved, scalars={"sink_share": self.sink_share})
        if self.parameters:
            record.seeds["theory"] = self.seed
        if self.found:
            record.scalars["found"] = {name: _numbers(value) for name, value in self.found.items()}
        if self.caveats:
            record.scalars["caveats"] = list(self.caveats)
        arrays = {**vars(self.profile), "per_prompt": self.per_prompt}
        known = {name: array for name, array in arrays.items() if array is not None and np.any(np.isfinite(array))}
        record.arrays.update({f"profile/{name}": array for name, array in known.items()})
        record.arrays.update(self.arrays)
        return record


def _numbers(value: Interval | float) -> dict[str, float | None]:
    """A number with its interval, None where it has none."""
    if not isinstance(value, Interval):
        return {"value": float(value), "low": None, "high": None}
    return value.as_record()


def parse_theory(text: str) -> tuple[str, Theory]:
    """The name of a theory and the theory, from its literal spelling such as "power_rollout(form=isotropic)".

    Raises:
        UsageError: not a literal call, an unknown theory or parameter, or a value the theory refuses.
    """
    quoted = BARE_WORD.sub(r"\1'\2'", text)
    name, positional, keywords = parse_literal_call(quoted, THEORIES.sort)
    if isinstance(THEORIES[name], type):
        return name, THEORIES.parse(quoted)
    if positional or keywords:
        raise UsageError(f"theory {name} takes no parameters, got {text!r}")
    return name, THEORIES[name]


@checked
def predict(
    subject: Any, n_positions: int, *, theory: str = "rollout", prompts: Prompts | None = None, seed: int = 0
) -> Prediction:
    """The position-bias profile a theory predicts.

    Args:
        subject: An `Architecture`, or what `load_model` returns; theories of models need the latter. The other
            theories take a model's architecture from its configuration, with the mixing it has: known of reference
            models without residual or with a mixed one, otherwise measured on the prompts.
        n_positions: Context length N in positions, >= 1.
        theory: A name in `THEORIES`: `rollout` (mixing), `rollout_content` (mixing and content), `attention_only`
            (neither), `continuous` and `closed_form` (uniform causal attention only), and theories of models with
            their parameters: `power_rollout(form=isotropic)`, `sign_randomised(draws=8)` ...
        prompts: What `load_prompts` returns, for theories that read activations or need a model's mixing.
        seed: Of what a theory of a model draws (signs, probes, heads, resamples of prompts), >= 0.

    Returns:
        The prediction; its profile sums to 1.

    Raises:
        UsageError: unknown theory or parameter, or a theory that does not apply to the subject.
    """
    name, compute = parse_theory(theory)
    check_whole("n_positions", n_positions, least=1, numpy=True)
    check_seed(seed)
    if isinstance(compute, ModelTheory):
        return _of_model(compute, compute.forecast(subject, int(n_positions), prompts, seed=seed), seed)
    _check_size(subject, int(n_positions))
    forecast = compute(subject, int(n_positions), prompts)
    sinks = forecast.architecture is not None and bool(np.any(forecast.architecture.layer_sinks > -np.inf))
    share = max(0.0, 1 - float(forecast.influence.sum())) if sinks else 0.0
    profile = Profile.normalised(forecast.influence) if sinks else Profile(forecast.influence)
    return Prediction(profile, name, forecast.architecture, int(n_positions), share)


def _check_size(subject: Any, n_positions: int) -> None:
    """Refuse a length that no machine has the memory or the time for.

    Raises:
        UsageError: it is too long.
    """
    heads = subject.heads if isinstance(subject, Architecture) else 1
    depth = subject.depth if isinstance(subject, Architecture) else 1
    CELLS.check(f"n_positions {n_positions:,} with {heads} heads", heads * n_positions)
    STEPS.check(f"n_positions {n_positions:,} with {depth} layers of {heads} heads", depth * heads * n_positions)


def _of_model(theory: ModelTheory, forecast: Forecast, seed: int) -> Prediction:
    """A model theory's forecast, labelled."""
    profile = Profile(forecast.influence, forecast.low, forecast.high)
    return Prediction(
        profile,
        theory.name,
        forecast.architecture,
        profile.n_positions,
        spelled=THEORIES.spell(theory),
        parameters=theory.describe(),
        per_prompt=forecast.per_prompt,
        found=forecast.found,
        arrays=forecast.arrays,
        caveats=forecast.caveats,
        seed=seed,
    )


@THEORIES.register("attention_only")
def attention_only(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """Rollout of attention alone: mixing 1 in every layer, content ignored (Wu et al. 2025)."""
    return _rolled_out(replace(_architecture(subject, "attention_only", prompts), mixing=1.0, content=0.0), n_positions)


@THEORIES.register("rollout")
def rollout(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """Rollout with residual mixing, content ignored (arXiv 2602.16837)."""
    return _rolled_out(replace(_architecture(subject, "rollout", prompts), content=0.0), n_positions)


@THEORIES.register("rollout_content")
def rollout_content(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """Rollout with residual mixing and the diagonal content offset (arXiv 2602.16837)."""
    return _rolled_out(_architecture(subject, "rollout_content", prompts), n_positions)


@THEORIES.register("continuous")
def continuous(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """The published continuous limit, averaged over the cell of each position (arXiv 2603.10123)."""
    architecture = _uniform_causal(subject, "continuous", prompts)
    return Forecast(continuous_profile(n_positions, architecture.layer_mixing), architecture)


@THEORIES.register("closed_form")
def finite_closed_form(subject: Any, n_positions: int, prompts: Any) -> Forecast:
    """The exact finite-N form of uniform causal attention at every position."""
    architecture = _uniform_causal(subject, "closed_form", prompts)
    return Forecast(closed_form(n_positions, np.arange(n_positions), architecture.layer_mixing), architecture)


def _rolled_out(architecture: Architecture, n_positions: int) -> Forecast:
    return Forecast(rollout_profile(architecture, n_positions=n_positions), architecture)


def _architecture(subject: Any, theory: str, prompts: Any) -> Architecture:
    """As given, or a model's own, with its mixing known or measured on the prompts."""
    if isinstance(subject, Architecture):
        return subject
    if not hasattr(subject, "architecture_traits"):
        raise UsageError(
            f"theory {theory} needs an Architecture or a model (what load_model returns), got {type(subject).__name__}"
        )
    from posbias.theory.model_architecture import architecture_of

    return architecture_of(subject, prompts, theory=theory)


def _uniform_causal(subject: Any, theory: str, prompts: Any) -> Architecture:
    """The architecture without content, if all its heads are uniform and causal."""
    architecture = replace(_architecture(subject, theory, prompts), content=0.0)
    groups = [group for layer in architecture.head_groups for group in layer]
    odd = [group for group in groups if not isinstance(group.mask, Causal)]
    odd += [group for group in groups if not isinstance(group.encoding, NoEncoding)]
    if odd:
        raise UsageError(
            f"theory {theory} holds for mask causal with encoding none only, "
            f"got mask {odd[0].mask} with encoding {odd[0].encoding}"
        )
    if np.any(architecture.layer_sinks > -np.inf):
        raise UsageError(f"theory {theory} holds without attention sinks only")
    return architecture
