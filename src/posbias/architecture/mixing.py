"""Mixing schedules: the share of attention in each layer's update, m_l in T_l = (1 - m_l) I + m_l A_l.

A schedule turns a depth into one coefficient per layer, layer 0 nearest the input.
"""

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.registry import Registry

SCHEDULES: Registry["Schedule"] = Registry("mixing schedule", left={"linear": "a list of numbers, one per layer"})

RESIDUAL_MIXING = 0.1
"""The default mixing, that of a residual network: attention carries a tenth of each layer's update, the
stream nine tenths. Five published models have .06 to .14 on average (arXiv 2602.16837)."""


class Schedule(ABC):
    """A rule that gives every layer its mixing coefficient in [0, 1]."""

    name: ClassVar[str]

    @abstractmethod
    def per_layer(self, depth: int) -> Float64[np.ndarray, "depth"]:
        """The coefficients, layer 0 nearest the input."""

    def __str__(self) -> str:
        return SCHEDULES.spell(self)


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """Equal mixing in every layer."""

    value: float
    """The mixing of every layer, in [0, 1]."""

    def per_layer(self, depth: int) -> Float64[np.ndarray, "depth"]:
        """`value` everywhere."""
        return np.full(depth, float(self.value))


@SCHEDULES.register("power_decay")
@dataclass(frozen=True)
class PowerDecay(Schedule):
    """m_l = start * (l + 1)^(-exponent): summable, hence without collapse, exactly when exponent > 1."""

    start: float
    """Mixing of the first layer, in [0, 1]."""
    exponent: float
    """Larger: faster decay with depth."""

    def per_layer(self, depth: int) -> Float64[np.ndarray, "depth"]:
        """Falling with depth."""
        return self.start * np.arange(1, depth + 1, dtype=np.float64) ** -self.exponent


def resolve_mixing(mixing: object, depth: int) -> tuple[float, ...]:
    """One coefficient per layer from a number, a list, a schedule or its literal spelling.

    Raises:
        UsageError: wrong list length, or a coefficient outside [0, 1].
    """
    if isinstance(mixing, str):
        number = None
        with suppress(ValueError):
            number = float(mixing)
        mixing = SCHEDULES.parse(mixing) if number is None else number
    if isinstance(mixing, Schedule):
        values = mixing.per_layer(depth)
    else:
        try:
            values = np.asarray(mixing, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"mixing {mixing!r} is not a number, a list of numbers or a schedule") from None
    if values.ndim == 0:
        values = np.full(depth, float(values))
    if values.shape != (depth,):
        raise UsageError(f"mixing: {values.size} values given for {depth} layers; give one number or one per layer")
    for layer, value in enumerate(values):
        if not 0 <= value <= 1:
            raise UsageError(f"mixing must lie in [0, 1], got {value} at layer {layer}")
    return tuple(values.tolist())
