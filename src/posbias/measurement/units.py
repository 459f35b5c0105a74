"""Settings of `measure`, its prompts as units of work for an engine, and the memory that their passes take.

What an engine computes at a time, keeps and tries again is a batch: prompts that follow one another and are measured
together. Which ones depends on their number alone, so that workers and resumed runs have the same.

An accelerator says when its memory has run out, and then the batch is halved (`halving`). The kernel of a machine kills
a process on a CPU instead, so there one formula of the passes is held against what is free before anything starts.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64

from posbias.errors import RunError
from posbias.measurement.kinds import Kind
from posbias.measurement.options import MeasureOptions, PassOptions
from posbias.measurement.outputs import TokenIds
from posbias.measurement.prompt import PromptMeasurement, measure_together, shares_passes
from posbias.memory import check_room, keep_freed_memory
from posbias.models.attention import named_blocks
from posbias.models.devices import CPU, free_bytes
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_same
from posbias.models.model import Model, ModelRequest
from posbias.models.networks import reinitialise
from posbias.prompts import Prompts
from posbias.runs.engines import Arrays, Engine, collect
from posbias.runs.parts import PartStore, made_by, packed, unpacked
from posbias.theory.power_rollout.rollout import PromptTrace, traced_beside


@dataclass(frozen=True)
class Unit:
    """One independent unit of a measurement."""

    prompt: int
    init_seed: int | None = None
    """Seed of the re-initialisation it is measured on; None for the model as loaded."""


Beside = Callable[[Model, TokenIds, Unit, PromptMeasurement, Callable[[], PromptTrace] | None], Mapping[str, Any]]
"""What else is computed of a unit, from the measured pass too where one prompt has it alone: a function of a module, so
that other processes find it."""


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
            # The first pass is then the prompt's, read at its end; checkpointing is there to keep nothing of it.
            alone = len(units) == 1 and shares_passes(self.kinds) and str(self.passes.output) == "last"
            watched: Any = nullcontext()
            if self.beside and alone and not self.passes.checkpointing:
                watched = traced_beside(model, self.token_ids[first.prompt])
            with watched as traced:
                found = measure_together(
                    model, self.token_ids[prompts], kinds=self.kinds, keys=keys, options=self.passes
                )
            for chosen, measured in zip(units, found, strict=True):
                piece = dict(vars(measured))
                if self.beside is not None:
                    piece |= self.beside(model, self.token_ids[chosen.prompt], chosen, measured, traced)
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


Result = TypeVar("Result")
SAVED = (10, 4)
"""Numbers per position that a layer saves for its backward pass, in widths and in inner widths of its MLP: what a Llama
saves, to a quarter; 1.1 of the 2.6 GB seen of SmolLM2-135M at 2,048 positions."""
RECOMPUTED = (12, 5)
"""The same of the one layer that is computed again, with checkpointing."""
FILLING = 4 * 10**11
"""Positions times weights of a block from which on the arithmetic of a pass takes an accelerator longer than launching
its kernels: 2,048 positions of Llama 2 7B took 1.07 of bare passes on an H200, 512 took 1.49."""
MOST_FILLING = 1 << 14
"""Positions of a batch beyond which small models would take memory for little more speed."""


def passes_bytes(model: Model, n_positions: int, *, checkpointing: bool = False) -> int:
    """Bytes that one prompt's passes hold beside the weights, roughly; 0 if sizes are not known.

    Without a backward pass it is about as much as with one that computes its layers again.
    """
    config: Any = getattr(model, "config", None)
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int):
        return 0
    inner = getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * model.width
    of_width, of_inner = RECOMPUTED if checkpointing else SAVED
    numbers = n_positions * (of_width * model.width + of_inner * inner) * (1 if checkpointing else layers)
    if checkpointing:
        numbers += layers * n_positions * model.width
    if getattr(config, "_attn_implementation", None) == "eager":  # it keeps whole matrices: weights, and their logits
        numbers += 2 * (heads or 1) * n_positions**2 * (1 if checkpointing else layers)
    return int(numbers * model.dtype.itemsize)


def check_passes(model: Model, n_positions: int, *, checkpointing: bool = False, gradients: bool = True) -> None:
    """Refuse passes that a CPU's memory cannot hold, and let the process keep what it frees if there is room.

    Raises:
        UsageError: one line with what would fit.
    """
    if model.device != CPU:
        return
    # Freed memory that is kept leaves holes, several times what passes with checkpointing hold; it is a third faster.
    keep_freed_memory(not checkpointing)
    ways = ["fewer positions", "a smaller model"]
    ways += ["--checkpointing"] if gradients and not checkpointing else []
    ways += ["--dtype bfloat16"] if model.dtype.itemsize > torch.bfloat16.itemsize else []
    check_room(
        passes_bytes(model, n_positions, checkpointing=checkpointing or not gradients),
        f"passes over {n_positions:,} positions",
        f"try {' or '.join(ways)}",
    )


def together_in_memory(model: Model, n_positions: int, most: int, *, checkpointing: bool = False) -> int:
    """Prompts, at most `most`, whose passes fit together into the memory that is free on the model's device; >= 1."""
    free, each = free_bytes(model.device), passes_bytes(model, n_positions, checkpointing=checkpointing)
    return most if free is None or not each else max(1, min(most, free // each))


def prompts_together(model: Model, prompts: Prompts, *, kinds: Sequence[Kind], options: MeasureOptions) -> int:
    """The number of prompts in a batch: as asked, otherwise as many as fill an accelerator and fit into its memory."""
    if options.together is not None or model.device.type == "cpu" or not shares_passes(kinds):
        return options.together or 1
    blocks = named_blocks(model.network).values()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(len(blocks), 1)
    positions = min(FILLING / max(weights, 1.0), MOST_FILLING)
    workers = options.engine.processes_here
    most = min(int(positions / prompts.n_positions), -(-prompts.count // workers))
    fitting = together_in_memory(model, prompts.n_positions, most * workers, checkpointing=options.checkpointing)
    return max(1, fitting // workers)


def halving(run: Callable[[int], Result], together: int, *, at_last: Callable[[], Result] | None = None) -> Result:
    """The result of `run(together)`; where the device's memory runs out, of half as many at once, down to one.

    Args:
        run: What is tried with a number of prompts at once.
        together: The first number, >= 1.
        at_last: What is tried when one does not fit either: layers computed again in the backward pass.

    Raises:
        RunError: nothing fits.
    """
    while True:
        try:
            return run(together)
        except torch.OutOfMemoryError:
            if together == 1:
                break
            together //= 2
    try:
        if at_last is not None:
            return at_last()
    except torch.OutOfMemoryError:
        pass
    raise RunError(
        "the memory of the device does not hold the passes of one prompt; try --checkpointing, fewer positions, "
        "--dtype bfloat16, or another --device"
    )
