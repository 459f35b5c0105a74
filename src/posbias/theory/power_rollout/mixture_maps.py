"""Transposed local maps of a mixture of experts, signed (power 1) or as energies (power 2).

With y = sum_{e in S} w_e(x) E_e(x), S the chosen experts, J = sum_e w_e J_e + sum_f u_f (W_r)_f: the experts' own maps
and the router's path, which is to a mixture what the key path is to attention. Where the weights of S are made to sum
to 1, u_f = w_f (E_f - y) for f in S; where they are a softmax over all experts, u_f = p_f ([f in S] E_f - y) for all f.
The choice itself is piecewise constant. Energies add between experts, and between them and the router.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.models.attention import affine
from posbias.models.families import MixtureParts, MlpParts
from posbias.theory.power_rollout.hidden_maps import hidden_layer, hidden_output, hidden_pull
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
    probability = affine(read, mixture.router, mixture.router_bias).softmax(-1)
    kept = torch.zeros_like(probability).scatter(1, chosen, probability.gather(1, chosen))
    weights = kept / kept.sum(-1, keepdim=True) if mixture.renormalised else kept
    scale = weights if mixture.renormalised else probability
    runs = [_run(parts, read, chosen, expert) for expert, parts in enumerate(mixture.experts)]
    output = torch.zeros_like(read)
    for expert, run in enumerate(runs):
        output[run.tokens] += weights[run.tokens, expert, None] * run.output
    total, reached = torch.zeros_like(energy), energy.new_zeros(*energy.shape[:-1], len(runs))
    for expert, (parts, run) in enumerate(zip(mixture.experts, runs, strict=True)):
        share, own = weights[run.tokens, expert, None], energy[..., run.tokens, :]
        hidden = share.pow(power) * own @ parts.down.to(own.dtype).pow(power)
        pulled = hidden_pull(parts, run.up, run.gate, hidden, power)
        total[..., run.tokens, :] += pulled.sqrt() if walk.amplitudes else pulled
        moved = scale[run.tokens, expert, None] * (run.output - output[run.tokens])
        reached[..., run.tokens, expert] = (own * moved.pow(power)).sum(-1)
    if not mixture.renormalised:
        unchosen = torch.where(kept > 0, 0, probability).pow(power)
        reached += unchosen * (energy * (-output).pow(power)).sum(-1, keepdim=True)
    routed = reached @ mixture.router.to(energy.dtype).pow(power)
    return (total + routed.sqrt()).square() if walk.amplitudes else total + routed


@dataclass(frozen=True)
class _Run:
    """One expert on the tokens it was given."""

    tokens: Int[Tensor, "token"]
    """Their positions."""
    up: Float[Tensor, "token hidden"]
    gate: Float[Tensor, "token hidden"] | None
    output: Float[Tensor, "token feature"]


def _run(
    parts: MlpParts, read: Float[Tensor, "position feature"], chosen: Int[Tensor, "position top"], expert: int
) -> _Run:
    tokens = (chosen == expert).any(-1).nonzero()[:, 0]
    up, gate = hidden_layer(parts, read[tokens])
    return _Run(tokens, up, gate, affine(hidden_output(parts, up, gate), parts.down, parts.down_bias))
