"""Llama and Qwen 3 written out with dense attention, for one prompt: what methods are checked against."""

import torch


def causal(n):
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)


def logits_of(network, attention, read):
    """Scaled q.k of every head, from the tokens' states as attention reads them, unmasked: [head query key]."""
    n, width = len(read), attention.head_dim
    query, key = attention.q_proj(read).view(n, -1, width), attention.k_proj(read).view(n, -1, width)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    inverse = network.model.rotary_emb.inv_freq.double()
    angles = (torch.arange(n).double()[:, None] * inverse).repeat(1, 2)[:, None]

    def turned(values):
        first, second = values.chunk(2, -1)
        return values * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    key = turned(key).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("qhd,khd->hqk", turned(query), key) * width**-0.5


def run(network, entering, weights_of=None):
    """Logits of all tokens, and every layer's attention [layer head query key].

    `weights_of(layer, attention, read)` gives a layer's weights in place of causal softmax attention.
    """
    states, seen = entering, []
    for layer, block in enumerate(network.model.layers):
        attention, read = block.self_attn, block.input_layernorm(states)
        if weights_of is None:
            weights = (logits_of(network, attention, read) + causal(len(read))).softmax(-1)
        else:
            weights = weights_of(layer, attention, read)
        seen.append(weights)
        value = attention.v_proj(read).view(len(read), -1, attention.head_dim)
        value = value.repeat_interleave(weights.shape[0] // value.shape[1], 1)
        states = states + attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        states = states + block.mlp(block.post_attention_layernorm(states))
    return network.lm_head(network.model.norm(states)), torch.stack(seen)
