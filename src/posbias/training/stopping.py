"""Rules that end a member's training early, from its own loss curve alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float32

from posbias.checks import check_whole
from posbias.errors import UsageError
from posbias.registry import Registry

STOPPING: Registry["StoppingRule"] = Registry("stopping rule")

Curve = Float32[np.ndarray, "window"]
"""Mean losses (nats) over successive windows of steps, oldest first; all finite."""


class StoppingRule(ABC):
    """When a member has learnt enough."""

    name: ClassVar[str]

    @abstractmethod
    def stops(self, curve: Curve) -> bool:
        """Whether training ends after the last window of this curve (at least one window)."""

    def __str__(self) -> str:
        return STOPPING.spell(self)


@STOPPING.register("never")
@dataclass(frozen=True)
class Never(StoppingRule):
    """All steps are trained."""

    def stops(self, curve: Curve) -> bool:
        """No."""
        return False


@STOPPING.register("below")
@dataclass(frozen=True)
class Below(StoppingRule):
    """Once the mean loss of each of the last `windows` windows is below `loss`."""

    loss: float
    """Nats, > 0."""
    windows: int = 3
    """How many in a row, >= 1."""

    def __post_init__(self) -> None:
        if isinstance(self.loss, bool) or not isinstance(self.loss, int | float) or not 0 < self.loss < np.inf:
            raise UsageError(f"below: loss must be a finite number > 0, got {self.loss!r}")
        check_whole("below: windows", self.windows, least=1)

    def stops(self, curve: Curve) -> bool:
        """Whether the tail is low enough."""
        return len(curve) >= self.windows and bool(np.all(curve[-self.windows :] < self.loss))


@STOPPING.register("plateau")
@dataclass(frozen=True)
class Plateau(StoppingRule):
    """Once the lowest mean loss of the last `windows` windows is not `improvement` below the lowest before them."""

    windows: int
    """How long to wait for an improvement, >= 1."""
    improvement: float = 1e-3
    """Nats, >= 0."""

    def __post_init__(self) -> None:
        check_whole("plateau: windows", self.windows, least=1)
        value = self.improvement
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < np.inf:
            raise UsageError(f"plateau: improvement must be a finite number >= 0, got {value!r}")

    def stops(self, curve: Curve) -> bool:
        """Whether the tail brought too little."""
        if len(curve) <= self.windows:
            return False
        return bool(curve[-self.windows :].min() > curve[: -self.windows].min() - self.improvement)
