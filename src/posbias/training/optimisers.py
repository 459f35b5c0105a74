"""Optimisers of PyTorch for many models at once, with settings of each member's own.

A grid may vary the learning rate within one stack. All operations are elementwise, so a member's update does not depend
on who else is in the stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval
from jaxtyping import Float
from torch import Tensor

from posbias.checks import NonNegative, Positive
from posbias.registry import Registry

OPTIMISERS: Registry["Adam"] = Registry("optimiser", left={"sgd": "adam or adamw"})

Flat = Float[Tensor, "member value"]

Remainder = Annotated[float, Interval(ge=0, lt=1)]
"""What is kept from step to step."""


@OPTIMISERS.register("adam")
@dataclass(frozen=True)
class Adam:
    """Adam without weight decay; members of one stack share the kind of optimiser, not the settings."""

    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
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

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by PyTorch's names."""
        return {"lr": self.learning_rate, "betas": (self.beta1, self.beta2), "eps": self.epsilon}


@OPTIMISERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay that does not pass through the moments."""

    kind: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    weight_decay: NonNegative = 1e-2
    """Share of a parameter lost per step is learning rate times this, >= 0."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by PyTorch's names."""
        return {**super().settings, "weight_decay": self.weight_decay}


def fresh_state(values: Flat) -> dict[str, Tensor]:
    """Moments of zero and a step count of zero, for the parameters of a stack."""
    moments = {name: torch.zeros_like(values) for name in ("exp_avg", "exp_avg_sq")}
    return {**moments, "step": torch.zeros(len(values), device=values.device)}


def optimiser_of(
    members: Sequence[Adam], values: Flat, gradients: Flat, state: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """PyTorch's optimiser of the rows of `values`: it reads `gradients` and changes `values` and `state` in place."""
    groups: dict[Adam, list[Tensor]] = {}
    moments = {}
    for index, (member, row) in enumerate(zip(members, values.unbind(), strict=True)):
        row.grad = gradients[index]
        moments[row] = {name: of_members[index] for name, of_members in state.items()}
        groups.setdefault(member, []).append(row)
    alike = [{"params": rows, **member.settings} for member, rows in groups.items()]
    optimiser = members[0].kind(alike, fused=True)  # type: ignore[call-arg]
    optimiser.state.update(moments)
    return optimiser
