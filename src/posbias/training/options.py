"""How members are trained: `TrainingSchedule` decides the result, `TrainOptions` where the work is done and kept."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from jaxtyping import Float32
from pydantic import AllowInfNan

from posbias.checks import Count, CountOrZero, NonNegative, Positive, Steps, StepsOrZero, checked
from posbias.errors import UsageError
from posbias.models.devices import AUTO
from posbias.registry import Registry
from posbias.runs.engines import Engine, Local

STOPPING: Registry["StoppingRule"] = Registry("stopping rule", left={"plateau": "below"})

Curve = Float32[np.ndarray, "window"]
"""Mean losses (nats) over successive windows of steps, oldest first; all finite."""


class StoppingRule(ABC):
    """A rule that says when a member has learnt enough."""

    name: ClassVar[str]

    @abstractmethod
    def stops(self, curve: Curve) -> bool:
        """True if training ends after the last window of this curve, which has at least one."""

    def __str__(self) -> str:
        return STOPPING.spell(self)


@STOPPING.register("never")
@dataclass(frozen=True)
class Never(StoppingRule):
    """All steps are trained."""

    def stops(self, curve: Curve) -> bool:
        """Always false."""
        return False


@STOPPING.register("below")
@dataclass(frozen=True)
class Below(StoppingRule):
    """A member ends once the mean loss of each of the last `windows` windows is below `loss`."""

    loss: Positive
    """Nats, > 0."""
    windows: Steps = 3
    """Number of windows in a row, >= 1."""

    def stops(self, curve: Curve) -> bool:
        """True if the end of the curve is low enough."""
        return len(curve) >= self.windows and bool(np.all(curve[-self.windows :] < self.loss))


@checked
@dataclass(frozen=True)
class TrainingSchedule:
    """The `train` section of a study: what decides the result of a training, beside the member itself."""

    steps: Steps
    """Updates, >= 1."""
    batch: Count = 128
    """Sequences per update and member, >= 1."""
    window: Steps = 10
    """Steps per entry of the loss curve, >= 1; rules, divergence and evaluations look at the end of a window."""
    evaluate_every: StepsOrZero = 0
    """Evaluate when this many steps are done, and every as many again: a multiple of `window`. 0: only at the end."""
    examples: CountOrZero = 1000
    """Sequences per evaluation set, >= 1; 0 evaluates nothing."""
    stopping: StoppingRule = field(default_factory=Never)
    diverged_above: Annotated[Positive, AllowInfNan(True)] = 100.0
    """A mean loss (nats) over a window that is not finite or above this ends the member as diverged."""

    def __post_init__(self) -> None:
        if self.evaluate_every % self.window:
            raise UsageError(
                f"training: evaluate_every must be a multiple of window ({self.window}), got {self.evaluate_every}"
            )

    @property
    def n_windows(self) -> int:
        """Entries of a full loss curve; the last window is shorter where `window` does not divide `steps`."""
        return -(-self.steps // self.window)

    def describe(self) -> dict[str, object]:
        """Plain values for a record and for the fingerprint of checkpoints."""
        return {**vars(self), "stopping": str(self.stopping)}


@checked
@dataclass(frozen=True)
class TrainOptions:
    """Settings of `train`: where members are trained and kept; none but the device changes results."""

    engine: Engine = field(default_factory=Local)
    device: str = AUTO
    """Device that trains members, as for `load_model`; `auto`: the first accelerator, or the CPU if there is none."""
    directory: Path | None = None
    """Run directory: the record, models under `models/`, and checkpoints and finished stacks in `parts/` until all is
    trained. None: nothing is kept."""
    resume: bool = False
    """Read back a study that the directory holds finished, whatever commit trained it, and continue an unfinished one
    from its checkpoints."""
    overwrite: bool = False
    """Train everything anew and replace what the directory holds, which is refused otherwise."""
    checkpoint_seconds: Annotated[NonNegative, AllowInfNan(True)] = 60.0
    """Seconds between checkpoints of a stack, >= 0; 0: after every window."""
    stack_size: Count = 64
    """Most members trained as one program, >= 1."""
    chunk: Count | None = None
    """Members that go forward and backward together, >= 1: fewer stay in the processor's caches and leave some to
    every thread, more keep a graphics processor busy. None: what the caches hold on a CPU, all on other devices."""
    confirmed: bool = False
    """True permits a study of more than 1000 members."""
