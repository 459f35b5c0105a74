"""Transposed local maps of a mixture of experts, signed (power 1) or as energies (power 2).

With y = sum_{e in S} w_e(x) E_e(x), S the chosen experts, J = sum_e w_e J_e + sum_f u_f (W_r)_f: the experts' own maps
and the router's path, which is to a mixture what the key path is to attention. Where the weights of S are made to sum
to 1, u_f = w_f (E_f - y) for f in S; where they are a softmax over all experts, u_f = p_f ([f in S] E_f - y) for all f.
The choice itself is piecewise constant. Energies add between experts, and between them and the router.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.models.attention import affine
from posbias.models.families.base import MixtureParts, MlpParts
from posbias.theory.power_rollout.hidden_maps import hidden_layer, hidden_pull
from posbias.theory.power_rollout.walk import Walk


def mixture_pull(
    mixture: MixtureParts,
    read: Float[Tensor, "position feature"],
    chosen: Int[Tensor, "position top"],
    energy: Float[Tensor, "*batch position feature"],
    walk: Walk,
) -> Float[Tensor, "*batch position feature"]:
    """Pull through a mixture of experts, from its output to what it read.

    Args:
        mixture: The block's experts and router.
        read: What the mixture read, after the norm before it.
        chosen: The experts that the model gave each token to.
        energy: At the mixture's output.
        walk: Signed or energies, and how paths add where they meet.
    """
    power = walk.power
    probability = affine(read, mixture.router, None).softmax(-1)
    kept = torch.zeros_like(probability).scatter(1, chosen, probability.gather(1, chosen))
    weights = kept / kept.sum(-1, keepdim=True) if mixture.renormalised else kept
    output, reached = torch.zeros_like(read), energy.new_zeros(*energy.shape[:-1], len(mixture.experts))
    total = torch.zeros_like(energy)
    members = [_tokens_of(expert, chosen) for expert in range(len(mixture.experts))]
    outputs = [_output(parts, read[tokens]) for parts, tokens in zip(mixture.experts, members, strict=True)]
    for expert, (tokens, result) in enumerate(zip(members, outputs, strict=True)):
        output[tokens] += weights[tokens, expert, None] * result
    for expert, (parts, tokens, result) in enumerate(zip(mixture.experts, members, outputs, strict=True)):
        share, own = weights[tokens, expert, None], energy[..., tokens, :]
        up, gate = hidden_layer(parts, read[tokens])
        pulled = hidden_pull(parts, up, gate, share.pow(power) * own @ parts.down.to(own.dtype).pow(power), power)
        total[..., tokens, :] += pulled.sqrt() if walk.amplitudes else pulled
        moved = result - output[tokens]
        scale = weights if mixture.renormalised else probability
        reached[..., tokens, expert] = (own * (scale[tokens, expert, None] * moved).pow(power)).sum(-1)
    if not mixture.renormalised:
        unchosen = torch.where(kept > 0, 0, probability).pow(power)
        reached += unchosen * (energy * (-output).pow(power)).sum(-1, keepdim=True)
    routed = reached @ mixture.router.to(energy.dtype).pow(power)
    return (total + routed.sqrt()).square() if walk.amplitudes else total + routed


def _tokens_of(expert: int, chosen: Int[Tensor, "position top"]) -> Int[Tensor, "token"]:
    """Positions whose token an expert was given."""
    return (chosen == expert).any(-1).nonzero()[:, 0]


def _output(parts: MlpParts, read: Float[Tensor, "token feature"]) -> Float[Tensor, "token feature"]:
    up, gate = hidden_layer(parts, read)
    hidden = parts.activation(up) if gate is None else parts.activation(gate) * up
    return affine(hidden, parts.down, parts.down_bias)
