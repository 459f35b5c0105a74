"""`Walk`: the paths that a pull through the local maps follows, and how they add where they meet.

The default is the theory (energies, values and keys); everything else is there to take it apart (docs/theory, 5),
random signs included.
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
    residual: bool = True
    """Let the stream pass by the branches; without, every path takes every branch in turn."""
    mlp: bool = True
    """Follow the MLP branch."""
    even_norms: bool = False
    """Divide by the mean over positions of a block norm's sigma, not by each position's own."""
    even_heads: bool = False
    """Give all heads of a layer the mean of their value gains."""
    amplitudes: bool = False
    """Add square roots of energies instead of energies where paths meet; power 2 only."""
    signs: Signs | None = None
    """A random sign on every path term; power 1 only."""

    def signed(self, terms: Float[Tensor, "..."], shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Terms with their random signs, one for each entry of `shape` (broadcast); as they are without `signs`."""
        return terms if self.signs is None else terms * self.signs(shape, terms)

    def add(self, *paths: Float[Tensor, "*place feature"]) -> Float[Tensor, "*place feature"]:
        """The sum of several paths that meet at one place."""
        if self.amplitudes:
            return torch.stack([path.sqrt() for path in paths]).sum(0).square()
        total = paths[0]
        for path in paths[1:]:
            total = total + path
        return total

    def meet(
        self, identity: Float[Tensor, "*place feature"], *branches: Float[Tensor, "*place feature"]
    ) -> Float[Tensor, "*place feature"]:
        """The stream below a branching: its own identity path and the paths through the branches."""
        if not branches:
            return identity
        return self.add(identity, *branches) if self.residual else self.add(*branches)


THEORY = Walk()
BACK_PROPAGATION = Walk(power=1, query=True)
"""The exact gradient: signed maps along values, keys and queries."""


def draw_signs(shape: tuple[int, ...], like: Float[Tensor, "..."], generator: torch.Generator) -> Tensor:
    """+1 or -1 with equal chance, independently, in the type and place of `like`."""
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return bits.to(like).mul_(2).sub_(1)
