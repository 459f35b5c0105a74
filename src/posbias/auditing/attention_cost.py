"""What measuring and rolling out attention will cost, said before it begins; refused where it cannot fit."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.measurement import AttentionOptions, attention_statistics
from posbias.measurement.attention.accumulators import working_precision
from posbias.measurement.attention.options import KERNEL_CELLS
from posbias.measurement.cost import SHORT_LENGTHS, calibrate, in_bfloat16, tell_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate, Remedy
from posbias.models.attention import BLOCK_ELEMENTS, blocks_of, describe_attention
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.theory.power_rollout import attention_rollouts

SHORT_BLOCKS = 4
"""Blocks of queries in the longest short run, so that blocks are as large in all of them, as in long prompts."""
NUMBERS_PER_WEIGHT = 6
"""Held per attention weight of a block: the logits, their softmax, and what is summed of it, some in float64."""
NUMBERS_PER_LOGIT = 3
"""Held per mean content logit of a layer while its similarity is formed, at the end."""


@checked
def preflight_attention(
    model: Model, prompts: Prompts, *, options: AttentionOptions | None = None, max_memory: int | None = None
) -> dict[str, Any]:
    """Say what `attention_statistics` and `attention_rollouts` will cost, and refuse what cannot fit.

    Args:
        model: As for `attention_statistics`.
        prompts: As for `attention_statistics`; their number and length count.
        options: What is kept; its matrices are counted exactly.
        max_memory: Bytes that the process may hold; None: what is free.

    Returns:
        The estimate as plain values for a record; empty where the short runs fail.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    options = options or AttentionOptions()
    n_positions = prompts.n_positions

    def under(changed: AttentionOptions) -> CostEstimate | None:
        return estimate_attention(model, n_positions, options=changed)

    estimate = under(options) or without_passes(model, n_positions)
    remedies: dict[str, Remedy] = {}
    if options.by_head:
        remedies["no --heads"] = lambda: under(replace(options, by_head=False))
    if options.cells(n_positions) > KERNEL_CELLS:
        remedies[f"--kernel-cells {KERNEL_CELLS}"] = lambda: under(replace(options, kernel_cells=KERNEL_CELLS))
    remedies |= in_bfloat16(model, estimate)
    return tell_cost(estimate, prompts.count, max_memory=max_memory, remedies=remedies)


def estimate_attention(model: Model, n_positions: int, *, options: AttentionOptions) -> CostEstimate | None:
    """What one prompt will take, from short runs in small blocks: memory is then linear but for the model's own pass.

    Raises:
        UsageError: the kept matrices exceed their own limit, or the attention cannot be recomputed.
    """
    layers = describe_attention(model, n_positions=n_positions)
    depth, heads, number_bytes = len(layers), layers[0].parts.heads, working_precision(model).itemsize
    options.check_memory(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
    smallest = replace(options, kernel_cells=1, mean_content=False)

    def measured(token_ids: Int64[np.ndarray, "n"]) -> None:
        attention_statistics(model, Prompts(token_ids[None]), options=smallest)

    def rolled_out(token_ids: Int64[np.ndarray, "n"]) -> None:
        attention_rollouts(model, Prompts(token_ids[None]))

    def both(token_ids: Int64[np.ndarray, "n"]) -> None:
        with blocks_of(BLOCK_ELEMENTS):
            measured(token_ids)
            rolled_out(token_ids)

    def forward(token_ids: Int64[np.ndarray, "n"]) -> None:
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))

    def kept(n_positions: int) -> int:
        cells = None if options.kernel_cells is None else min(options.kernel_cells, n_positions)
        shorter = replace(options, kernel_cells=cells)
        matrices = shorter.kept_bytes(layers=depth, heads=heads, n_positions=n_positions, number_bytes=number_bytes)
        content = shorter.keeps_content(depth * heads, n_positions, number_bytes=number_bytes)
        return matrices + content * NUMBERS_PER_LOGIT * heads * n_positions**2 * number_bytes

    longest = min(SHORT_LENGTHS[-1], n_positions // 2)
    with blocks_of(heads * longest**2 // SHORT_BLOCKS):
        statistics = calibrate(model, n_positions, measured, usual=both, squares=forward)
        rollouts = calibrate(model, n_positions, rolled_out, usual=lambda _: None, squares=forward)
    if statistics is None or rollouts is None:
        return None
    # One after the other: short prompts take most for the one's histograms, long ones for what the other keeps.
    larger = max(statistics, rollouts, key=lambda estimate: estimate.passes_bytes)
    constant, *others = larger.coefficients
    block = min(BLOCK_ELEMENTS, heads * options.block * n_positions) * NUMBERS_PER_WEIGHT * number_bytes
    return replace(statistics, coefficients=(constant + block, *others), kept=kept)
