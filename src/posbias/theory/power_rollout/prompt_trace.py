"""One prompt in one model, ready to be walked: the same steps for Hugging Face models and reference models.

The diagonal power rollout is an energy per position and residual channel, pulled from the last position down:
e <- e + MLP'(e), e <- e + attention'(e), layer by layer (both of the same e in parallel blocks), each branch the
elementwise square of its exact local Jacobian and the stream's identity kept as it is. With power 1 the very same walk
is back-propagation.

The isotropic form keeps one energy per position, spread evenly over the residual channels before every branch:
E_j <- E_j (1 + mu_l(j)), then E_j <- E_j + sum_h g_lh^2 sum_i E_i A_lh[i,j]^2 / sigma_l(j)^2, with g_lh^2 =
||W_O^h W_V^h diag(w)||_F^2 / d and mu = ||J_mlp||_F^2 / d by random probes (docs/theory, section 5). It ignores which
channels carry the energy and so fails where norm weights are very uneven (Gemma). A LayerNorm's removal of the mean
(1/d of the energy) and MPT's clamps are left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.models.model import Model
from posbias.models.reference import ReferenceTransformer, constants_of, shape_of, stacked
from posbias.theory.power_rollout.attention import attention_energy, attention_pull
from posbias.theory.power_rollout.local_maps import even_gain, mlp_gain, mlp_pull, norm_pull
from posbias.theory.power_rollout.reference import (
    PROBE_SEED,
    StackTrace,
    stack_isotropic,
    stack_pull_layer,
    stack_pull_to_input,
    stack_start,
    trace_stack,
)
from posbias.theory.power_rollout.trace import Description, Trace, describe_model, trace_of_pass, trace_prompt
from posbias.theory.power_rollout.walk import Energy, Walk, draw_signs

Covectors = Float[Tensor, "*batch state"]


@dataclass(frozen=True)
class PromptTrace(ABC):
    """A model's forward pass on one prompt."""

    state: Float[Tensor, "state"]
    """The last position's final state, which the readout reads."""
    score_gradient: Float[Tensor, "state"] | None
    """Gradient of the target's score by the final state; None for the target "jacobian"."""
    n_blocks: int
    """Layers, for `pull_block`."""

    def pull(self, covector: Covectors, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """From the final state to the vectors entering the network: gradients, or energies for power 2."""
        energy = self.pull_start(covector, walk)
        for block in reversed(range(self.n_blocks)):
            energy = self.pull_block(block, energy, walk)
            if walk.power == 2:
                energy = energy / energy.sum((-2, -1), keepdim=True)  # only the shape matters, and depth would overflow
        return self.pull_end(energy, walk)

    @abstractmethod
    def pull_start(self, covector: Covectors, walk: Walk) -> Energy:
        """The first step of `pull`: to the stream above the last block, zero at all positions but the last."""

    @abstractmethod
    def pull_block(self, block: int, energy: Energy, walk: Walk) -> Energy:
        """One step of `pull`: through one block, whose index counts from the input; energies are not scaled."""

    @abstractmethod
    def pull_end(self, energy: Energy, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """The last step of `pull`: from below the first block to the vectors entering the network."""

    @torch.no_grad()
    def diagonal(self, walk: Walk) -> Float[Tensor, "position"]:
        """Roots of the energies of the diagonal form, from gradient^2 (1 for the whole state); not normalised."""
        gradient = torch.ones_like(self.state) if self.score_gradient is None else self.score_gradient
        return self.pull(gradient.to(self.state.dtype).square(), walk).double().sum(-1).sqrt()

    @abstractmethod
    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        """Roots of the energies of the isotropic form; not normalised."""

    def covectors(self, count: int, generator: torch.Generator) -> Float[Tensor, "count state"]:
        """Random signs v in the channels of the final state, E ||v'J||^2 = ||J||_F^2; a score's own gradient."""
        if self.score_gradient is not None:
            return self.score_gradient.to(self.state.dtype).expand(count, -1)
        return draw_signs((count, len(self.state)), self.state, generator)


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
        trace = trace_stack(shape, stacked([weights]), stacked([constants]), vectors, target=target)
        gradient = None if trace.score_gradient is None else trace.score_gradient[0, 0]
        return _OfReference(trace.state[0, 0], gradient, len(trace.layers), trace)
    description = describe_model(model, n_positions=len(token_ids))
    return DescribedTrace.of(description, trace_prompt(model, description, ids[0], target=target))


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
        yield lambda: DescribedTrace.of(description, trace())


@dataclass(frozen=True)
class DescribedTrace(PromptTrace):
    """Of a Hugging Face model."""

    description: Description
    """The model, taken apart."""
    trace: Trace
    """Its activations."""

    @classmethod
    def of(cls, description: Description, trace: Trace) -> "DescribedTrace":
        """From the model's maps and one prompt's activations."""
        return cls(trace.state, trace.score_gradient, len(trace.layers), description, trace)

    def pull_start(self, covector: Covectors, walk: Walk) -> Energy:
        """Through the projection of the final state, where there is one, and the final norm."""
        if self.description.output_projection is not None:
            covector = covector @ self.description.output_projection.to(covector.dtype).pow(walk.power)
        last = norm_pull(self.description.final_norm, self.trace.final_stream, covector, walk.power)
        stream = last.new_zeros(*last.shape[:-1], len(self.trace.embeddings), last.shape[-1])
        stream[..., -1, :] = last
        return stream

    def pull_block(self, block: int, energy: Energy, walk: Walk) -> Energy:
        """Through both branches, with the stream's identity path and the norms of the stream."""
        layer, kept = self.description.layers[block], self.trace.layers[block]
        power, even = walk.power, walk.even_norms
        energy = norm_pull(layer.mlp_stream_norm, kept.mlp_sum, energy, power, even=even)
        mlp = [mlp_pull(layer, kept, energy, walk)] if walk.mlp else []
        if layer.parallel:
            return walk.meet(energy, *mlp, attention_pull(layer, kept, energy, walk))
        energy = walk.meet(energy, *mlp)
        energy = norm_pull(layer.attention_stream_norm, kept.attention_sum, energy, power, even=even)
        return walk.meet(energy, attention_pull(layer, kept, energy, walk))

    def pull_end(self, energy: Energy, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """Through the embedding norm, the input projection (no family has both) and the input's scale."""
        maps, power = self.description, walk.power
        if maps.embedding_norm is not None:
            energy = norm_pull(maps.embedding_norm, self.trace.embeddings, energy, power, even=walk.even_norms)
        if maps.input_projection is not None:
            energy = energy @ maps.input_projection.to(energy.dtype).pow(power)
        return energy if maps.input_scale == 1 else energy * maps.input_scale**power

    @torch.no_grad()
    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        """One energy per position, their roots."""
        generator = torch.Generator().manual_seed(PROBE_SEED)
        stream = self.trace.layers[0].stream
        energy = torch.zeros(len(stream), dtype=stream.dtype, device=stream.device)
        energy[-1] = 1
        for layer, kept in zip(reversed(self.description.layers), reversed(self.trace.layers), strict=True):
            energy = energy * even_gain(layer.mlp_stream_norm, kept.mlp_sum)
            inner = energy * (1 + mlp_gain(layer, kept, generator))
            if layer.parallel:
                energy = inner + attention_energy(layer, kept, energy, walk)
            else:
                inner = inner * even_gain(layer.attention_stream_norm, kept.attention_sum)
                energy = inner + attention_energy(layer, kept, inner, walk)
            energy = energy / energy.sum()
        return (energy * even_gain(self.description.embedding_norm, self.trace.embeddings)).double().sqrt()


@dataclass(frozen=True)
class _OfReference(PromptTrace):
    """Of a reference model: a stack of one member with a batch of one prompt."""

    trace: StackTrace

    def pull_start(self, covector: Covectors, walk: Walk) -> Energy:
        return stack_start(self.trace, covector[..., None, None, :], walk.power)[..., 0, 0, :, :]

    def pull_block(self, block: int, energy: Energy, walk: Walk) -> Energy:
        return stack_pull_layer(self.trace.layers[block], energy[..., None, None, :, :], walk)[..., 0, 0, :, :]

    def pull_end(self, energy: Energy, walk: Walk) -> Float[Tensor, "*batch position width"]:
        return stack_pull_to_input(self.trace, energy[..., None, None, :, :], walk)[..., 0, 0, :, :]

    def isotropic(self, walk: Walk) -> Float[Tensor, "position"]:
        return stack_isotropic(self.trace, walk)[0, 0]
