"""Moved rotary positions beside a plain recomputation with the wanted distances."""

import importlib
from functools import cache, partial

import numpy as np
import pytest
import torch

from posbias import UsageError, mitigated
from tiny_families import VOCABULARY, shaken_model

POSITIONS = 14
PASSAGES = [(2, 11)]
METHOD = "ms_poe(low=1.2, high=3.0, first_layer=1)"
model_of = cache(partial(shaken_model, implementation="sdpa"))


def token_ids():
    return torch.tensor(np.random.default_rng(3).integers(3, VOCABULARY, (1, POSITIONS)))


def logits_of(model, tokens):
    with torch.no_grad():
        return model.network(input_ids=tokens, use_cache=False).logits


def under(model, method, strength=1.0):
    return mitigated(model, method, strength, passages=PASSAGES)


def theta(config, layer):
    parameters = config.rope_parameters
    if config.model_type == "gemma3_text":
        parameters = parameters[config.layer_types[layer]]
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    return parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def half_complex(values):
    return torch.complex(*values.double().chunk(2, -1))


def products(query, key, distances, frequencies):
    """q.k of unrotated vectors at any distance, [head query key]."""
    turns = torch.polar(torch.ones(()).double(), distances[..., None] * frequencies)
    return torch.einsum("hip,hjp,hijp->hij", half_complex(query), half_complex(key).conj(), turns).real


def distances_of(query, key, hidden, frequencies, scaling, layer):
    """Wanted distances, [head query key], of one prompt."""
    heads, n = query.shape[:2]
    at = torch.arange(n, dtype=torch.float64)
    plain = (at[:, None] - at).expand(heads, n, n)
    if layer < 1:
        return plain
    row = PASSAGES[-1][1] - 1
    scores = products(query, key, plain, frequencies) * scaling + hidden
    weights = scores.softmax(-1)[:, row]
    visible = int((hidden[row] == 0).sum())
    counts = [int((head > 3 / visible).sum()) for head in weights]
    order = sorted(range(heads), key=lambda head: -counts[head])
    ratios = torch.tensor([1.2 + 1.8 * order.index(head) / (heads - 1) for head in range(heads)])
    return plain / ratios[:, None, None].double()


def recomputed(monkeypatch, name, tokens):
    """Logits of the eager network whose attention is written out here, from queries and keys before rotation."""
    model = shaken_model(name, implementation="eager")
    home = importlib.import_module(type(model.network).__module__)

    def attend(module, query, key, value, mask, scaling=None, **_):
        key, value = key.repeat_interleave(2, 1)[0], value.repeat_interleave(2, 1)[0]
        frequencies = theta(model.config, module.layer_idx)
        hidden = mask[0, 0].double()
        distances = distances_of(query[0], key, hidden, frequencies, scaling, module.layer_idx)
        weights = (products(query[0], key, distances, frequencies) * scaling + hidden).softmax(-1)
        return (weights @ value)[None].transpose(1, 2), weights[None]

    with monkeypatch.context() as patch:
        patch.setattr(home, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key))
        patch.setattr(home, "eager_attention_forward", attend)
        return logits_of(model, tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_logits_are_those_of_the_wanted_distances(name, monkeypatch):
    tokens = token_ids()
    expected = recomputed(monkeypatch, name, tokens).log_softmax(-1)
    model = model_of(name)
    with under(model, METHOD):
        found = logits_of(model, tokens).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(logits_of(model, tokens).log_softmax(-1), expected, atol=1e-2)


def test_frequencies_that_follow_the_length_are_refused():
    model = shaken_model("llama")
    model.network.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UsageError, match="rope type dynamic"), under(model, METHOD):
        pass
