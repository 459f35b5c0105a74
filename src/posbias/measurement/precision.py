"""What half precision costs: the same prompt and probes on the same weights, converted to float32."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.measurement.checkpointing import checkpointed
from posbias.measurement.influence import influence_of_positions
from posbias.measurement.kinds import Kind
from posbias.measurement.passes import PassOptions
from posbias.models.model import Model
from posbias.models.weights import REDUCED, converted, not_convertible


@dataclass(frozen=True, eq=False)
class PrecisionLoss:
    """One kind's profiles in the precision the model runs in, against float32, on the prompts that were checked."""

    wasserstein: Float64[np.ndarray, "checked"]
    """W1 between the two profiles, on positions / (N - 1)."""
    median_relative: Float64[np.ndarray, "checked"]
    """Median over positions of |p_j - q_j| / q_j, q in float32."""
    largest_relative: Float64[np.ndarray, "checked"]
    """Largest over positions; infinite where only q_j is zero."""

    @classmethod
    def between(
        cls, reduced: Float64[np.ndarray, "checked n_positions"], full: Float64[np.ndarray, "checked n_positions"]
    ) -> "PrecisionLoss":
        """From raw norms; no prompt all zero."""
        own, exact = (norms / norms.sum(axis=1, keepdims=True) for norms in (reduced, full))
        steps = max(own.shape[1] - 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(own == exact, 0.0, np.abs(own - exact) / exact)
        return cls(
            wasserstein=np.abs(np.cumsum(own - exact, axis=1)[:, :-1]).sum(axis=1) / steps,
            median_relative=np.median(relative, axis=1),
            largest_relative=relative.max(axis=1),
        )


def norms_in_full_precision(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    *,
    kinds: Sequence[Kind],
    key: tuple[int, int],
    options: PassOptions,
) -> tuple[dict[str, Float64[np.ndarray, "n_positions"]], str | None]:
    """Raw norms by a float32 copy of the model, with the same random draws, and why there are none.

    The copy takes 4 bytes per weight while the prompt is measured, and the time of a float32 measurement. `fisher`
    draws tokens from the model's distribution: one that rounding makes it draw differently counts as loss.

    Returns:
        Empty with no reason where the model is not below float32 or the prompt is not among those to check; empty
        with a reason where no copy can be made.
    """
    if model.dtype not in REDUCED or key[1] >= options.precision_prompts:
        return {}, None
    reason = not_convertible(model)
    if reason is not None:
        return {}, f"precision check: {reason}"
    full = converted(model, torch.float32)
    with checkpointed(full.network, enabled=options.checkpointing):
        found = influence_of_positions(full, token_ids, kinds=kinds, key=key, options=options)
    return {kind: influence.norms for kind, influence in found.items()}, None
