"""One prompt in one model, ready to be walked: the same questions for Hugging Face models and reference models.

Which maps answer them is decided here and nowhere else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.models.model import Model
from posbias.models.reference import ReferenceTransformer, constants_of, shape_of, stacked
from posbias.theory.power_rollout.description import Description, describe_model
from posbias.theory.power_rollout.diagonal import (
    diagonal_influence,
    pull_block,
    pull_to_input,
    pull_to_stream,
)
from posbias.theory.power_rollout.isotropic import isotropic_influence
from posbias.theory.power_rollout.reference_isotropic import stack_isotropic
from posbias.theory.power_rollout.reference_layers import StackTrace, trace_stack
from posbias.theory.power_rollout.reference_pull import (
    stack_diagonal,
    stack_pull_layer,
    stack_pull_to_input,
    stack_start,
)
from posbias.theory.power_rollout.trace import Trace, trace_of_pass, trace_prompt
from posbias.theory.power_rollout.walk import Walk


class PromptTrace(ABC):
    """A model's forward pass on one prompt."""

    @property
    @abstractmethod
    def state(self) -> Float[Tensor, "state"]:
        """The last position's final state, which the readout reads."""

    @property
    @abstractmethod
    def score_gradient(self) -> Float[Tensor, "state"] | None:
        """Gradient of the target's score by the final state; None for the target "jacobian"."""

    def pull(self, covector: Float[Tensor, "*batch state"], walk: Walk) -> Float[Tensor, "*batch position width"]:
        """From the final state to the vectors entering the network: gradients, or energies for power 2."""
        energy = self.pull_start(covector, walk)
        for block in reversed(range(self.n_blocks)):
            energy = self.pull_block(block, energy, walk)
            if walk.power == 2:
                energy = energy / energy.sum((-2, -1), keepdim=True)  # only the shape matters, and depth would overflow
        return self.pull_end(energy, walk)

    @property
    @abstractmethod
    def n_blocks(self) -> int:
        """Layers, for `pull_block`."""

    @abstractmethod
    def pull_start(
        self, covector: Float[Tensor, "*batch state"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        """The first step of `pull`: from the final state to the stream above the last block."""

    @abstractmethod
    def pull_block(
        self, block: int, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        """One step of `pull`: through one block, whose index counts from the input; energies are not scaled."""

    @abstractmethod
    def pull_end(
        self, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position width"]:
        """The last step of `pull`: from below the first block to the vectors entering the network."""

    @abstractmethod
    def diagonal(self, walk: Walk) -> Float[Tensor, "position"]:
        """Roots of the energies of the diagonal form; not normalised."""

    @abstractmethod
    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        """Roots of the energies of the isotropic form; not normalised."""


def trace_model(model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, target: str = "jacobian") -> PromptTrace:
    """Run one prompt forward and keep what walks need.

    Args:
        model: A Hugging Face model of a described family, or a reference model.
        token_ids: The prompt.
        target: One of TARGETS.

    Raises:
        UsageError: undescribed family or a prompt too long for the model.
        RunError: an activation is not finite.
    """
    ids = model.token_tensor([token_ids.tolist()])
    if isinstance(model, ReferenceTransformer):
        shape = shape_of(model.config, len(token_ids))
        constants = {name: value.to(model.device) for name, value in constants_of(model.config, len(token_ids)).items()}
        weights = {name: value.detach() for name, value in model.network.named_parameters()}
        vectors = model.embed(ids).detach()[None]
        return _OfReference(trace_stack(shape, stacked([weights]), stacked([constants]), vectors, target=target))
    description = describe_model(model, n_positions=len(token_ids))
    return DescribedTrace(description, trace_prompt(model, description, ids[0], target=target))


@contextmanager
def trace_passing(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"]
) -> Iterator[Callable[[], "DescribedTrace"]]:
    """Keep what walks need from the pass over one prompt that something else, a measurement say, runs meanwhile.

    Args:
        model: A Hugging Face model of a described family.
        token_ids: The prompt that is passed, alone and whole.

    Yields:
        What gives the trace for the target "jacobian" after the pass; a RunError before it.

    Raises:
        UsageError: undescribed family, another model, or a prompt too long for it.
    """
    description = describe_model(model, n_positions=len(token_ids))
    ids = model.token_tensor([token_ids.tolist()])[0]
    with trace_of_pass(model, description, ids) as trace:
        yield lambda: DescribedTrace(description, trace())


@dataclass(frozen=True)
class DescribedTrace(PromptTrace):
    """Of a Hugging Face model."""

    description: Description
    """The model, taken apart."""
    trace: Trace
    """Its activations."""

    @property
    def state(self) -> Float[Tensor, "state"]:
        """The last position's final state."""
        return self.trace.state

    @property
    def score_gradient(self) -> Float[Tensor, "state"] | None:
        """Gradient of the score by that state."""
        return self.trace.score_gradient

    @property
    def n_blocks(self) -> int:
        """Decoder blocks."""
        return len(self.description.layers)

    def pull_start(
        self, covector: Float[Tensor, "*batch state"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        """To the stream above the last block."""
        return pull_to_stream(self.description, self.trace, covector, walk.power)

    def pull_block(
        self, block: int, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        """Through one block."""
        return pull_block(self.description.layers[block], self.trace.layers[block], energy, walk)

    def pull_end(
        self, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position width"]:
        """To the vectors entering the network."""
        return pull_to_input(self.description, self.trace, energy, walk)

    def diagonal(self, walk: Walk) -> Float[Tensor, "position"]:
        """Energies by residual channel, their roots."""
        return diagonal_influence(self.description, self.trace, walk)

    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        """One energy per position, their roots."""
        return isotropic_influence(self.description, self.trace, walk)


@dataclass(frozen=True)
class _OfReference(PromptTrace):
    """Of a reference model: a stack of one member with a batch of one prompt."""

    trace: StackTrace

    @property
    def state(self) -> Float[Tensor, "state"]:
        return self.trace.state[0, 0]

    @property
    def score_gradient(self) -> Float[Tensor, "state"] | None:
        return None if self.trace.score_gradient is None else self.trace.score_gradient[0, 0]

    @property
    def n_blocks(self) -> int:
        return len(self.trace.layers)

    def pull_start(
        self, covector: Float[Tensor, "*batch state"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        return stack_start(self.trace, covector[..., None, None, :], walk.power)[..., 0, 0, :, :]

    def pull_block(
        self, block: int, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position feature"]:
        stacked = energy[..., None, None, :, :]
        return stack_pull_layer(self.trace.shape, self.trace.layers[block], stacked, walk)[..., 0, 0, :, :]

    def pull_end(
        self, energy: Float[Tensor, "*batch position feature"], walk: Walk
    ) -> Float[Tensor, "*batch position width"]:
        return stack_pull_to_input(self.trace, energy[..., None, None, :, :], walk)[..., 0, 0, :, :]

    def diagonal(self, walk: Walk) -> Float[Tensor, "position"]:
        return stack_diagonal(self.trace, walk)[0, 0]

    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        return stack_isotropic(self.trace, walk)[0, 0]
