"""A cache of transformers whose layers grow in place: a step of decoding writes its keys and values behind the others.

The library's own cache copies all that it holds at every step, which on long prompts is most of the step. Every layer
is a full one whatever the configuration says: layers with a window mask what they must not see, so that any of them can
be cut back and joined with others.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, in tensors that have room for more positions."""

    def __init__(self, rooms: tuple[Tensor, Tensor], n_positions: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = rooms[0].dtype, rooms[0].device, True
        self._hold(rooms, n_positions)

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the room; if there is none, or others were put in place of these, copy all."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        held = self.keys is self._held[0] and self.values is self._held[1]
        if not held or end > self._rooms[0].shape[-2]:
            return super().update(key_states, value_states)  # type: ignore[no-any-return]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        self._hold(self._rooms, end)
        return self._held

    def narrow(self, rows: Int[Tensor, "kept"], begin: int) -> None:
        """Go on with some rows alone, without their first `begin` positions."""
        length = self.keys.shape[-2]
        rooms = self._rooms if self.keys is self._held[0] else (self.keys, self.values)
        keys, values = (room.index_select(0, rows.to(room.device))[..., begin:, :] for room in rooms)
        self._hold((keys, values), length - begin)

    def _hold(self, rooms: tuple[Tensor, Tensor], n_positions: int) -> None:
        self._rooms = rooms
        keys, values = rooms
        self._held = self.keys, self.values = keys[..., :n_positions, :], values[..., :n_positions, :]


def growing_cache(rooms: Sequence[tuple[Tensor, Tensor]], n_positions: int) -> Any:
    """A cache of the first `n_positions` of tensors that have room for more."""
    cache = DynamicCache()
    cache.layers = [GrowingLayer(room, n_positions) for room in rooms]
    return cache
