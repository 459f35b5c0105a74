"""How one layer's attention moves influence from queries to keys, in the ways that the rollouts of it differ in.

Each function prepares a layer and returns a function from a block of attention weights to that block of the transition
matrix, queries by keys.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import AttentionBlock, AttentionState, elements_at_once
from posbias.theory.power_rollout.attention_trace import AttentionTraceLayer, ScaledNorm

Transition = Callable[[AttentionBlock], Float[Tensor, "query key"]]


def mean_transition(kept: AttentionTraceLayer, state: AttentionState) -> Transition:
    """A_ij, the mean over heads; rows sum to 1."""
    return lambda block: block.weights.mean((0, 1))


def norm_transition(kept: AttentionTraceLayer, state: AttentionState) -> Transition:
    """||sum_h A_hij f_h(x_j)|| / sum_j' ||sum_h A_hij' f_h(x_j')||, f_h(x) = gain (W_O^h (W_V^h x + b_V^h)).

    `gain` is that of a norm after the branch; what that norm divides by cancels in a row. The output bias belongs to
    no position. Norms of sums over heads come from the heads' inner products at every key: no vector is formed twice.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3, with all heads together; the rows are normalised here.
    """
    gram = _head_products(kept, state)

    def transition(block: AttentionBlock) -> Float[Tensor, "query key"]:
        weights = block.weights.flatten(0, 1)
        squares = torch.zeros_like(weights[0])
        for head, products in enumerate(gram[..., block.keys]):
            # sum_h' A_h' f_h.f_h', each pair of heads once: ten times faster than a product of small matrices per key.
            along = weights[head] * products[head]
            for other in range(head):
                along.addcmul_(weights[other], products[other], value=2)
            squares.addcmul_(along, weights[head])
        lengths = squares.clamp_min(0).sqrt()
        total: Tensor = lengths.sum(-1, keepdim=True)
        return torch.where(total > 0, lengths / total, block.weights.mean((0, 1)))

    return transition


def power_transition(kept: AttentionTraceLayer, state: AttentionState) -> Transition:
    """sum_h g_h^2 A_hij^2 / (sigma_j^2 rho_i^2), g_h^2 = ||W_O^h W_V^h diag(w)||_F^2 / d, rows not normalised.

    sigma^2 and rho^2: what the norms before and after the branch divide by at the key and at the query; w the gain of
    the one before, that of the one after counts into W_O. A LayerNorm's own mean is left in: one channel in d.

    Source: docs/theory, section 5, isotropic form, its value path alone.
    """
    parts, width = kept.layer.parts, kept.layer.parts.output.shape[0]
    like = state.value
    output = _output(kept, like).reshape(width, parts.key_heads, -1, parts.head_dim)
    gram = torch.einsum("wkgc,wkgd->kgcd", output, output)
    value = parts.value.to(like) * _gain(kept.before, like)
    value = value.reshape(parts.key_heads, parts.head_dim, -1)
    gain = torch.einsum("kgcd,kcd->kg", gram, value @ value.transpose(1, 2)) / width
    sent, received = (_divided_by(scaled, state) for scaled in (kept.after, kept.before))

    def transition(block: AttentionBlock) -> Float[Tensor, "query key"]:
        squares = (block.weights.square() * gain[..., None, None]).sum((0, 1))
        return squares / sent[block.queries, None] / received[block.keys]

    return transition


def _head_products(kept: AttentionTraceLayer, state: AttentionState) -> Float[Tensor, "head other position"]:
    """f_h(x_j) . f_h'(x_j) of every position."""
    parts, value = kept.layer.parts, state.value
    output = _output(kept, value).reshape(-1, parts.key_heads, parts.heads // parts.key_heads, parts.head_dim)
    products = [
        torch.einsum("wkgc,kjc->jkgw", output, value[:, rows]).flatten(1, 2)
        for rows in _chunks(value.shape[1], parts.heads * len(output))
    ]
    return torch.cat([vectors @ vectors.transpose(1, 2) for vectors in products]).permute(1, 2, 0).contiguous()


def _chunks(n_positions: int, each: int) -> Iterator[slice]:
    """Runs of positions with at most so many numbers together, `each` per position."""
    rows = max(1, elements_at_once() // each)
    for start in range(0, n_positions, rows):
        yield slice(start, start + rows)


def _output(kept: AttentionTraceLayer, like: Float[Tensor, "*any"]) -> Float[Tensor, "width features"]:
    """The output projection, with the gain of a norm after it."""
    return kept.layer.parts.output.to(like) * _gain(kept.after, like).reshape(-1, 1)


def _gain(scaled: ScaledNorm | None, like: Float[Tensor, "*any"]) -> Float[Tensor, "features"]:
    return torch.ones(1).to(like) if scaled is None else scaled.norm.gain.to(like)


def _divided_by(scaled: ScaledNorm | None, state: AttentionState) -> Float[Tensor, "position"]:
    return torch.ones_like(state.value[0, :, 0]) if scaled is None else scaled.power.to(state.value)
