"""Attention calibration and the positional channel against dense attention written out; a cache changes nothing."""

import numpy as np
import pytest
import torch

from posbias import UsageError, mitigated
from tiny_families import VOCABULARY, shaken_model

SPANS = [(2, 5), (6, 9), (9, 11)]
TOKENS = 14
DUMMY = [7, 4]
CALIBRATION = f"attention_calibration(temperature=0.01, dummy={DUMMY})"
TURNED = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance where the network takes cosines and sines in float32, the reference in float64."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def dense(request):
    """A model without windows, which the dense reference reads."""
    return shaken_model(request.param)


def token_ids(model):
    return model.token_tensor([np.random.default_rng(3).integers(3, VOCABULARY, TOKENS).tolist()])


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


def decoded(network, entering, weights_of=None):
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


def entering(model):
    return model.embed(token_ids(model))[0]


@torch.no_grad()
def logits(model):
    return model.network(token_ids(model)).logits[0]


def relevance(model):
    """Attention to each document less that to a dummy at its place, per token, mean over layers and heads."""

    def per_token(states):
        _, attention = decoded(model.network, states)
        mean = attention.mean((0, 1))
        return torch.stack([mean[:, begin:end].mean(1) for begin, end in SPANS], 1)

    whole = entering(model)
    dummy = model.embed(model.token_tensor([DUMMY]))[0]
    baseline = []
    for begin, end in SPANS:
        states = whole.clone()
        states[begin:end] = torch.stack([dummy[(place - begin) % 2] for place in range(begin, end)])
        baseline.append(per_token(states))
    return per_token(whole) - torch.stack([found[:, k] for k, found in enumerate(baseline)], 1)


@torch.no_grad()
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_attention_follows_relevance_in_the_upper_layers(dense, strength):
    alpha = (relevance(dense) / 0.01).softmax(-1)
    behind = SPANS[-1][1]

    def weights(layer, attention, read):
        own = (logits_of(dense.network, attention, read) + causal(TOKENS)).softmax(-1)
        if layer < 1:
            return own
        calibrated = own.clone()
        for k, (begin, end) in enumerate(SPANS):
            original = own[:, behind:, begin:end].mean(-1, keepdim=True)
            calibrated[:, behind:, begin:end] *= alpha[None, behind:, k, None] / original
        inside = torch.cat([torch.arange(begin, end) for begin, end in SPANS])
        before, after = (given[:, behind:][..., inside].sum(-1, keepdim=True) for given in (own, calibrated))
        calibrated[:, behind:, inside] *= before / after
        assert calibrated.sum(-1).allclose(torch.ones((), dtype=torch.float64))
        return (1 - strength) * own + strength * calibrated

    expected, _ = decoded(dense.network, entering(dense), weights)
    with mitigated(dense, CALIBRATION, strength=strength, passages=SPANS):
        torch.testing.assert_close(logits(dense), expected, **TURNED)


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 9, 13])
def test_queries_behind_the_passages_and_the_keys_they_see_have_the_channel_scaled(dense, first):
    def weights(layer, attention, read):
        own = logits_of(dense.network, attention, read)
        if layer < 2:  # of three
            scaled = read.clone()
            scaled[:, 5] *= 0.2  # 1 + .4 (-1 - 1)
            own[:, first:] = logits_of(dense.network, attention, scaled)[:, first:]
        return (own + causal(TOKENS)).softmax(-1)

    expected, _ = decoded(dense.network, entering(dense), weights)
    with mitigated(dense, "positional_channel(channel=5, factor=-1.0)", strength=0.4, passages=[(0, first)]):
        torch.testing.assert_close(logits(dense), expected, **TURNED)


def test_calibration_takes_a_prompt_from_its_first_token():
    model = shaken_model("llama")
    ids = token_ids(model)
    cache = model.network(ids[:, :4], use_cache=True).past_key_values
    with (
        mitigated(model, CALIBRATION, passages=SPANS),
        pytest.raises(UsageError, match="4 tokens were cached without it"),
    ):
        model.network(ids[:, 4:], past_key_values=cache)
