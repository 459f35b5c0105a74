"""Attention calibration against dense attention written out, with caches, and what they refuse."""

import numpy as np
import pytest
import torch

import dense_decoder
import posbias as pb
from mitigation.test_methods import GENERATED
from posbias import LocalResponder, UsageError, mitigated
from posbias.evaluation.responders import Request
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.tasks.language import KeyValue
from tiny_families import VOCABULARY, shaken_model

SPANS = [(2, 5), (6, 9), (9, 11)]
TOKENS = 14
DUMMY = [7, 4]
CALIBRATION = f"attention_calibration(temperature=0.01, dummy={DUMMY})"
TURNED = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance where the network takes cosines and sines in float32, the reference in float64."""
FAMILIES = ["llama", "qwen2-window", "qwen3", "gemma3_text", "mistral"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return shaken_model(request.param)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def dense(request):
    """A model without windows, which the dense reference reads."""
    return shaken_model(request.param)


def token_ids(model, count=TOKENS):
    return model.token_tensor([np.random.default_rng(3).integers(3, VOCABULARY, count).tolist()])


def entering(model):
    return model.embed(token_ids(model))[0]


@torch.no_grad()
def logits(model):
    return model.network(token_ids(model)).logits[0]


def relevance(model):
    """Attention to each document less that to a dummy at its place, per token, mean over layers and heads."""

    def per_token(states):
        _, attention = dense_decoder.run(model.network, states)
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
        own = (dense_decoder.logits_of(dense.network, attention, read) + dense_decoder.causal(TOKENS)).softmax(-1)
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

    expected, _ = dense_decoder.run(dense.network, entering(dense), weights)
    with mitigated(dense, CALIBRATION, strength=strength, passages=SPANS):
        torch.testing.assert_close(logits(dense), expected, **TURNED)


@torch.no_grad()
def test_generation_with_a_cache_is_one_pass(model):
    ids = token_ids(model)
    with mitigated(model, CALIBRATION, passages=SPANS):
        generated = model.network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            output_logits=True,
            **GENERATED,
        )
        whole = model.network(generated.sequences).logits[0, TOKENS - 1 : -1]
        cut = model.network(ids[:, :8], use_cache=True)  # between passages
        rest = model.network(ids[:, 8:], past_key_values=cut.past_key_values).logits[0, -1]
    torch.testing.assert_close(torch.cat(generated.logits), whole.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rest, whole[0], rtol=1e-6, atol=1e-6)


WITHOUT_SHARED_CACHE = [
    "attention_calibration(temperature=0.001)",
    "ms_poe(low=1.2, high=4.0, first_layer=0)",
    "pine",
]


@pytest.mark.parametrize("method", WITHOUT_SHARED_CACHE)
def test_a_responder_answers_under_them_with_a_cache(long_llama, method, monkeypatch):
    model = pb.load_model(str(long_llama), dtype="float64")
    examples = list(KeyValue(pairs=3).examples(model.tokenizer, count=1, seed=5))[:2]
    requests = [Request(prompt=one.prompt, answer=one.target, passages=one.passages, max_tokens=4) for one in examples]
    responder = answering_under(MITIGATIONS.parse(method), LocalResponder(model))
    replies = responder.respond(requests, generate=True, score=True)
    assert responder.inner._at_once, "a cache that is cut back and continued proves right"
    plain = LocalResponder(model).respond(requests, generate=True, score=True)
    assert all(one.score.logprob != other.score.logprob for one, other in zip(replies, plain, strict=True))
    monkeypatch.setattr(LocalResponder, "tried", lambda *_: 0)
    uncached = answering_under(MITIGATIONS.parse(method), LocalResponder(model)).respond(requests, score=True)
    for one, other in zip(replies, uncached, strict=True):
        assert one.response.text == other.response.text
        assert one.score.logprob == pytest.approx(other.score.logprob, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "spans", "message"),
    [
        (CALIBRATION, [], "attention_calibration needs the passages"),
        ("attention_calibration", SPANS, "no tokenizer; allowed is a dummy in token ids"),
        ("attention_calibration(temperature=0.0)", SPANS, "temperature must be a finite number > 0"),
        ("attention_calibration(dummy=[99])", SPANS, "dummy must be a list, each a whole number >= 0 and < 50"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(method, spans, message):
    with pytest.raises(UsageError, match=message), mitigated(shaken_model("llama"), method, passages=spans):
        pass


def test_calibration_takes_a_prompt_from_its_first_token():
    model = shaken_model("llama")
    ids = token_ids(model)
    cache = model.network(ids[:, :4], use_cache=True).past_key_values
    with (
        mitigated(model, CALIBRATION, passages=SPANS),
        pytest.raises(UsageError, match="4 tokens were cached without it"),
    ):
        model.network(ids[:, 4:], past_key_values=cache)
