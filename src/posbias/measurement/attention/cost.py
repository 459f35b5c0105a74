"""What attention statistics and rollouts of a model will cost, from short runs."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.measurement.attention.options import KERNEL_CELLS, AttentionOptions
from posbias.measurement.attention.streaming import statistics_of, working_precision
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.work import Work, calibrate, short_lengths
from posbias.models.attention import block_elements, blocks_of, describe_attention
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import attention_rollouts

SHORT_BLOCKS = 4
"""Blocks of queries in the longest short run, so that blocks are as large in all of them, as in long prompts."""
NUMBERS_PER_WEIGHT = 6
"""Held per attention weight of a block: the logits, their softmax, and what is summed of it, some in float64."""
NUMBERS_PER_LOGIT = 3
"""Held per mean content logit of a layer while its similarity is formed, at the end."""


@checked
def preflight_attention(model: Model, prompts: Prompts, *, options: AttentionOptions | None = None) -> dict[str, Any]:
    """Say what `attention` will cost, and refuse what exceeds the options' `max_memory`; as `preflight`.

    The matrices that `options` keep are counted exactly.
    """
    wanted, n_positions = options or AttentionOptions(), prompts.n_positions

    def under(**changes: Any) -> CostEstimate | None:
        return estimate_attention(model, n_positions, options=replace(wanted, **changes))

    remedies: dict[str, dict[str, Any]] = {}
    if wanted.cells(n_positions) > KERNEL_CELLS:
        remedies[f"--kernel-cells {KERNEL_CELLS}"] = {"kernel_cells": KERNEL_CELLS}
    return Work(model, n_positions, prompts.count, under, remedies, max_memory=wanted.max_memory).announce()


def estimate_attention(model: Model, n_positions: int, *, options: AttentionOptions) -> CostEstimate | None:
    """The cost of one prompt, from short runs in small blocks: memory is then linear but for the model's pass."""
    layers = describe_attention(model, n_positions=n_positions)
    depth, heads, number_bytes = len(layers), layers[0].parts.heads, working_precision(model).itemsize
    options.check_memory(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
    smallest = replace(options, kernel_cells=1, mean_content=False)

    def measured(token_ids: Int64[np.ndarray, "n"]) -> None:
        statistics_of(model, Prompts(token_ids[None]), smallest)

    def rolled_out(token_ids: Int64[np.ndarray, "n"]) -> None:
        attention_rollouts(model, Prompts(token_ids[None]))

    def both(token_ids: Int64[np.ndarray, "n"]) -> None:
        with blocks_of(None):
            measured(token_ids)
            if options.rollouts:
                rolled_out(token_ids)

    def forward(token_ids: Int64[np.ndarray, "n"]) -> None:
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))

    def kept(n_positions: int) -> int:
        cells = None if options.kernel_cells is None else min(options.kernel_cells, n_positions)
        shorter = replace(options, kernel_cells=cells)
        matrices = shorter.kept_bytes(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        content = shorter.keeps_content(depth * heads, n_positions, number_bytes=number_bytes)
        return matrices + content * NUMBERS_PER_LOGIT * heads * n_positions**2 * number_bytes

    longest = short_lengths(n_positions)[-1]
    with blocks_of(heads * longest**2 // SHORT_BLOCKS):
        statistics = calibrate(model, n_positions, measured, usual=both, squares=forward)
        rollouts = statistics
        beyond = isinstance(model, HuggingFaceModel) and model.family.beyond_attention(model.network)
        if options.rollouts and not beyond:
            rollouts = calibrate(model, n_positions, rolled_out, usual=lambda _: None, squares=forward)
    if statistics is None or rollouts is None:
        return None
    # One after the other: short prompts take most for the one's histograms, long ones for what the other keeps.
    larger = max(statistics, rollouts, key=lambda estimate: estimate.passes_bytes)
    constant, *others = larger.coefficients
    block = block_elements(heads, n_positions, device=model.device, block=options.block)
    block *= NUMBERS_PER_WEIGHT * number_bytes
    return replace(statistics, coefficients=(constant + block, *others), kept=kept)
