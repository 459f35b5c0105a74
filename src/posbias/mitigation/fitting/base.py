"""How methods are fitted: one function for each method with parameters to find, from calibration samples alone.

Each is registered under the name of its method, and its file is imported when it is asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Int64

from posbias.architecture import LogSpline
from posbias.checks import Count, Natural, NonNegative, Positive, Steps, checked
from posbias.display.showing import Presented, Shown
from posbias.errors import UsageError
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import BRIEF, MITIGATIONS, Method
from posbias.models.hugging_face import HuggingFaceModel
from posbias.registry import Registry, parse_literal_call
from posbias.tasks.language import Example

Windows = Sequence[Int64[np.ndarray, "_"]]

Fit = Callable[["Calibration", "FitOptions"], tuple[Method, dict[str, Any]]]
"""From samples and settings to the method at full strength, and how it was found, in plain values."""
FITS: Registry[Fit] = Registry(
    "fit",
    homes={
        "adapter": "posbias.mitigation.fitting.adapter",
        "context_bias": "posbias.mitigation.fitting.bias",
        "key_bias": "posbias.mitigation.fitting.bias",
        "positional_channel": "posbias.mitigation.fitting.positional_channel",
        "temperature": "posbias.mitigation.fitting.temperature",
    },
)
"""The fits by the name of their method, each in a file beside this one."""


@checked
@dataclass(frozen=True)
class FitOptions:
    """Settings of a fit by gradient."""

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

    @classmethod
    def parse(cls, text: str) -> "FitOptions":
        """Read settings from text: `steps=600, rate=0.02`."""
        _, positional, keywords = parse_literal_call(f"options({text})", "fit")
        return cls(*positional, **keywords)

    def __post_init__(self) -> None:
        if self.knots:
            LogSpline(values=[0.0] * len(self.knots), knots=self.knots)

    def settled(self, defaults: Mapping[str, Any], **fixed: Any) -> "FitOptions":
        """All of them set: by the defaults of a fit where nothing was asked for, and as it takes them alone."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset, **fixed)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The material of a fit: the model, samples with their answers, and ordinary text, which some fits read."""

    model: HuggingFaceModel
    examples: Sequence[Example]
    read_text: Callable[[], Windows]

    @cached_property
    def text(self) -> Windows:
        """Windows of ordinary text in token ids, all of one length."""
        windows = self.read_text()
        lengths = sorted({len(window) for window in windows})
        if len(lengths) > 1:
            raise UsageError(f"fit: windows of ordinary text must be of one length, got {lengths[0]} to {lengths[-1]}")
        return windows


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


def fit_of(spelling: str) -> Fit | None:
    """The fit of a method, by its name or the spelling of an unfitted adapter; None if it has no parameters to find."""
    name = spelling.partition("(")[0].strip()
    MITIGATIONS[name]  # refused if unknown
    if name not in FITS:
        return None
    if name == spelling.strip():
        fit: Fit = FITS[name]
        return fit
    spelled = MITIGATIONS.parse(spelling)
    return partial(FITS[name], template=spelled) if isinstance(spelled, Adapter) and not spelled.weights else None
