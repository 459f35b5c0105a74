"""What a decomposition will cost, said before it begins; refused where it cannot fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.decomposition.decomposition import DecompositionOptions, counterfactuals
from posbias.interventions import Intervention
from posbias.measurement.cost import calibrate, in_bfloat16, tell_cost, without_passes
from posbias.models.model import Model
from posbias.prompts import Prompts


def preflight_decomposition(
    model: Model,
    prompts: Prompts,
    *,
    interventions: Sequence[Intervention],
    options: DecompositionOptions,
    max_memory: int | None = None,
) -> dict[str, Any]:
    """The expected cost for a record, from short runs of the first intervention; empty where these fail.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    alone = replace(options, directory=None, resume=False)

    def run(token_ids: Int64[np.ndarray, "n"]) -> None:
        counterfactuals(model, Prompts(token_ids[None]), interventions=interventions[:1], options=alone)

    estimate = calibrate(model, prompts.n_positions, run) or without_passes(model, prompts.n_positions)
    # A short run is the unchanged model and one intervention.
    whole = replace(estimate, seconds=estimate.seconds * (1 + len(interventions)) / 2)
    return tell_cost(whole, prompts.count, max_memory=max_memory, remedies=in_bfloat16(model, whole))
