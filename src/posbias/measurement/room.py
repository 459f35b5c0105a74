"""Room for passes: how much memory they take by one formula, how many prompts go together, and what does not fit.

An accelerator says when its memory has run out, and then the batch is halved (`halving`). The kernel of a machine kills
a process on a CPU instead, so there the formula is held against what is free before anything starts.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from posbias.errors import RunError
from posbias.measurement.kinds import Kind, Pullback
from posbias.measurement.prompt import shares_passes
from posbias.measurement.units import MeasureOptions
from posbias.memory import check_room, keep_freed_memory
from posbias.models.attention import named_blocks
from posbias.models.devices import CPU, free_bytes
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts

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
    rows = min(options.rows, sum(kind.passes(model.width) for kind in kinds if isinstance(kind, Pullback)))
    most = min(int(positions / (rows * prompts.n_positions)), -(-prompts.count // workers))
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
