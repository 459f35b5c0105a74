"""The positional channel against dense attention written out, with caches; and what it refuses."""

import numpy as np
import pytest
import torch

import dense_decoder
from posbias import UsageError, mitigated
from tiny_families import VOCABULARY, shaken_model

TOKENS = 14
SPANS = [(2, 6), (6, 10)]
METHOD = "positional_channel(channel=5, factor=-1.0)"
TURNED = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance where the network takes cosines and sines in float32, the reference in float64."""
FAMILIES = ["llama", "qwen2-window", "qwen3", "gemma3_text", "mistral"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return shaken_model(request.param)


def token_ids(model, seed=3):
    return model.token_tensor([np.random.default_rng(seed).integers(3, VOCABULARY, TOKENS).tolist()])


@torch.no_grad()
def logits(model):
    return model.network(token_ids(model)).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("first", [1, 9, 13])
def test_queries_behind_the_passages_and_the_keys_they_see_have_the_channel_scaled(name, first):
    model = shaken_model(name)

    def weights(layer, attention, read):
        own = dense_decoder.logits_of(model.network, attention, read)
        if layer < 2:  # of three
            scaled = read.clone()
            scaled[:, 5] *= 0.2  # 1 + .4 (-1 - 1)
            own[:, first:] = dense_decoder.logits_of(model.network, attention, scaled)[:, first:]
        return (own + dense_decoder.causal(TOKENS)).softmax(-1)

    expected, _ = dense_decoder.run(model.network, model.embed(token_ids(model))[0], weights)
    with mitigated(model, METHOD, strength=0.4, passages=[(0, first)]):
        found = logits(model)
    torch.testing.assert_close(found, expected, **TURNED)


@torch.no_grad()
def test_from_the_question_on_it_is_a_matter_of_position(model):
    ids = token_ids(model)
    before = logits(model)
    with mitigated(model, METHOD, passages=SPANS):
        whole = logits(model)
        cut = model.network(ids[:, :8], use_cache=True)
        rest = model.network(ids[:, 8:], past_key_values=cut.past_key_values).logits[0]
    torch.testing.assert_close(rest, whole[8:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole[:10], before[:10], rtol=1e-6, atol=1e-6)
    assert (whole - before)[10:].abs().amax(-1).min() > 0


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("llama", METHOD.replace("5", "32"), "channel must lie in 0 ... 31, got 32"),
        ("phi3", METHOD, "phi3 makes queries, keys and values in one map"),
        ("olmo2", METHOD, "olmo2 normalises queries and keys over all heads"),
        ("cohere-norms", METHOD, "the layout of cohere models is not in the table"),
        ("bloom", METHOD, "bloom models do not let attention be replaced"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(name, method, message):
    with pytest.raises(UsageError, match=message), mitigated(shaken_model(name), method, passages=SPANS):
        pass
