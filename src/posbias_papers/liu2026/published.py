"""Position copy (Liu 2026): its networks, and the losses read off its figures.

The source prints no numbers, optimiser or steps; the values are read off its figures to +-0.03, those written there as
a plateau are filled in between.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

SOURCE = (
    "Liu 2026, Sparse attention 7: Stack of causal attention creates implicit positional embedding, and explaining "
    '"Loss in the middle" (blog post, 31 January 2026)'
)
VOCABULARY = 10
CONTEXT = 10
READING_ERROR = 0.03
"""Nats by which a value read off a figure may be off."""


@dataclass(frozen=True)
class Configuration:
    """One network of the post: attention layers of one head, no positional encoding."""

    depth: int
    width: int
    residual: bool = False
    mlp: bool = False

    @property
    def factors(self) -> dict[str, int | bool]:
        """The configuration as factors of trained members."""
        return {"depth": self.depth, "width": self.width, "residual": self.residual, "mlp": self.mlp}

    def __str__(self) -> str:
        layers = "1 layer" if self.depth == 1 else f"{self.depth} layers"
        extras = (" + residual" if self.residual else "") + (" + MLP" if self.mlp else "")
        return f"{layers}, d {self.width}{extras}"


ONE = Configuration(1, 2)
TWO = Configuration(2, 2)
TWO_WIDE = Configuration(2, 10)
THREE = Configuration(3, 2)
THREE_WIDE = Configuration(3, 10)
RESIDUAL = Configuration(3, 10, residual=True)
RESIDUAL_MLP = Configuration(3, 10, residual=True, mlp=True)
CONFIGURATIONS = (ONE, TWO, THREE, TWO_WIDE, THREE_WIDE, RESIDUAL, RESIDUAL_MLP)
"""The post does not say at which depth and width residual and MLP are added; the last of its sequence is taken."""

PUBLISHED: dict[Configuration, tuple[float, ...]] = {
    ONE: (2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 2.19, 0.0),
    TWO: (1.13, 2.06, 2.15, 2.18, 2.18, 2.18, 2.18, 2.18, 2.19, 0.0),
    TWO_WIDE: (0.0, 1.65, 1.88, 1.97, 1.97, 1.97, 1.97, 1.97, 1.97, 0.0),
    THREE_WIDE: (0.0, 1.57, 1.91, 2.00, 2.05, 2.10, 2.15, 2.20, 1.62, 0.0),
    RESIDUAL: (0.0, 0.06, 0.95, 1.22, 1.68, 1.71, 1.78, 1.55, 0.55, 0.0),
    RESIDUAL_MLP: (0.0, 0.05, 0.15, 0.29, 0.32, 1.51, 0.92, 0.04, 0.0, 0.0),
}
"""Final loss in nats by target position."""


def blind_loss() -> float:
    """Loss of a reader who sees nothing: ln V."""
    return math.log(VOCABULARY)


def orderless_loss() -> float:
    """Least loss of a reader who knows how often each token occurs and which is the last, but not their order.

    E ln((C - 1) / c) with c = 1 + Binomial(C - 2, 1 / V) the target's own count, for a target before the last place.
    """
    places, chance = CONTEXT - 1, 1 / VOCABULARY
    return math.fsum(
        math.comb(places - 1, repeats)
        * chance**repeats
        * (1 - chance) ** (places - 1 - repeats)
        * math.log(places / (1 + repeats))
        for repeats in range(places)
    )


def published_losses(configuration: Configuration) -> Float64[np.ndarray, "context"] | None:
    """Losses read off the figure; None if the values of a configuration were not read."""
    values = PUBLISHED.get(configuration)
    return None if values is None else np.array(values)
