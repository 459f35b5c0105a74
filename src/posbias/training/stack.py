"""`Stack`: a few members of one shape as one program: parameters, constants and data with a leading member axis.

One step draws a batch for every member, goes forward and backward through stacked matrix products, and updates one flat
buffer. Members never mix, and with one thread to a product (`posbias.training.trainer` sees to that) a member's numbers
are those it would get alone: to the last bit where every matrix begins at a multiple of 16 bytes (even widths, batches
and numbers of examples), to rounding elsewhere, because kernels choose their order of summation by that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.models.devices import float64_device
from posbias.models.reference.config import constants_of, draw_parameters, shape_of
from posbias.models.reference.forward import forward
from posbias.tasks.synthetic import cross_entropy, stack_tasks
from posbias.training.members import Member
from posbias.training.optimisers import fresh_state, optimiser_of

EVALUATED_AT_ONCE = 512
"""Sequences that go forward together in an evaluation: bounds memory, changes no result."""

ALIGNMENT = 64
"""A member's vector is padded to a multiple of this many values: every member's begins where a cache line does, and
vector instructions find no remainder at its end, whose rounding could differ."""


@dataclass(frozen=True)
class Layout:
    """The places of a model's named parameters in one flat vector; equal for all members of a stack."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "Layout":
        """The layout of a model's parameters, in their order."""
        return cls(tuple((name, tuple(values.shape)) for name, values in parameters.items()))

    @property
    def size(self) -> int:
        """Length of a member's vector, padding included."""
        return -(-sum(math.prod(shape) for _, shape in self.shapes) // ALIGNMENT) * ALIGNMENT

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
        views, start = {}, 0
        for name, shape in self.shapes:
            stop = start + math.prod(shape)
            views[name] = flat[:, start:stop].view(len(flat), *shape)
            start = stop
        return views


class Stack:
    """Members of one `stack_key` in training."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        device: torch.device,
        standing: tuple[Layout, Float[Tensor, "member value"], dict[str, Tensor]] | None = None,
    ) -> None:
        """Members as they stand, with layout, values and moments; None: as they are drawn."""
        self.members, self.device = tuple(members), device
        if standing is None:
            drawn = [draw_parameters(member.config, member.generator()) for member in self.members]
            layout = Layout.of(drawn[0])
            values = layout.pack(drawn, device)
            standing = layout, values, fresh_state(values)
        self.layout, self.values, self.state = standing
        self._gradients = torch.zeros_like(self.values)
        first = self.members[0]
        self._shape = shape_of(first.config, first.task.n_positions)
        self._rows = first.task.rows
        constants = [constants_of(member.config, member.task.n_positions) for member in self.members]
        self._constants = {
            name: torch.stack([of_member[name] for of_member in constants]).to(self.device) for name in constants[0]
        }
        optimisers = [member.optimiser for member in self.members]
        self._optimiser = optimiser_of(optimisers, self.values, self._gradients, self.state)
        self._data = stack_tasks(
            [member.task for member in self.members],
            [member.seed for member in self.members],
            float64_device(self.device),
        )

    def select(self, indices: Sequence[int]) -> "Stack":
        """A stack of some of the members, as they stand, this one being unchanged; this one if all are chosen."""
        if len(indices) == len(self.members):
            return self
        rows = torch.tensor(list(indices), dtype=torch.int64, device=self.device)
        state = {name: moments[rows].contiguous() for name, moments in self.state.items()}
        standing = self.layout, self.values[rows].contiguous(), state
        return Stack([self.members[index] for index in indices], device=self.device, standing=standing)

    def load(self, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Take over the `values` and the `state` of another stack of the same members."""
        self.values.copy_(torch.from_numpy(values))
        for name, moments in state.items():
            self.state[name].copy_(torch.from_numpy(moments))

    def steps(self, start: int, stop: int, *, batch: int) -> Float[Tensor, "step member"]:
        """Updates number start ... stop - 1 of every member; the losses (nats) before each."""
        return torch.stack([self.step(step, batch) for step in range(start, stop)])

    def step(self, step: int, batch: int) -> Float[Tensor, "member"]:
        """One update of every member on its own batch; the losses (nats) before the update."""
        drawn = self._data.batch(step, batch)
        leaves = {name: view.detach().requires_grad_() for name, view in self.layout.views(self.values).items()}
        targets = drawn.targets.to(self.device)
        losses = cross_entropy(self._forward(leaves, drawn.inputs), targets)
        # A bias of the keys drops out of the softmax: its gradient is 0.
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        torch._foreach_copy_(list(self.layout.views(self._gradients).values()), list(gradients))
        self._optimiser.step()
        return losses.detach()

    @torch.no_grad()
    def predict(
        self, inputs: Float[Tensor, "member batch position feature"] | Int[Tensor, "member batch position"]
    ) -> Float[Tensor, "member batch row output"]:
        """Logits of the scored positions, as every member stands."""
        parameters = self.layout.views(self.values)
        pieces = torch.split(inputs, EVALUATED_AT_ONCE, dim=1)
        return torch.cat([self._forward(parameters, piece) for piece in pieces], dim=1).to(inputs.device)

    def evaluate(self, examples: int) -> dict[str, np.ndarray]:
        """The task's own evaluation of every member: arrays with a leading member axis, by name."""
        return dict(self._data.evaluate(self.predict, examples=examples))

    def finite(self) -> list[bool]:
        """True for every member whose parameters are all finite."""
        finite: list[bool] = self.values.isfinite().all(dim=1).tolist()
        return finite

    def parameters(self, index: int) -> dict[str, Tensor]:
        """A member's parameters, copied to the CPU."""
        views = self.layout.views(self.values[index : index + 1])
        return {name: view[0].detach().cpu().clone() for name, view in views.items()}

    def _forward(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device, self.values.dtype if inputs.is_floating_point() else None)
        return forward(self._shape, parameters, self._constants, inputs, rows=self._rows)
