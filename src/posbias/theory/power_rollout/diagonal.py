"""The diagonal power rollout: an energy per position and residual channel, pulled from the last position down.

e <- e + MLP'(e), e <- e + attention'(e), layer by layer, each branch the elementwise square of its exact local Jacobian
and the stream's identity kept as it is. With power 1 the very same walk is back-propagation (docs/theory, section 5).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.theory.power_rollout.attention import Paths, attention_pull
from posbias.theory.power_rollout.description import Description
from posbias.theory.power_rollout.local_maps import Power, mlp_pull, norm_pull
from posbias.theory.power_rollout.trace import Trace


def start_energy(description: Description, trace: Trace) -> Float[Tensor, "position feature"]:
    """Energy at the last position's stream: N_final(gradient^2), with gradient = 1 for the whole final state."""
    gradient = torch.ones_like(trace.final_stream) if trace.score_gradient is None else trace.score_gradient
    energy = torch.zeros_like(trace.layers[0].stream)
    energy[-1] = norm_pull(description.final_norm, trace.final_stream, gradient.to(energy.dtype).square(), 2)
    return energy


def pull_layers(
    description: Description,
    trace: Trace,
    energy: Float[Tensor, "position feature"],
    *,
    paths: Paths,
    power: Power = 2,
) -> Float[Tensor, "position feature"]:
    """Pull from the stream above the last block to the vectors entering the network.

    Args:
        description: The model's maps.
        trace: One prompt's activations.
        energy: Energies (power 2, >= 0) or a gradient (power 1) at the stream above the last block.
        paths: Score paths followed beside the values; power 1 is the exact gradient when all are.
        power: 2 the theory; 1 back-propagation through the same local maps.

    Returns:
        At the network's input: energies up to a common factor for power 2, the gradient itself for power 1.
    """
    for layer, kept in zip(reversed(description.layers), reversed(trace.layers), strict=True):
        energy = energy + mlp_pull(layer, kept, energy, power)
        energy = energy + attention_pull(layer, kept, energy, power, paths)
        if power == 2:
            energy = energy / energy.sum()  # only the shape matters; unscaled energies overflow float32 in depth
    return energy


@torch.no_grad()
def diagonal_influence(description: Description, trace: Trace, paths: Paths) -> Float[Tensor, "position"]:
    """Square roots of the energies that reach each input position; not normalised."""
    energy = pull_layers(description, trace, start_energy(description, trace), paths=paths)
    return energy.double().sum(-1).sqrt()
