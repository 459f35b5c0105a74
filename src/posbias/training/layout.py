"""Where each named parameter of a model lies in one flat vector, so that a stack of models is one matrix."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

ALIGNMENT = 64
"""A member's vector is padded to a multiple of this many values: every member's begins where a cache line does, and
vector instructions find no remainder at its end, whose rounding could differ."""


@dataclass(frozen=True)
class Layout:
    """Names, shapes and places of the parameters of one model; equal for all members of a stack."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "Layout":
        """The layout of a model's parameters, in their order."""
        return cls(tuple((name, tuple(values.shape)) for name, values in parameters.items()))

    @property
    def n_values(self) -> int:
        """Parameters of one member, without padding."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def size(self) -> int:
        """Length of a member's vector, padding included."""
        return -(-self.n_values // ALIGNMENT) * ALIGNMENT

    def pack(self, members: list[dict[str, Tensor]], device: torch.device) -> Float[Tensor, "member value"]:
        """The members' parameters as one matrix, padded with zeros."""
        first = next(iter(members[0].values()))
        flat = torch.zeros(len(members), self.size, dtype=first.dtype, device=device)
        for row, parameters in zip(flat, members, strict=True):
            for name, view in self.views(row[None]).items():
                view.copy_(parameters[name][None])
        return flat

    def views(self, flat: Float[Tensor, "member value"]) -> dict[str, Tensor]:
        """The parameters [member, ...] as views into the matrix."""
        found, start = {}, 0
        for name, shape in self.shapes:
            stop = start + math.prod(shape)
            found[name] = flat[:, start:stop].view(len(flat), *shape)
            start = stop
        return found
