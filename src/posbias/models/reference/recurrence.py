"""A gated linear layer of a reference transformer, in attention's place: outer products that fade at one rate per head.

    S_t = exp(-s_t) S_(t-1) + w_t k_t v_t',   y_t = S_t' q_t / sqrt(head_dim),
    w_t = softplus(u_t),   u_t = x_t W_step + b_step,   s_t = slope exp(rate) w_t / log 2,

then an RMS norm of each head and the output map: Mamba 2 without its convolution, skip and output gate. The slope is
the architecture's (`recurrent(slopes=...)`): what the state loses in a position where u = 0, before training.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from posbias.models.reference.attention import Rows, Stream, Weights, heads_of, linear, rows_of, shared
from posbias.models.reference.config import ReferenceShape

CHUNK = 64
"""Positions that read each other in one product; what lies further back is read from the state."""
BARE_STEP = math.log(2)
"""softplus(0)."""
LANES = 64
"""A multiple of the values that vector instructions take at once: what is left over is rounded otherwise."""


def linear_branch(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None = None
) -> Rows:
    """A linear layer's addition to the stream, of the wanted rows (None: all)."""
    query, key, value = (
        heads_of(inputs, weights[name], weights.get(f"{name}_bias")) for name in ("query", "key", "value")
    )
    step = elementwise(functional.softplus, linear(inputs, weights["step"], weights["step_bias"])).transpose(2, 3)
    fall = decay_rates(weights, constants)[:, None, :, None] * step
    written = shared(shape, key) * step[..., None]
    read = recurrence(query / math.sqrt(shape.head_dim), written, shared(shape, value), fall).transpose(2, 3)
    read = read if rows is None else rows_of(read, rows, dim=2)
    read = (read * torch.rsqrt(read.square().mean(dim=-1, keepdim=True) + shape.norm_epsilon)).flatten(3)
    return linear(read, weights["output"].flatten(1, 2), weights.get("output_bias")) if shape.output_map else read


def recurrence(
    query: Float[Tensor, "member *stack position feature"],
    key: Float[Tensor, "member *stack position feature"],
    value: Float[Tensor, "member *stack position carried"],
    fall: Float[Tensor, "member *stack position"],
    *,
    chunk: int = CHUNK,
) -> Float[Tensor, "member *stack position carried"]:
    """y_t = S_t' q_t with S_t = exp(-fall_t) S_(t-1) + k_t v_t', S = 0 at first, in O(N chunk) and no step per token.

    Args:
        query: q_t.
        key: k_t.
        value: v_t.
        fall: Nats that the state loses at each position, >= 0.
        chunk: Positions in one product, >= 1; changes no number beyond rounding.
    """
    n_positions, state, rows = query.shape[-2], None, []
    for start in range(0, n_positions, chunk):
        within = slice(start, start + chunk)
        q, k, v = query[..., within, :], key[..., within, :], value[..., within, :]
        lost = fall[..., within].cumsum(-1)
        since = lost[..., :, None] - lost[..., None, :]
        ahead = torch.ones(since.shape[-2:], dtype=torch.bool, device=since.device).triu(1)
        # Hidden before the exponential: what lies ahead would overflow, and its gradient be no number.
        read = (q @ k.transpose(-1, -2) * elementwise(torch.exp, -since.masked_fill(ahead, torch.inf))) @ v
        if state is not None:
            read = read + elementwise(torch.exp, -lost)[..., None] * (q @ state)
        rows.append(read)
        if start + chunk < n_positions:
            left = elementwise(torch.exp, lost - lost[..., -1:])[..., None]
            added = (k * left).transpose(-1, -2) @ v
            if state is not None:
                added = added + elementwise(torch.exp, -lost[..., -1:])[..., None] * state
            state = added
    return torch.cat(rows, dim=-2)


def elementwise(function: Callable[[Tensor], Tensor], values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A function of every value, to the same bits whatever members (axis 0) stand beside each other."""
    flat = values.flatten(1)
    beyond = -flat.shape[1] % LANES
    padded = functional.pad(flat, (0, beyond)) if beyond else flat
    return function(padded)[:, : flat.shape[1]].view(values.shape)


def decay_rates(weights: Weights, constants: Weights) -> Float[Tensor, "member head"]:
    """Nats that each head's state loses per unit of w."""
    return constants["slopes"] * elementwise(torch.exp, weights["rate"]) / BARE_STEP


def bare_decays(weights: Weights, constants: Weights) -> Float[Tensor, "member head"]:
    """Nats that each head's state loses per position at bare gates, u = b_step; the slopes at initialisation."""
    return decay_rates(weights, constants) * elementwise(functional.softplus, weights["step_bias"])
