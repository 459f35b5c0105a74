"""Small tables that differ from member to member, looked up for the whole stack at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor


def per_member(values: Sequence[float], device: torch.device) -> Float32[Tensor, "member one two"]:
    """A number per member, to multiply [member, ., .] with."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def rows_of(table: Tensor, index: Int64[Tensor, "member *batch"]) -> Tensor:
    """table[member, index[member, ...]] for all members at once: [member, *batch, feature]."""
    offsets = torch.arange(len(table), device=table.device) * table.shape[1]
    flat = (index + offsets.view(-1, *[1] * (index.dim() - 1))).flatten()
    return table.reshape(-1, table.shape[2]).index_select(0, flat).view(*index.shape, table.shape[2])
