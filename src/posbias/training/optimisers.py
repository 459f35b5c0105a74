"""Optimisers for many models at once: one flat buffer holds every member's parameters, one update serves all of them.

Settings are per member, so that a grid may vary the learning rate within one stack. All operations are elementwise, so
a member's update does not depend on who else is in the stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from jaxtyping import Float
from torch import Tensor

from posbias.checks import NonNegative, Positive
from posbias.registry import Registry

OPTIMISERS: Registry["Adam"] = Registry("optimiser", left={"sgd": "adam or adamw"})

Flat = Float[Tensor, "member value"]
State = dict[str, Tensor]
Settings = dict[str, Tensor]
"""Settings of every member, shape [member, 1], by the name of the optimiser's field."""

Remainder = Annotated[float, Interval(ge=0, lt=1)]
"""What is kept from step to step."""


@OPTIMISERS.register("adam")
@dataclass(frozen=True)
class Adam:
    """Adam without weight decay; members of one stack share the kind of optimiser, not the settings."""

    name: ClassVar[str]
    moments: ClassVar[tuple[str, ...]] = ("mean", "square")
    """Buffers as large as the parameters that the update carries from step to step."""
    learning_rate: Positive = 1e-3
    """Size of a step, > 0."""
    beta1: Remainder = 0.9
    """Decay of the running mean of gradients, in [0, 1)."""
    beta2: Remainder = 0.999
    """Decay of the running mean of squared gradients, in [0, 1)."""
    epsilon: Positive = 1e-8
    """Added to the root of the squares, > 0."""

    def __str__(self) -> str:
        return OPTIMISERS.spell(self)

    @classmethod
    def update(cls, values: Flat, gradients: Flat, state: State, settings: Settings) -> None:
        """Change `values` and the moments in `state` in place; `gradients` may be overwritten.

        x -= rate * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon), t = `state["step"]` [member, 1] from 1.

        Source: Kingma and Ba 2015, with the decoupled decay of Loshchilov and Hutter 2019 in `AdamW`; as in PyTorch.
        """
        beta1, beta2 = settings["beta1"], settings["beta2"]
        state["mean"].lerp_(gradients, 1 - beta1)
        state["square"].lerp_(gradients.square_(), 1 - beta2)
        rate = settings["learning_rate"] / (1 - beta1 ** state["step"])
        root = (1 - beta2 ** state["step"]).sqrt()
        # The gradients' memory serves for the denominator: nothing is allocated.
        torch.sqrt(state["square"], out=gradients)
        gradients.mul_(1 / root).add_(settings["epsilon"])
        torch.div(state["mean"], gradients, out=gradients)
        values.sub_(gradients.mul_(rate))


@OPTIMISERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay that does not pass through the moments."""

    weight_decay: NonNegative = 1e-2
    """Share of a parameter lost per step is learning rate times this, >= 0."""

    @classmethod
    def update(cls, values: Flat, gradients: Flat, state: State, settings: Settings) -> None:
        """Decay first, then Adam, as PyTorch does."""
        values.mul_(1 - settings["learning_rate"] * settings["weight_decay"])
        super().update(values, gradients, state, settings)


def settings_of(optimisers: Sequence[Adam], *, dtype: torch.dtype, device: torch.device) -> Settings:
    """The members' settings as tensors [member, 1]; all members have optimisers of one kind."""
    names = [name for name, value in vars(optimisers[0]).items() if isinstance(value, int | float)]
    return {
        name: torch.tensor([[getattr(optimiser, name)] for optimiser in optimisers], dtype=torch.float64).to(
            device, dtype
        )
        for name in names
    }


def fresh_state(kind: type[Adam], values: Flat) -> State:
    """Moments of zero and a step count of zero, for the parameters of a stack."""
    state = {name: torch.zeros_like(values) for name in kind.moments}
    state["step"] = torch.zeros(len(values), 1, dtype=values.dtype, device=values.device)
    return state
