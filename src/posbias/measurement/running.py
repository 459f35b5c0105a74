"""How a measurement over many prompts is run: by which engine, kept in which directory, continued or begun anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.engines import Engine, Local, collect
from posbias.measurement.kinds import Kind
from posbias.measurement.passes import PassOptions
from posbias.measurement.prompt import PromptMeasurement, measure_prompt
from posbias.models.loading import load_same
from posbias.models.model import Model, ModelRequest
from posbias.models.weights import joined_sha256, network_sha256
from posbias.parts import PartStore, made_by
from posbias.prompts.prompts import Prompts

if TYPE_CHECKING:
    from posbias.measurement.measurement import MeasureOptions


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
        return load_same(self.request, self.network_sha256)

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
