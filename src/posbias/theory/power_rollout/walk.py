"""`Walk`: the paths that a pull through the local maps follows.

The default is the theory (energies, values and keys). Signed maps are back-propagation, by which it is checked; with
random signs they are what the theory assumes of paths (docs/theory, 5).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Power = Literal[1, 2]
"""1: signed maps, back-propagation; 2: their elementwise squares, energies."""
Energy = Float[Tensor, "*batch position feature"]
"""Energies (power 2, >= 0) or gradients (power 1) in every residual channel."""
Signs = Callable[[tuple[int, ...], Tensor], Tensor]
"""A function of a shape and a tensor: +1 or -1 with equal chance in that shape and in the tensor's type and place,
independent of each other and of all earlier ones."""


@dataclass(frozen=True)
class Walk:
    """One way to walk from the last position down to the input."""

    power: Power = 2
    key: bool = True
    """Follow keys, which move the attention weights, beside the values."""
    query: bool = False
    """Follow queries as well."""
    signs: Signs | None = None
    """A random sign on every path term; power 1 only."""

    def signed(self, terms: Float[Tensor, "..."], shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Terms with their random signs, one for each entry of `shape` (broadcast); as they are without `signs`."""
        return terms if self.signs is None else terms * self.signs(shape, terms)


THEORY = Walk()
BACK_PROPAGATION = Walk(power=1, query=True)
"""The exact gradient: signed maps along values, keys and queries."""


def draw_signs(shape: tuple[int, ...], like: Float[Tensor, "..."], generator: torch.Generator) -> Tensor:
    """+1 or -1 with equal chance, independently, in the type and place of `like`."""
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return bits.to(like).mul_(2).sub_(1)
