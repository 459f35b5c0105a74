"""A key bias on real architectures: every attention row is the old one times the keys' weights, caches included."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import UsageError, intervened
from posbias.architecture import Architecture, GammaKey
from posbias.designing.initialisation import Initialisation
from posbias.interventions.keys import KeyBiased
from posbias.theory.mean_field import spec_of
from tiny_families import VOCABULARY, shaken_model

POSITIONS = 12
NONE = "no theory of masks and encodings speaks of key_biased"
BIAS = np.random.default_rng(4).normal(size=POSITIONS).round(3).tolist()


def token_ids(model, seed=3):
    return model.token_tensor([np.random.default_rng(seed).integers(3, VOCABULARY, POSITIONS).tolist()])


def first_attention(model):
    with torch.no_grad():
        given = model.network(token_ids(model), output_attentions=True, use_cache=False)
    return given.attentions[0][0]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2-window", "qwen3", "gpt2", "bloom"])
def test_rows_are_the_old_ones_times_the_weights_of_the_keys(name):
    model = shaken_model(name, implementation="eager")
    before = first_attention(model)
    with intervened(model, f"key_biased(biases='key_bias(values={BIAS})')"):
        after = first_attention(model)
    expected = before * torch.exp(torch.tensor(BIAS, dtype=before.dtype))
    torch.testing.assert_close(after, expected / expected.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_blooms_logits_by_position_have_the_bias_with_a_cache_and_padding_too():
    """In all other families it is the method `key_bias` (test_methods)."""
    model = shaken_model("bloom", implementation="eager", dtype=torch.float32)
    wanted = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    both = torch.cat([token_ids(model), token_ids(model, 5)])
    padded, shown = (torch.cat([torch.zeros_like(kept[:, :3]), kept], 1) for kept in (both, torch.ones_like(both)))
    with intervened(model, "key_biased(biases='gamma_key(alpha=3.0)')"), torch.no_grad():
        cached = model.network.generate(both, attention_mask=torch.ones_like(both), **wanted)
        whole = model.network.generate(both, attention_mask=torch.ones_like(both), use_cache=False, **wanted)
        filled = model.network.generate(padded, attention_mask=shown, **wanted)
    assert torch.equal(cached, whole)
    assert torch.equal(filled[:, 3:], cached)


def test_alibi_with_a_key_bias_is_one_key_bias():
    """-slope (i - j) is slope j and what all keys of a query share."""
    model = shaken_model("bloom")
    own, n = model.family.encoding(model.config, 0), 9
    keyed = Initialisation(model).keyed(replace(Architecture.from_model(model), encoding=GammaKey(2.0)))
    attention = keyed.layers[0].attention
    logits = attention.encoding.pair_logits(np.arange(n), np.arange(n), attention.heads)
    distance = np.arange(n)[:, None] - np.arange(n)
    expected = -own.linear_slopes(attention.heads)[:, None, None] * distance + GammaKey(2.0).key_logits(n, 1)[0]
    assert max(np.ptp((logits - expected)[0, query, : query + 1]) for query in range(n)) < 1e-12
    with (
        intervened(model, "key_biased(biases='gamma_key(alpha=2.0)')") as changed,
        pytest.raises(UsageError, match=NONE),
    ):
        spec_of(changed)


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ("alibi", "biases must be key_bias"),
        ([], "biases must be key_bias"),
        (["gamma_key(alpha=2.0)"] * 2, "2 biases given for 3 layers"),
        ("key_bias(values=[0.0, 1.0])", "2 values given for 12 positions"),
    ],
)
def test_wrong_biases_are_refused(biases, message):
    model = shaken_model("llama")
    with pytest.raises(UsageError, match=message), intervened(model, KeyBiased(biases)):
        model.network(token_ids(model))
