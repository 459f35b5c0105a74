"""`predict`: one theory's profile for an architecture or a model; and the theories of the architecture alone.

A theory of an architecture is spelled by its name, one of a model with its parameters as a literal call:
`power_rollout(key_path=False)`. A model's mask and positional logits come from its configuration. The mixing m_l is
known if a reference model's residual is `none` (1) or `mixed` (its own m_l); otherwise it is measured on prompts: mean
of |a| / (|x| + |a|).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64

from posbias.architecture import Architecture, Causal
from posbias.architecture.encodings import NoEncoding, Rope
from posbias.checks import CELLS, Natural, checked
from posbias.comparison.stored import ProfileRun, shared_settings
from posbias.errors import UsageError, check_most
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.registry import Registry, Spelled, parse_literal_call
from posbias.results.naming import Settings, curve_names, differing, names_beside
from posbias.results.records import Record
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.runs.parts import below
from posbias.theory.closed_form import closed_form, continuous_profile
from posbias.theory.rollout import MOST_STEPS, rollout_profile

THEORIES: Registry["Theory"] = Registry(
    "theory", homes={name: f"posbias.theory.{name}" for name in ("mean_field", "power_rollout")}
)


PROFILE = "profile/"
"""The arrays of a record that hold the predicted profile."""


@RESULTS.register("predict")
@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result):
    """A theory's profile, with the settings it was computed for."""

    drawn_by: ClassVar = "posbias.comparison.page:profiles_report"
    drawn_together: ClassVar = True
    profile: Profile
    """Influence of every input position on the last one."""
    theory: str
    """Name in `THEORIES`."""
    architecture: Architecture | None = None
    """The architecture without the parts that the theory ignores; None for theories of a model."""
    sink_share: float = 0.0
    """Share of the last position that comes from attention sinks; the profile is the rest, scaled to sum to 1."""
    spelled: str = ""
    """The theory with its parameters as a literal call; empty: its name alone."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """All parameters as resolved; none for theories of architectures."""
    per_prompt: Float64[np.ndarray, "count n_positions"] | None = None
    """Each prompt's own profile, if the theory reads prompts; rows sum to 1."""
    caveats: tuple[str, ...] = ()
    """Bounds of the trust in this prediction, a sentence each."""
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """Descriptions of the `model` and the `prompts`, if there are any."""

    @property
    def n_positions(self) -> int:
        """Context length N."""
        return self.profile.n_positions

    @property
    def described(self) -> Mapping[str, Any] | None:
        """The architecture in plain values."""
        return None if self.architecture is None else self.architecture.describe()

    def settings(self) -> Settings:
        """The theory and the architecture, per layer and head: the settings by which curves are named."""
        return {"theory": self.spelled or self.theory, **(self.described or {}), "positions": self.n_positions}

    def shown(self) -> Shown:
        """Its profile, by the theory's name."""
        shared = shared_settings({**self.about, "architecture": self.described}, self.n_positions)
        (name,) = names_beside([{"theory": self.theory, **self.parameters, **shared}])
        title = f"{self.spelled or self.theory}, {self.n_positions} positions"
        return Shown(title, (self.profile.curve(name),))

    @classmethod
    def from_record(cls, record: Record) -> Result:  # type: ignore[override]
        """The prediction that a record holds; of several their profiles alone."""
        if f"{PROFILE}influence" not in record.arrays:
            return ProfileRun.from_record(record)
        resolved, described = record.resolved, record.resolved.get("architecture")
        of_profile, parameters = below(record.arrays, PROFILE), resolved.get("parameters", {})
        per_prompt, profile = of_profile.pop("per_prompt", None), Profile(**of_profile)
        return cls(
            profile=profile,
            theory=resolved.get("theory", ""),
            architecture=None if described is None else Architecture.from_description(described),
            sink_share=record.scalars.get("sink_share", 0.0),
            spelled=resolved["title"].partition(" of ")[0] if parameters else "",
            parameters=parameters,
            per_prompt=per_prompt,
            caveats=tuple(map(str, record.scalars.get("caveats", ()))),
            seed=record.seeds.get("theory", 0),
            about={name: resolved[name] for name in ("model", "prompts") if name in resolved},
        ).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The prediction as a record, with descriptions."""
        model, spelled = self.about.get("model"), self.spelled or self.theory
        resolved = {
            "title": f"{spelled} of {'an architecture' if model is None else model.get('source', 'a model')}",
            "theory": self.theory,
            "parameters": dict(self.parameters),
            "n_positions": self.n_positions,
            "architecture": self.described,
            "model": model,
            "prompts": self.about.get("prompts"),
        }
        found = {**vars(self.profile), "per_prompt": self.per_prompt}
        return Record(
            "predict",
            {"theory": spelled, "n_positions": self.n_positions},
            resolved,
            {"sink_share": self.sink_share, **({"caveats": list(self.caveats)} if self.caveats else {})},
            {PROFILE + name: array for name, array in found.items() if array is not None and np.isfinite(array).any()},
            seeds={"theory": self.seed} if self.parameters else {},
        )


def predictions_record(predictions: Sequence[Prediction]) -> Record:
    """Several predictions over the same positions as one record, whose report draws them together.

    Each is kept under its name, made of the settings in which it differs, such as "alibi, mixing 0.1".

    Raises:
        UsageError: none, or predictions over different numbers of positions.
    """
    lengths = sorted({prediction.n_positions for prediction in predictions})
    if len(lengths) != 1:
        raise UsageError(f"predictions need one number of positions to be drawn together, got {lengths}")
    settings = [prediction.settings() for prediction in predictions]
    names = curve_names(settings)
    by_name, varied = dict(zip(names, predictions, strict=True)), differing(settings) or ["number"]
    resolved = {
        "title": f"{len(names)} predictions by {' and '.join(filter(None, (', '.join(varied[:-1]), varied[-1])))}",
        "n_positions": lengths[0],
        "curves": {f"theories/{name}": dict(curve) for name, curve in zip(names, settings, strict=True)},
    }
    shares = {name: prediction.sink_share for name, prediction in by_name.items()}
    record = Record("predict", {}, resolved, {"sink_share": shares})
    if caveats := dict.fromkeys(caveat for prediction in predictions for caveat in prediction.caveats):
        record.scalars["caveats"] = list(caveats)
    for name, prediction in by_name.items():
        record.arrays[f"theories/{name}/influence"] = prediction.profile.influence
    return record


class Theory(Spelled, ABC):
    """One way to predict a profile; its fields are its parameters."""

    reads_prompts: ClassVar[bool] = True
    """True if it reads prompts: for activations, or to measure a model's mixing."""

    @abstractmethod
    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """Predict the profile of an architecture or a model.

        Args:
            subject: An `Architecture`, or a model that `load_model` returned.
            n_positions: Context length N, >= 1.
            prompts: Prompts that `load_prompts` returned, if there are any.
            seed: Seed of everything that the theory draws, its intervals included.

        Raises:
            UsageError: the theory does not apply to the subject, or lacks prompts.
        """

    def labels(self, seed: int) -> dict[str, Any]:
        """The fields of a prediction that describe a theory of a model."""
        parameters = asdict(self)  # type: ignore[call-overload]
        return {"theory": self.name, "spelled": str(self), "parameters": parameters, "seed": seed}


BARE_WORD = re.compile(r"(=\s*)(?!(?:True|False|None)\b)([A-Za-z_]\w*)(?=\s*[,)])")
"""A parameter's value that is a single word: `target=logprob` needs no quotation marks."""


def parse_theory(text: str) -> tuple[str, Theory]:
    """The name of a theory and the theory, from its literal spelling such as "power_rollout(target=logprob)".

    Raises:
        UsageError: not a literal call, an unknown theory or parameter, or a value the theory refuses.
    """
    quoted = BARE_WORD.sub(r"\1'\2'", text)
    name, positional, keywords = parse_literal_call(quoted, THEORIES.sort)
    if (positional or keywords) and not fields(THEORIES[name]):
        raise UsageError(f"theory {name} takes no parameters, got {text!r}")
    return name, THEORIES.build(name, *positional, **keywords)


@checked
def predict(
    subject: Any,
    n_positions: Annotated[int, Ge(1)] | None = None,
    *,
    theory: str | Theory = "rollout",
    prompts: Prompts | None = None,
    seed: Natural = 0,
) -> Prediction:
    """Predict the profile of an architecture or a model by a theory.

    Args:
        subject: An `Architecture`; or a model, loaded or as `load_model` takes it: a hub id, a path, "demo" or a model
            of transformers. Theories of models need one. The other theories read a model's architecture from its
            configuration, and measure its mixing on the prompts unless a reference model fixes it.
        n_positions: Context length N in positions, >= 1; None: the length of the prompts.
        theory: A name in `THEORIES`: `rollout` (mixing), `rollout_content` (mixing and content), `attention_only`
            (neither), `continuous` and `closed_form` (uniform causal attention only), and theories of models with
            their parameters: `power_rollout(target=logprob)`, `mean_field(level=first)` ...
        prompts: Prompts of `load_prompts`, for theories that read activations or need a model's mixing.
        seed: Seed of all that a theory of a model draws (probes, heads, resamples of prompts), >= 0.

    Returns:
        The prediction; its profile sums to 1.

    Raises:
        UsageError: unknown theory or parameter, a theory that does not apply to the subject, or no length.
    """
    if n_positions is None:
        if prompts is None:
            raise UsageError("predict: without prompts it needs n_positions, a whole number of at least 1")
        n_positions = prompts.n_positions
    chosen = theory if isinstance(theory, Theory) else parse_theory(theory)[1]
    if not isinstance(subject, Architecture):
        from torch import nn

        from posbias.models.loading import as_model

        subject = as_model(subject) if isinstance(subject, str | Path | nn.Module) else subject
    prediction = chosen.predict(subject, n_positions, prompts, seed=seed)
    of_model = hasattr(subject, "architecture_traits")
    about = {
        "model": subject.describe() if of_model else None,
        "prompts": None if prompts is None else prompts.describe(),
    }
    return replace(prediction, about=about)


class ArchitectureTheory(Theory):
    """A theory of the architecture alone, without weights or texts; it has no parameters."""

    ignores: ClassVar[Mapping[str, Any]] = {"content": 0.0}
    """Fields of an architecture that the theory leaves out, with the values it takes in their place."""

    uniform_causal: ClassVar[bool] = False
    """True if the theory holds for uniform causal attention alone."""

    def influence(self, architecture: Architecture, n_positions: int) -> Float64[np.ndarray, "n_positions"]:
        """Influence of every position; sums to 1, or to 1 minus the sinks' share."""
        return rollout_profile(architecture, n_positions=n_positions)

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The profile, and the sinks' share of the last position."""
        heads, depth = (subject.heads, subject.depth) if isinstance(subject, Architecture) else (1, 1)
        check_most(f"n_positions {n_positions:,} with {heads} heads", heads * n_positions, CELLS)
        layers = f"n_positions {n_positions:,} with {depth} layers of {heads} heads"
        check_most(layers, depth * heads * n_positions, MOST_STEPS, "steps")
        architecture = replace(_architecture(subject, self.name, prompts), **self.ignores)
        sinks = bool(np.any(architecture.layer_sinks > -np.inf))
        for group in (group for layer in architecture.head_groups for group in layer if self.uniform_causal):
            if not (isinstance(group.mask, Causal) and isinstance(group.encoding, NoEncoding)):
                raise UsageError(
                    f"theory {self.name} holds for mask causal with encoding none only, got mask {group.mask} with "
                    f"encoding {group.encoding}"
                )
        if self.uniform_causal and sinks:
            raise UsageError(f"theory {self.name} holds without attention sinks only")
        influence = self.influence(architecture, n_positions)
        profile = Profile.normalised(influence) if sinks else Profile(influence)
        share = max(0.0, 1 - float(influence.sum())) if sinks else 0.0
        return Prediction(profile, self.name, architecture, share, caveats=_assumptions(architecture))


@THEORIES.register("attention_only")
@dataclass(frozen=True)
class AttentionOnly(ArchitectureTheory):
    """Rollout of attention alone: mixing 1 in every layer, content ignored (Wu et al. 2025, arXiv 2502.01951)."""

    reads_prompts: ClassVar[bool] = False
    ignores: ClassVar[Mapping[str, Any]] = {"content": 0.0, "mixing": 1.0}


@THEORIES.register("rollout")
@dataclass(frozen=True)
class ResidualRollout(ArchitectureTheory):
    """Rollout with residual mixing, content ignored (arXiv 2602.16837)."""


@THEORIES.register("rollout_content")
@dataclass(frozen=True)
class ContentRollout(ArchitectureTheory):
    """Rollout with residual mixing and the diagonal content offset (arXiv 2602.16837)."""

    ignores: ClassVar[Mapping[str, Any]] = {}


@THEORIES.register("closed_form")
@dataclass(frozen=True)
class FiniteClosedForm(ArchitectureTheory):
    """The exact finite-N form of uniform causal attention at every position."""

    uniform_causal: ClassVar[bool] = True

    def influence(self, architecture: Architecture, n_positions: int) -> Float64[np.ndarray, "n_positions"]:
        """The exact form at every position."""
        return closed_form(n_positions, np.arange(n_positions), architecture.layer_mixing)


@THEORIES.register("continuous")
@dataclass(frozen=True)
class ContinuousLimit(ArchitectureTheory):
    """The published continuous limit, averaged over the cell of each position (arXiv 2603.10123)."""

    uniform_causal: ClassVar[bool] = True

    def influence(self, architecture: Architecture, n_positions: int) -> Float64[np.ndarray, "n_positions"]:
        """Mass of the continuous limit in every position's cell."""
        return continuous_profile(n_positions, architecture.layer_mixing)


def _assumptions(architecture: Architecture) -> tuple[str, ...]:
    """What a rollout of rotary encodings assumes, since rotation alone moves no attention."""
    encodings = sorted({group.encoding for layer in architecture.head_groups for group in layer}, key=str)
    return tuple(
        f"RoPE only turns content, and a rollout has none: the curve of {rope} assumes queries and keys at an angle of "
        f"{rope.angle:g} radians (0: they point the same way) in every pair of features, with logit {rope.logit:g} "
        "(rope(logit=..., angle=...)). Without content RoPE is the same as none; a model's own content differs by head "
        "and token."
        for rope in encodings
        if isinstance(rope, Rope)
    )


def known_mixing(model: Any) -> Float64[np.ndarray, "layers"] | None:
    """The mixing that a model's configuration fixes; None if it depends on weights and prompts."""
    from posbias.models.reference.network import ReferenceTransformer

    if not isinstance(model, ReferenceTransformer) or model.config.residual == "added":
        return None
    architecture = model.config.architecture
    return np.ones(architecture.depth) if model.config.residual == "none" else architecture.layer_mixing


def _architecture(subject: Any, theory: str, prompts: Any) -> Architecture:
    """The architecture that was given, or a model's own, with its mixing known or measured on the prompts.

    `attention_only` leaves the mixing out; diagonal content is known of no model.

    Raises:
        UsageError: neither of the two, no family description, mixing or content that is not known.
        RunError: norms of stream and branch are not finite, or both vanish.
    """
    if isinstance(subject, Architecture):
        return subject
    if not hasattr(subject, "architecture_traits"):
        raise UsageError(
            f"theory {theory} needs an Architecture or a model (one of load_model or transformers, a hub id or a "
            f"path), got {type(subject).__name__}"
        )
    if theory == "rollout_content":
        raise UsageError(
            "theory rollout_content needs the diagonal content of attention, which a model's configuration does not "
            "give; give an Architecture with content=..."
        )
    if theory == "attention_only":
        return Architecture.from_model(subject)
    mixing = known_mixing(subject)
    if prompts is not None:
        # As arXiv 2602.16837 defines it in its code: the mean over tokens, then over prompts.
        norms = (subject.branch_norms(subject.token_tensor([row.tolist()])) for row in prompts.token_ids)
        mixing = np.mean([of_prompt.share().mean(axis=1) for of_prompt in norms], axis=0)
    if mixing is None:
        raise UsageError(f"theory {theory} of a model measures its residual share: give prompts=load_prompts(...)")
    return Architecture.from_model(subject, mixing=mixing)
