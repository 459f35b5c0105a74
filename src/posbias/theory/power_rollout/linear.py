"""One linear layer (state space, gated, delta rule, convolution) on a walk, through its own gates on the prompt.

The layer runs again on the input it had, and a row of influence goes back through its recurrence in O(N), whatever the
recurrence is: decays by head or by channel, products of rank-one corrections, gates, convolutions and the norm behind
them. Energies, (J o J)'e, are the mean over random signs r of (J'(r sqrt(e)))^2 (docs/theory, section 5).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.attention import norm_forward
from posbias.theory.power_rollout.local_maps import norm_pull
from posbias.theory.power_rollout.trace import LayerDescription, LayerTrace
from posbias.theory.power_rollout.walk import Energy, Walk, draw_signs

DRAWS, SIGN_SEED = 16, 0
"""Draws of signs for every layer; channels average over them once more. They are part of the
method: their seed is fixed, so that a prompt always gives the same profile."""


def linear_pull(layer: LayerDescription, trace: LayerTrace, energy: Energy, walk: Walk) -> Energy:
    """Pull through one linear branch alone, all of its paths (its factor is the layer's, the identity the caller's).

    Raises:
        UsageError: the walk asks for paths that only attention has, or adds amplitudes.
    """
    if not walk.key or walk.even_heads or walk.amplitudes or walk.signs is not None:
        raise UsageError("a linear layer cannot be walked without keys, with even heads, or by amplitudes or signs")
    assert layer.block.linear is not None, "the caller asks"
    power, module, scale = walk.power, layer.block.linear.module, layer.block.linear.scale
    energy = norm_pull(layer.attention_post_norm, trace.attention_branch, energy, power, even=walk.even_norms)
    read = norm_forward(layer.attention_norm, trace.stream)
    rows = (energy * scale**power).reshape(-1, *energy.shape[-2:])
    with torch.enable_grad():
        entering = read.detach().to(next(module.parameters()).dtype).requires_grad_()
        branch = run_layer(module, entering, trace.call)

        def back(row: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(branch, entering, row.to(branch), retain_graph=True)
            return gradient.to(energy)

        if power == 1:
            pulled = torch.stack([back(row) for row in rows])
        else:
            generator = torch.Generator().manual_seed(SIGN_SEED)
            pulled = torch.zeros_like(rows)
            for _ in range(DRAWS):
                signs = draw_signs(tuple(rows.shape), rows, generator)
                pulled += torch.stack([back(row) for row in signs * rows.sqrt()]).square() / DRAWS
    return norm_pull(layer.attention_norm, trace.stream, pulled.reshape(energy.shape), power, even=walk.even_norms)


def run_layer(module: nn.Module, read: Tensor, call: Mapping[str, Any]) -> Tensor:
    """Output of a linear layer for one prompt that it read, called as it was: [position feature]."""
    output = module(read[None], **call)
    branch: Tensor = output[0] if isinstance(output, tuple) else output
    return branch[0] if branch.ndim == 3 else branch
