"""The prompts of `measure` and `audit` as units of work for an engine, and the memory that their passes take.

What an engine computes at a time, keeps and tries again is a batch: prompts that follow one another and are measured
together. Which ones depends on their number alone, so that workers and resumed runs have the same.

An accelerator says when its memory has run out, and then the batch is halved (`halving`). The kernel of a machine kills
a process on a CPU instead, so there one formula of the passes is held against what is free before anything starts.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from jaxtyping import Int64

from posbias.errors import RunError
from posbias.measurement.kinds import Kind
from posbias.measurement.options import MeasureOptions, PassOptions
from posbias.measurement.prompt import PromptMeasurement, measure_together, shares_passes
from posbias.memory import check_room, keep_freed_memory
from posbias.models.attention import named_blocks
from posbias.models.devices import CPU, free_bytes
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_same
from posbias.models.model import Model, ModelRequest
from posbias.models.networks import reinitialise
from posbias.models.weights import network_sha256
from posbias.prompts import Prompts
from posbias.runs.engines import Arrays, Engine, collect
from posbias.runs.parts import PartStore, made_by, packed, unpacked
from posbias.theory.power_rollout.rollout import traced_beside


@dataclass(frozen=True)
class Unit:
    """One independent unit of a measurement."""

    prompt: int
    init_seed: int | None = None
    """Seed of the re-initialisation it is measured on; None for the model as loaded."""


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
    together: int
    """Units of a batch, >= 1, which share passes; 1 if they are re-initialised."""
    theories: bool
    """Tell what theories say of each prompt, too."""
    description: str

    def prepare(self) -> Model:
        """The model, loaded."""
        return load_same(self.request, self.network_sha256)

    def compute(self, prepared: Model, unit: int) -> Arrays:
        """Everything about the units of one batch, packed."""
        batch, model = self.units[unit * self.together :][: self.together], prepared
        if batch[0].init_seed is not None and isinstance(prepared, HuggingFaceModel):
            model = reinitialise(prepared, batch[0].init_seed)
        keys = [(self.seed, chosen.prompt) for chosen in batch]
        token_ids = self.token_ids[[chosen.prompt for chosen in batch]]
        # The first pass is then the prompt's, read at its end; checkpointing is there to keep nothing of it.
        watched: Any = nullcontext()
        if self.theories and len(batch) == 1 and shares_passes(self.kinds) and not self.passes.checkpointing:
            watched = traced_beside(model, token_ids[0]) if str(self.passes.output) == "last" else watched
        with watched as traced:
            measured = measure_together(model, token_ids, kinds=self.kinds, keys=keys, options=self.passes)
        if self.theories:
            from posbias.measurement.theories import with_theories  # needs much that `measure` does not

            numbers = [None if chosen.init_seed is None else chosen.prompt for chosen in batch]
            measured = [
                with_theories(each, model, ids, initialisation=number, traced=traced)
                for each, ids, number in zip(measured, token_ids, numbers, strict=True)
            ]
        return packed(measured)


def measure_units(
    model: Model,
    prompts: Prompts,
    states: Mapping[str, Sequence[Unit]],
    *,
    kinds: tuple[Kind, ...],
    seed: int,
    options: MeasureOptions,
    settings: Mapping[str, Any],
    theories: bool = False,
) -> tuple[dict[str, list[PromptMeasurement]], MeasureOptions]:
    """Measure the units of each state of a model, in batches that fit into memory, through the engine.

    Every batch is kept in the options' directory under its state and first unit, and found there again if it was made
    under the same settings.

    Returns:
        The measurements of every state's units, in order; and the options that memory allowed.

    Raises:
        UsageError: the passes do not fit into what is free.
        RunError: the device's memory does not hold those of one prompt, or a value is not finite.
    """
    check_passes(model, prompts.n_positions, checkpointing=options.checkpointing)

    def measured(together: int, used: MeasureOptions = options) -> tuple[dict[str, list[Any]], MeasureOptions]:
        used = replace(used, together=together)
        store = PartStore(options.directory, {**settings, "together": together})
        found = {}
        for state, units in states.items():
            work = UnitWork(
                request=model.reload_request,
                network_sha256=None if options.engine.in_process else network_sha256(model.network, settings["model"]),
                token_ids=prompts.token_ids,
                units=tuple(units),
                kinds=kinds,
                seed=seed,
                passes=used.passes,
                together=1 if any(unit.init_seed is not None for unit in units) else together,
                theories=theories,
                description=f"measuring the {state} model",
            )
            names = [f"{state}-{start:06d}" for start in range(0, len(units), work.together)]
            batches = collect(work, names, engine=options.engine, store=store, prepared=model)
            found[state] = [PromptMeasurement(**piece) for batch in batches for piece in unpacked(batch)]
        return found, used

    together = prompts_together(model, prompts, kinds=kinds, options=options)
    return halving(measured, together, at_last=partial(measured, 1, replace(options, checkpointing=True)))


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


def prompts_together(model: Model, prompts: Prompts, *, kinds: Sequence[Kind], options: MeasureOptions) -> int:
    """The number of prompts in a batch: as asked, otherwise as many as fill an accelerator and fit into its memory."""
    if options.together is not None or model.device.type == "cpu" or not shares_passes(kinds):
        return options.together or 1
    blocks = named_blocks(model.network).values()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(len(blocks), 1)
    positions = min(FILLING / max(weights, 1.0), MOST_FILLING)
    workers = options.engine.processes_here
    most = min(int(positions / prompts.n_positions), -(-prompts.count // workers))
    each = passes_bytes(model, prompts.n_positions, checkpointing=options.checkpointing)
    if each and (free := free_bytes(model.device)) is not None:
        most = min(most, free // each // workers)
    return max(1, most)


def halving(run: Callable[[int], Result], together: int, *, at_last: Callable[[], Result] | None = None) -> Result:
    """The result of `run(together)`; where the device's memory runs out, of half as many at once, down to one.

    Args:
        run: What is tried with a number of prompts at once.
        together: The first number, >= 1.
        at_last: What is tried when one does not fit either: layers computed again in the backward pass.

    Raises:
        RunError: nothing fits.
    """
    attempts: list[Callable[[], Result]] = [partial(run, together >> n) for n in range(together.bit_length())]
    for attempt in [*attempts, *([at_last] if at_last else [])]:
        try:
            return attempt()
        except RuntimeError as error:
            if not should_reduce_batch_size(error):  # it knows the words of every device
                raise
    raise RunError(
        "the memory of the device does not hold the passes of one prompt; try --checkpointing, fewer positions, "
        "--dtype bfloat16, or another --device"
    )
