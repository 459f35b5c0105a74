"""Numbers by layer and head, as `key_bias` and `context_bias` have them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from posbias.errors import UsageError
from posbias.mitigation.methods.base import Mitigation

Table = tuple[tuple[float, ...], ...]
"""Numbers by layer and head."""
BEFORE = torch.tensor([1.0, 0.0], dtype=torch.float64)
"""A bias of the context: 1 for the keys before the question, 0 for those from it on."""


def by_head(method: str, name: str, values: Sequence[Sequence[float]]) -> Table:
    """Finite numbers by layer and head, of a method's parameter."""
    try:
        table = tuple(tuple(map(float, layer)) for layer in values)
        finite = bool(table) and all(map(len, table)) and np.isfinite(np.concatenate(table)).all()
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise UsageError(f"{method}: {name} must be numbers, [layer][head], got {str(values)[:60]}")
    return table


def checked_scales(method: str, scales: Sequence[Sequence[float]] | None) -> Table | None:
    """Positive factors by layer and head."""
    if scales is None:
        return None
    table = by_head(method, "scales", scales)
    if min(map(min, table)) <= 0:
        raise UsageError(f"{method}: scales must be above 0, got {min(map(min, table)):g}")
    return table


def check_shape(method: str, table: Sequence[Sequence[float]], depth: int, heads: int) -> None:
    """Refuse a table that is not one number for each head of each layer."""
    if [len(layer) for layer in table] != [heads] * depth:
        raise UsageError(f"{method}: the model has {depth} layers of {heads} heads; give a value for each")


def factors(
    method: Mitigation, scales: Sequence[Sequence[float]] | None, depth: int, heads: int
) -> Callable[[int], Float[torch.Tensor, "heads"]] | None:
    """Factors by layer, at the method's strength."""
    if scales is None:
        return None
    check_shape(method.name, scales, depth, heads)
    return (torch.tensor(scales, dtype=torch.float64) ** method.strength).__getitem__
