"""Rotary positions in a finished model, moved: what `ms_poe` and `pine` share.

Queries and keys arrive rotated, keys with everything that is cached; both are turned further by the difference between
the wanted angle and the one they have. With a strength s, positions p become p + s (p' - p).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.errors import UsageError
from posbias.interventions.attention import AttentionCall, rotary_frequencies
from posbias.mitigation.methods.base import Mitigation
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.rotary import changing_kinds, turned_by

Frequencies = Float[Tensor, "pair"] | None


def turning(model: HuggingFaceModel, method: Mitigation) -> list[Frequencies]:
    """Radians per position of every layer's feature pairs.

    Raises:
        UsageError: a family whose queries and keys cannot be turned further, by name.
    """
    family = model.family
    if family.turns_neighbours:
        raise UsageError(
            f"{method.name}: {family.name} models turn neighbouring features; only half against half is allowed, as in "
            "llama, qwen2, qwen3, gemma3 and mistral"
        )
    if not family.rotary:
        raise UsageError(f"{method.name}: {family.name} models have no rotary positions")
    for module in model.network.modules():
        kinds = changing_kinds(module)
        if kinds:
            raise UsageError(
                f"{method.name}: the rope type {' '.join(sorted(kinds))} takes its frequencies from the prompt's "
                "length; default, linear and llama3 are allowed"
            )
    frequencies = rotary_frequencies(model)
    if all(rates is None for rates in frequencies):
        raise UsageError(f"{method.name}: this {family.name} model turns nothing by position")
    return frequencies


class Turns:
    """Cosines and sines of the angles position x rate, for several sets of rates; grown as positions are asked for."""

    def __init__(self, rates: Float[Tensor, "set pair"]) -> None:
        self.rates, self.n_positions = rates, 0

    def turn(
        self,
        values: Float[Tensor, "batch head position feature"],
        positions: Int[Tensor, "_ position"],
        chosen: Int[Tensor, "_ _"],
    ) -> Float[Tensor, "batch head position feature"]:
        """Values turned, every head of every row by its chosen set."""
        most = int(positions.max()) + 1
        if most > self.n_positions:
            self.n_positions = max(most + most // 4, 64)
            angles = torch.arange(self.n_positions, device=self.rates.device)[:, None] * self.rates[:, None]
            precise = torch.promote_types(values.dtype, torch.float32)
            self.cosine, self.sine = (side.to(values.device, precise) for side in (angles.cos(), angles.sin()))
        index = chosen[:, :, None], positions[:, None]
        return turned_by(values, self.cosine[index], self.sine[index])


def shown_keys(call: AttentionCall, rows: slice) -> Tensor:
    """True for the keys that some queries see, [batch 1 query key]; the leading size is 1 if it is the same for all."""
    if call.mask is None:
        return call.key_positions[:, None, None] <= call.query_positions[:, None, rows, None]
    mask = call.mask[:, :, rows]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
