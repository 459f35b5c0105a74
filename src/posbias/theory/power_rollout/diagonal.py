"""The diagonal power rollout: an energy per position and residual channel, pulled from the last position down.

e <- e + MLP'(e), e <- e + attention'(e), layer by layer (both of the same e in parallel blocks), each branch the
elementwise square of its exact local Jacobian and the stream's identity kept as it is. With power 1 the very same walk
is back-propagation (docs/theory, section 5).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.theory.power_rollout.attention import attention_pull
from posbias.theory.power_rollout.description import Description, LayerDescription
from posbias.theory.power_rollout.local_maps import mlp_pull, norm_pull
from posbias.theory.power_rollout.trace import LayerTrace, Trace
from posbias.theory.power_rollout.walk import Power, Walk


def pull_to_stream(
    description: Description, trace: Trace, covector: Float[Tensor, "*batch state"], power: Power
) -> Float[Tensor, "*batch position feature"]:
    """From the last position's final state to the stream above the last block, zero at every other position."""
    if description.output_projection is not None:
        covector = covector @ description.output_projection.to(covector.dtype).pow(power)
    last = norm_pull(description.final_norm, trace.final_stream, covector, power)
    stream = last.new_zeros(*last.shape[:-1], len(trace.embeddings), last.shape[-1])
    stream[..., -1, :] = last
    return stream


def start_energy(description: Description, trace: Trace) -> Float[Tensor, "position feature"]:
    """Energy at the last position's stream: N_final(gradient^2), with gradient = 1 for the whole final state."""
    gradient = torch.ones_like(trace.state) if trace.score_gradient is None else trace.score_gradient
    return pull_to_stream(description, trace, gradient.to(trace.state.dtype).square(), 2)


def pull_layers(
    description: Description, trace: Trace, energy: Float[Tensor, "*batch position feature"], walk: Walk
) -> Float[Tensor, "*batch position width"]:
    """Pull from the stream above the last block to the vectors entering the network.

    Args:
        description: The model's maps.
        trace: One prompt's activations.
        energy: Energies (power 2, >= 0) or gradients (power 1) at the stream above the last block.
        walk: Which paths are followed, with which power.

    Returns:
        At the network's input: energies up to a common factor for power 2, the gradient itself for power 1.
    """
    for layer, kept in zip(reversed(description.layers), reversed(trace.layers), strict=True):
        energy = pull_block(layer, kept, energy, walk)
        if walk.power == 2:
            energy = energy / energy.sum()  # only the shape matters; unscaled energies overflow float32 in depth
    return pull_to_input(description, trace, energy, walk)


def pull_to_input(
    description: Description, trace: Trace, energy: Float[Tensor, "*batch position feature"], walk: Walk
) -> Float[Tensor, "*batch position width"]:
    """From the stream below the first block to the vectors entering the network."""
    if description.embedding_norm is not None:  # no family has this and a projection
        energy = norm_pull(description.embedding_norm, trace.embeddings, energy, walk.power, even=walk.even_norms)
    if description.input_projection is not None:
        energy = energy @ description.input_projection.to(energy.dtype).pow(walk.power)
    return energy if description.input_scale == 1 else energy * description.input_scale**walk.power


def pull_block(
    layer: LayerDescription, kept: LayerTrace, energy: Float[Tensor, "*batch position feature"], walk: Walk
) -> Float[Tensor, "*batch position feature"]:
    """Pull through one block, the stream's identity path included: energies for power 2, gradients for power 1."""
    power, even = walk.power, walk.even_norms
    energy = norm_pull(layer.mlp_stream_norm, kept.mlp_sum, energy, power, even=even)
    mlp = [mlp_pull(layer, kept, energy, walk)] if walk.mlp else []
    if layer.parallel:
        return walk.meet(energy, *mlp, attention_pull(layer, kept, energy, walk))
    energy = walk.meet(energy, *mlp)
    energy = norm_pull(layer.attention_stream_norm, kept.attention_sum, energy, power, even=even)
    return walk.meet(energy, attention_pull(layer, kept, energy, walk))


@torch.no_grad()
def diagonal_influence(description: Description, trace: Trace, walk: Walk) -> Float[Tensor, "position"]:
    """Square roots of the energies that reach each input position; not normalised."""
    energy = pull_layers(description, trace, start_energy(description, trace), walk)
    return energy.double().sum(-1).sqrt()
