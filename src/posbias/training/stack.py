"""`Stack`: members of one shape as one program - parameters, constants and data with a leading member axis.

One step draws a batch for every member, goes forward and backward through stacked matrix products, and updates one flat
buffer. Members never mix: a member's numbers are those it would get alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.models.reference import constants_of, draw_parameters, forward, shape_of
from posbias.tasks.synthetic import cross_entropy, stack_tasks
from posbias.training.layout import Layout
from posbias.training.members import Member
from posbias.training.optimisers import fresh_state, kept, settings_of

EVALUATED_AT_ONCE = 512
"""Sequences that go forward together in an evaluation: bounds memory, changes no result."""


class Stack:
    """Members of one stack key in training.

    Args:
        members: At least one; equal `stack_key`.
        device: Where parameters and data are.
        chunk: Members that go forward and backward together.
    """

    def __init__(self, members: Sequence[Member], *, device: torch.device, chunk: int) -> None:
        self.members = tuple(members)
        self.device = device
        self.chunk = chunk
        first = self.members[0]
        drawn = [draw_parameters(member.config, member.generator()) for member in self.members]
        self.layout = Layout.of(drawn[0])
        self.values: Float[Tensor, "member value"] = self.layout.pack(drawn, device)
        self.state = fresh_state(type(first.optimiser), self.values)
        self._gradients = torch.zeros_like(self.values)
        self._attach()

    def select(self, indices: Sequence[int]) -> "Stack":
        """A stack of some of the members, as they stand; this one is unchanged."""
        chosen = object.__new__(Stack)
        chosen.members = tuple(self.members[index] for index in indices)
        chosen.device, chosen.chunk, chosen.layout = self.device, self.chunk, self.layout
        rows = torch.tensor(list(indices), dtype=torch.int64, device=self.device)
        chosen.values = self.values[rows].contiguous()
        chosen.state = kept(self.state, rows)
        chosen._gradients = torch.zeros_like(chosen.values)
        chosen._attach()
        return chosen

    def _attach(self) -> None:
        """What follows from the members alone."""
        first = self.members[0]
        self._shape = shape_of(first.config, first.task.n_positions)
        self._rows = first.task.rows
        constants = [constants_of(member.config, member.task.n_positions) for member in self.members]
        self._constants = {
            name: torch.stack([each[name] for each in constants]).to(self.device) for name in constants[0]
        }
        self._settings = settings_of(
            [member.optimiser for member in self.members], dtype=self.values.dtype, device=self.device
        )
        self._data = stack_tasks(
            [member.task for member in self.members], [member.seed for member in self.members], self.device
        )

    def load(self, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Stand where another stack of the same members stood: its `values` and `state`."""
        self.values.copy_(torch.from_numpy(values))
        for name, kept_values in state.items():
            self.state[name].copy_(torch.from_numpy(kept_values))

    def step(self, step: int, batch: int) -> Float[Tensor, "member"]:
        """One update of every member on its own batch; the losses (nats) before the update."""
        drawn = self._data.batch(step, batch)
        gradients = self.layout.views(self._gradients)
        losses = []
        for part in self._parts():
            leaves = {
                name: view.detach().requires_grad_() for name, view in self.layout.views(self.values[part]).items()
            }
            logits = self._forward(leaves, drawn.inputs[part], part)
            loss = cross_entropy(logits, drawn.targets[part])
            # A bias of the keys drops out of the softmax: its gradient is 0.
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
            torch._foreach_copy_([gradients[name][part] for name in leaves], list(found))
            losses.append(loss.detach())
        self.state["step"] += 1
        kind = type(self.members[0].optimiser)
        kind.update(self.values, self._gradients, self.state, self._settings)
        return torch.cat(losses)

    @torch.no_grad()
    def predict(
        self, inputs: Float[Tensor, "member batch position feature"] | Int[Tensor, "member batch position"]
    ) -> Float[Tensor, "member batch row output"]:
        """Logits of the scored positions, as every member stands."""
        values = self.layout.views(self.values)
        found = []
        for part in self._parts():
            parameters = {name: view[part] for name, view in values.items()}
            pieces = torch.split(inputs[part], EVALUATED_AT_ONCE, dim=1)
            found.append(torch.cat([self._forward(parameters, piece, part) for piece in pieces], dim=1))
        return torch.cat(found)

    def evaluate(self, examples: int) -> dict[str, np.ndarray]:
        """The task's own evaluation of every member: arrays with a leading member axis, by name."""
        return dict(self._data.evaluate(self.predict, examples=examples))

    def parameters(self, index: int) -> dict[str, Tensor]:
        """A member's parameters, copied to the CPU."""
        views = self.layout.views(self.values[index : index + 1])
        return {name: view[0].detach().cpu().clone() for name, view in views.items()}

    def _parts(self) -> Iterator[slice]:
        for start in range(0, len(self.members), self.chunk):
            yield slice(start, start + self.chunk)

    def _forward(self, parameters: dict[str, Tensor], inputs: Tensor, part: slice) -> Tensor:
        constants = {name: values[part] for name, values in self._constants.items()}
        if inputs.is_floating_point():
            inputs = inputs.to(self.values.dtype)
        return forward(self._shape, parameters, constants, inputs, rows=self._rows)
