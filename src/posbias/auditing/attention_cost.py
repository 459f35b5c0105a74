"""What measuring and rolling out attention will cost, said before it begins; refused where it cannot fit."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.measurement import AttentionOptions, attention_statistics
from posbias.measurement.cost import HEADROOM, calibrate, check_weights, tell_cost
from posbias.models.attention import describe_attention
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.theory.power_rollout import attention_rollouts


def preflight_attention(
    model: Model, prompts: Prompts, *, options: AttentionOptions, max_memory: int | None = None
) -> dict[str, Any]:
    """The expected cost for a record; empty where the short runs fail. The kept matrices are counted exactly.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    layers = describe_attention(model, n_positions=prompts.n_positions)
    kept = options.check_memory(layers=len(layers), heads=layers[0].parts.heads, n_positions=prompts.n_positions)
    smallest = replace(options, kernel_cells=1, by_head=False, mean_content=False)

    def run(token_ids: Int64[np.ndarray, "n"]) -> None:
        short = Prompts(token_ids[None])
        attention_statistics(model, short, options=smallest)
        attention_rollouts(model, short, seed=options.seed)

    estimate = calibrate(model, prompts.n_positions, run)
    if estimate is None:
        check_weights(model, prompts.n_positions, max_memory=max_memory)
        return {}
    first, *others = estimate.coefficients
    whole = replace(estimate, coefficients=(first + kept / HEADROOM, *others))
    advice = ["--dtype bfloat16"] if model.dtype.itemsize > 2 else []
    return tell_cost(whole, prompts.count, max_memory=max_memory, advice=advice)
