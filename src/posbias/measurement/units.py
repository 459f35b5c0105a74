"""Settings of `measure`, and its prompts as units of work for an engine.

What an engine computes at a time, keeps and tries again is a batch: prompts that follow one another and are measured
together. Which ones depends on their number alone, so that workers and resumed runs have the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import Count, OneOf, Share, checked
from posbias.measurement.kinds import Kind
from posbias.measurement.outputs import PassOptions, TokenIds
from posbias.measurement.prompt import PromptMeasurement, measure_together
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_same
from posbias.models.model import Model, ModelRequest
from posbias.models.networks import reinitialise
from posbias.prompts.prompts import Prompts
from posbias.runs.engines import Arrays, Engine, Local, collect
from posbias.runs.parts import PartStore, made_by, packed, unpacked
from posbias.statistics import CONFIDENCE


@dataclass(frozen=True)
class Unit:
    """One independent unit of a measurement."""

    prompt: int
    init_seed: int | None = None
    """Seed of the re-initialisation it is measured on; None for the model as loaded."""


Beside = Callable[[Model, TokenIds, Unit, PromptMeasurement], Mapping[str, Any]]
"""What else is computed of a unit: a function of a module, so that other processes find it."""


@dataclass(frozen=True)
class UnitWork:
    """The units of one model as work for an engine, whose own units are batches of them."""

    request: ModelRequest | None
    network_sha256: str | None
    """Hash of the weights; None if no other process loads the model: hashing takes a second per gigabyte."""
    token_ids: Int64[np.ndarray, "count n_positions"]
    units: tuple[Unit, ...]
    kinds: tuple[Kind, ...]
    seed: int
    passes: PassOptions
    beside: Beside | None = None
    description: str = "measuring prompts"
    together: int = 1
    """Units of a batch, >= 1; they share passes unless one is re-initialised."""

    def prepare(self) -> Model:
        """The model, loaded."""
        return load_same(self.request, self.network_sha256)

    def compute(self, prepared: Model, unit: int) -> Arrays:
        """Everything about the units of one batch, packed."""
        batch = self.units[unit * self.together :][: self.together]
        drawn = any(chosen.init_seed is not None for chosen in batch)
        pieces: list[dict[str, Any]] = []
        for units in [[chosen] for chosen in batch] if drawn else [batch]:
            model, first = prepared, units[0]
            if first.init_seed is not None and isinstance(prepared, HuggingFaceModel):
                model = reinitialise(prepared, first.init_seed)
            prompts = [chosen.prompt for chosen in units]
            keys = [(self.seed, prompt) for prompt in prompts]
            found = measure_together(model, self.token_ids[prompts], kinds=self.kinds, keys=keys, options=self.passes)
            for chosen, measured in zip(units, found, strict=True):
                piece = dict(vars(measured))
                if self.beside is not None:
                    piece |= self.beside(model, self.token_ids[chosen.prompt], chosen, measured)
                pieces.append(piece)
        return packed(pieces)

    def collected(self, name: str, *, engine: Engine, store: PartStore, model: Model) -> list[dict[str, Any]]:
        """The piece of every unit, in order; every batch is kept in the store under the name and its first unit."""
        names = [f"{name}-{start:06d}" for start in range(0, len(self.units), self.together)]
        batches = collect(self, names, engine=engine, store=store, prepared=model)
        return [piece for batch in batches for piece in unpacked(batch)]


def settings_of_units(model: Model, prompts: Prompts, of_units: Mapping[str, Any], *, engine: Engine) -> dict[str, Any]:
    """Everything that finished units depend on: what they are measured on, by what, and how."""
    described = {"model": model.describe(), "prompts": prompts.describe()}
    return described | {**of_units, "threads": engine.pinned_threads, "made_by": made_by()}


@checked
@dataclass(frozen=True)
class MeasureOptions(PassOptions):
    """Settings of `measure`: those of the passes, how prompts are averaged, and where the work is done and kept."""

    averaging: Annotated[str, OneOf("profiles", "norms")] = "profiles"
    """"profiles" (normalise each prompt, then average) or "norms" (average, then normalise once)."""
    confidence: Share = CONFIDENCE
    """Coverage of the intervals over prompts, in (0, 1)."""
    together: Count | None = None
    """Prompts that are measured in one batch, >= 1; None: as many as fill an accelerator and fit into its memory, and
    one on a processor."""
    engine: Engine = field(default_factory=Local)
    """Processes or machines that measure; of this setting and those below, only the engine's threads can change
    results."""
    directory: Path | None = None
    """Run directory of the record, and of finished prompts (in `parts/`) until then; None keeps nothing."""
    resume: bool = False
    """Take over what the directory holds of the same measurement: its record, or finished prompts."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""

    @property
    def passes(self) -> PassOptions:
        """The settings that the measurement of a single prompt depends on."""
        return PassOptions(**{setting.name: getattr(self, setting.name) for setting in fields(PassOptions)})

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        averaged = {name: getattr(self, name) for name in ("averaging", "confidence", "together")}
        return {**averaged, "passes": vars(self.passes), "output": self.output, "engine": self.engine.describe()}
