"""`Theory`, a registered frozen class whose fields are its parameters, and `Prediction`, the profile it predicts.

A theory of an architecture is spelled by its name, one of a model with its parameters as a literal call:
`power_rollout(form=isotropic, key_path=False)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.comparison.stored import ProfileRun, shared_settings
from posbias.display.naming import Settings, curve_names, differing, names_beside
from posbias.display.showing import Shown
from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.registry import Registry
from posbias.runs.parts import below
from posbias.runs.records import Record
from posbias.runs.results import RESULTS, Result

THEORIES: Registry["Theory"] = Registry("theory")
"""Complete once `posbias.theory.known_theories` was called: theories of models are imported when they are needed."""


PROFILE = "profile/"
"""The arrays of a record that hold the predicted profile."""
ABOUT = ("model", "prompts")


@RESULTS.register("predict")
@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result):
    """A theory's profile, with the settings it was computed for."""

    profile: Profile
    """Influence of every input position on the last one."""
    theory: str
    """Name in `THEORIES`."""
    architecture: Architecture | None
    """The architecture without the parts that the theory ignores; None for theories of a model."""
    n_positions: int
    """Context length N."""
    sink_share: float = 0.0
    """Share of the last position that comes from attention sinks; the profile is the rest, scaled to sum to 1."""
    spelled: str = ""
    """The theory with its parameters as a literal call; empty: its name alone."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """All parameters as resolved; none for theories of architectures."""
    per_prompt: Float64[np.ndarray, "count n_positions"] | None = None
    """Each prompt's own profile, if the theory reads prompts; rows sum to 1."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the profile, by name, such as mean field's `largest_logit_variance`."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays beside the profile, by slash-separated name."""
    caveats: tuple[str, ...] = ()
    """Bounds of the trust in this prediction, a sentence each."""
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    """Descriptions of the `model` and the `prompts`, if there are any."""

    def settings(self) -> Settings:
        """The theory and the architecture, per layer and head: the settings by which curves are named."""
        described = {} if self.architecture is None else self.architecture.describe()
        return {"theory": self.spelled or self.theory, **described, "positions": self.n_positions}

    def shown(self) -> Shown:
        """Its profile, by the theory's name."""
        numbers = {name: f"{value:.4g}" for name, value in self.numbers.items()}
        title = f"{self.spelled or self.theory}, {self.n_positions} positions"
        architecture = None if self.architecture is None else self.architecture.describe()
        shared = shared_settings({**self.about, "architecture": architecture}, self.n_positions)
        settings: Settings = {"theory": self.theory, **self.parameters, **shared}
        (name,) = names_beside([settings])
        caveats = {f"caveat {number}": text for number, text in enumerate(self.caveats, 1)}
        return Shown(title, (self.profile.series(name),), facts=numbers | caveats)

    @classmethod
    def from_record(cls, record: Record) -> Result:
        """The prediction that a record holds; of several their profiles alone."""
        if f"{PROFILE}influence" not in record.arrays:
            return ProfileRun.from_record(record)
        resolved, described = record.resolved, record.resolved.get("architecture")
        about: dict[str, Any] = {name: resolved[name] for name in ABOUT if name in resolved}
        of_profile, parameters = below(record.arrays, PROFILE), resolved.get("parameters", {})
        profile = Profile(of_profile["influence"], of_profile.get("low"), of_profile.get("high"))
        return cls(
            profile=profile,
            theory=resolved.get("theory", ""),
            architecture=None if described is None else Architecture.from_description(described),
            n_positions=profile.n_positions,
            sink_share=record.scalars.get("sink_share", 0.0),
            spelled=resolved["title"].removesuffix(_title_of("", record.model)) if parameters else "",
            parameters=parameters,
            per_prompt=of_profile.get("per_prompt"),
            numbers={name: float(stored["value"]) for name, stored in record.scalars.get("found", {}).items()},
            arrays={name: array for name, array in record.arrays.items() if not name.startswith(PROFILE)},
            caveats=tuple(map(str, record.scalars.get("caveats", ()))),
            seed=record.seeds.get("theory", 0),
            about=about,
        ).with_record(record)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """The prediction as a record, with descriptions."""
        model = self.about.get("model")
        resolved = {
            "title": _title_of(self.spelled or self.theory, model),
            "theory": self.theory,
            "parameters": dict(self.parameters),
            "n_positions": self.n_positions,
            "architecture": None if self.architecture is None else self.architecture.describe(),
            "model": model,
            "prompts": self.about.get("prompts"),
            "command": "",
        }
        asked = {"theory": self.spelled or self.theory, "n_positions": self.n_positions}
        record = Record("predict", asked, resolved, scalars={"sink_share": self.sink_share})
        if self.parameters:
            record.seeds["theory"] = self.seed
        if self.numbers:
            alone = {"low": None, "high": None}
            record.scalars["found"] = {name: {"value": value, **alone} for name, value in self.numbers.items()}
        if self.caveats:
            record.scalars["caveats"] = list(self.caveats)
        arrays = {**vars(self.profile), "per_prompt": self.per_prompt}
        for name, array in arrays.items():
            if array is not None and np.any(np.isfinite(array)):
                record.arrays[PROFILE + name] = array
        record.arrays.update(self.arrays)
        return record


def _title_of(theory: str, model: Mapping[str, Any] | None) -> str:
    """The title of a record."""
    return f"{theory} of {'an architecture' if model is None else model.get('source', 'a model')}"


def predictions_record(predictions: Sequence[Prediction], arguments: Mapping[str, Any], *, command: str = "") -> Record:
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
    *first, last = differing(settings) or ["number"]
    resolved = {
        "title": f"{len(names)} predictions by {', '.join(first)} and {last}"
        if first
        else f"{len(names)} predictions by {last}",
        "n_positions": lengths[0],
        "curves": {f"theories/{name}": dict(curve) for name, curve in zip(names, settings, strict=True)},
        "command": command,
    }
    by_name = dict(zip(names, predictions, strict=True))
    shares = {name: prediction.sink_share for name, prediction in by_name.items()}
    record = Record("predict", dict(arguments), resolved, scalars={"sink_share": shares})
    caveats = dict.fromkeys(caveat for prediction in predictions for caveat in prediction.caveats)
    if caveats:
        record.scalars["caveats"] = list(caveats)
    for name, prediction in by_name.items():
        record.arrays[f"theories/{name}/influence"] = prediction.profile.influence
    return record


class Theory(ABC):
    """One way to predict a profile; its fields are its parameters."""

    name: ClassVar[str]
    reads_prompts: ClassVar[bool] = True

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


class ModelTheory(Theory):
    """A theory of a loaded model, most often one that follows its forward activations on prompts."""

    def labels(self, seed: int) -> dict[str, Any]:
        """The fields of a prediction that describe its theory."""
        parameters = asdict(self)  # type: ignore[call-overload]
        return {"spelled": THEORIES.spell(self), "parameters": parameters, "seed": seed}

    def mean_of(self, rows: Float64[np.ndarray, "count n_positions"], seed: int) -> Prediction:
        """The mean over prompts with its pointwise interval."""
        profile = Profile.mean_of(rows)
        return Prediction(profile, self.name, None, rows.shape[1], per_prompt=rows, **self.labels(seed))

    def check_reading(self, subject: Any, prompts: Any, n_positions: int) -> None:
        """Refuse anything but a loaded model, and prompts of any length but the one asked for."""
        from posbias.models.model import Model

        if not isinstance(subject, Model):
            raise UsageError(
                f"theory {self.name} needs a model (one of load_model or transformers, a hub id or a path), "
                f"got {type(subject).__name__}"
            )
        if prompts is None:
            raise UsageError(f"theory {self.name} reads activations: give prompts=load_prompts(...)")
        if prompts.n_positions != n_positions:
            raise UsageError(
                f"theory {self.name}: prompts of {prompts.n_positions} positions given for n_positions={n_positions}"
            )
