"""How methods are fitted: one `Fit` for each method with parameters to find, from calibration samples alone.

Each is registered under the name of its method, and its file is imported when it is asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval
from jaxtyping import Int64

from posbias.architecture import LogSpline
from posbias.checks import Count, Natural, NonNegative, Positive, Steps
from posbias.display.showing import Presented, Shown
from posbias.errors import UsageError
from posbias.interventions.base import check_model
from posbias.mitigation.fitting.calibration import check_samples
from posbias.mitigation.methods.base import BRIEF, MITIGATIONS, Method
from posbias.models.hugging_face import HuggingFaceModel
from posbias.registry import Registry
from posbias.tasks.language import Example

Windows = Sequence[Int64[np.ndarray, "_"]]

FILES = {
    "adapter": "adapter",
    "context_bias": "bias",
    "key_bias": "bias",
    "positional_channel": "positional_channel",
    "temperature": "temperature",
}
"""Methods that are fitted, and the file beside this one that says how."""
FITS: Registry["Fit"] = Registry("fit")
"""The fits by the name of their method."""
FIT_OPTIONS: Registry["FitOptions"] = Registry("fit")
"""A registry of one variant, which reads the options of a fit from text: `options(steps=600)`."""


@FIT_OPTIONS.register("options")
@dataclass(frozen=True)
class FitOptions:
    """Settings of a fit by gradient, and the strengths from which any fit chooses."""

    steps: Steps | None = None
    """Steps of one batch each, >= 1; None: 60 for adapters, 300 for all others."""
    batch: Count | None = None
    """Calibration prompts of a step, >= 1, with a window of text for every four if there is a penalty; None: 4 for
    adapters, 1 for all others."""
    rate: Positive | None = None
    """Rate of Adam at the first step; None: .05 (nats) for biases, .02 for factors of heads, .002 for adapters."""
    held_out: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """Share of the calibration samples that no step sees, in [0, 1). The fit stops when their answers become no more
    probable, and keeps the numbers with which they were most probable; None: 0 for biases, .2 for adapters."""
    penalty: NonNegative = 1.0
    """Weight of the divergence on ordinary text, >= 0; unused if the bias acts from the question on."""
    knots: tuple[int, ...] = (0, 1, 8, 64, 512)
    """Keys at which biases are fitted (0 at the last one), interpolated by splines; unused for a context bias."""
    from_question: bool = False
    """The bias acts from the question on only."""
    scales: bool = True
    """Scale every head's logits, too, for the queries from the question on; unused if all queries have the bias."""
    seed: Natural = 0
    """Seed of the order of prompts and windows."""
    checkpointing: bool = False
    """Compute layers again in the backward pass, for less memory and more time; not from the question on, where few
    tokens have one."""
    strengths: tuple[Annotated[float, Interval(ge=0, le=1)], ...] = ()
    """Strengths of whatever is fitted, each in [0, 1], from which the calibration samples choose; empty: 1."""

    @classmethod
    def parse(cls, text: str) -> "FitOptions":
        """Read settings from text: `steps=600, rate=0.02`."""
        return FIT_OPTIONS.parse(f"options({text})")

    def __post_init__(self) -> None:
        if len(set(self.strengths)) < len(self.strengths):
            raise UsageError(f"fit: give each of the strengths once, got {list(self.strengths)}")
        if self.knots:
            LogSpline(values=[0.0] * len(self.knots), knots=self.knots)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The material of a fit: samples with their answers, ordinary text, and who can be asked."""

    model: HuggingFaceModel | None
    """The model to fit to; None: it is behind a server."""
    examples: Sequence[Example]
    text: Windows = ()
    """Windows of ordinary text in token ids, all of one length."""

    def __post_init__(self) -> None:
        lengths = sorted({len(window) for window in self.text})
        if len(lengths) > 1:
            raise UsageError(f"fit: windows of ordinary text must be of one length, got {lengths[0]} to {lengths[-1]}")

    @property
    def network(self) -> HuggingFaceModel:
        """The model, which must be of a family that can be changed inside."""
        return check_model(self.model)

    def count(self) -> dict[str, int]:
        """Numbers of samples and prompts, for a recipe; too few samples are refused."""
        return {"calibration_samples": check_samples(self.examples), "calibration_prompts": len(self.examples)}


@dataclass(frozen=True, repr=False)
class Fitted(Presented):
    """A fitted method and how it came about."""

    method: Method
    how: dict[str, Any]
    """Options, calibration samples and what the fit saw of them, as plain values for a recipe or record; `samples` are
    `contents` of these, by which a run refuses to judge the recipe on them."""

    def shown(self) -> Shown:
        """The method and the number of samples in one line; how it came about in a table, scores one below another."""
        rows = {
            name.replace("_", " "): "\n".join(f"{candidate}: {score:.4g}" for candidate, score in value.items())
            if isinstance(value, dict)
            else BRIEF.repr(value)
            for name, value in self.how.items()
            if name != "samples"  # hashes
        }
        samples = self.how.get("calibration_samples")
        return Shown(
            f"{self.method!r}" + (f", fitted to {samples} samples" if samples else ""),
            facts={**self.method.facts(), **rows},
        )


class Fit(ABC):
    """One way of finding a method's parameters."""

    method: type[Method]
    required: ClassVar[bool] = True
    """The method has no parameters unless it is fitted."""

    @abstractmethod
    def fit(self, calibration: Calibration, *, options: FitOptions) -> Fitted:
        """The method at full strength, and how it was found, without the samples."""

    def reads_text(self, options: FitOptions) -> bool:
        """True if windows of ordinary text are read."""
        return False


def fit_of(spelling: str) -> Fit | None:
    """The fit of a method, by its name or the spelling of an unfitted adapter; None if it has no parameters to find."""
    name = spelling.partition("(")[0].strip()
    MITIGATIONS[name]  # refused if unknown
    spelled = MITIGATIONS.parse(spelling) if name != spelling.strip() else None
    if name not in FILES or (spelled is not None and (name != "adapter" or spelled.leaves_out_tensors)):
        return None
    import_module(f"posbias.mitigation.fitting.{FILES[name]}")
    fit: Fit = FITS[name]() if spelled is None else FITS[name](spelled)
    return fit
