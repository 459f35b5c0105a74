"""All that runs on a device without float64, as `mps` is: the same numbers as on the CPU, or a refusal in a line."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posbias as pb
from posbias import FitOptions, UsageError, mitigated
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import LocalResponder, Request
from posbias.measurement.kinds import KINDS
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation
from posbias.models.devices import check_precision
from posbias.models.hugging_face import Origin
from posbias.prompts import Prompts
from posbias.tasks.language import KeyValue
from posbias.theory.power_rollout import attention_rollout_prompt, attention_rollouts
from posbias.training.trainer import Stack
from single_device import on_single
from tiny_families import SCALES, VOCABULARY, shaken_model, spelled
from training_cases import copier, retriever

PROMPTS = Prompts(np.random.default_rng(3).integers(3, VOCABULARY, (2, 12)))
SHORT = Prompts(np.arange(12).reshape(2, 6))
SPANS = [(2, 5), (6, 9), (9, 11)]


def models(family="llama"):
    """One on the CPU, and an equal one for the device."""
    model = shaken_model(family, dtype=torch.float32)
    model.origin = Origin(family, init_seed=0)
    return model, copy.deepcopy(model)


def narrow_models():
    """The same of one layer, for what takes many passes."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes))
    return [pb.load_model(one) for one in (network, copy.deepcopy(network))]


@pytest.mark.parametrize("kind", list(KINDS))
def test_influence(kind):
    model, far = narrow_models()
    expected = pb.measure(model, SHORT, kinds=[kind])
    with on_single(far):
        found = pb.measure(far, SHORT, kinds=[kind])
    np.testing.assert_allclose(found.profiles[kind].influence, expected.profiles[kind].influence, rtol=1e-5)
    np.testing.assert_allclose(found.mixing, expected.mixing, rtol=1e-6)


THEORIES = {
    "power rollout": lambda model: pb.predict(model, theory="power_rollout", prompts=PROMPTS).profile.influence,
    "rollout of attention": lambda model: attention_rollout_prompt(model, PROMPTS.token_ids[0], 0.5),
    "all rollouts": lambda model: np.stack(list(attention_rollouts(model, PROMPTS)[0].values())),
    "mean field": lambda model: pb.predict(model, theory="mean_field", prompts=PROMPTS).profile.influence,
}


@pytest.mark.parametrize("name", list(THEORIES))
def test_theories(name):
    model, far = models()
    expected = THEORIES[name](model)
    with on_single(far):
        found = THEORIES[name](far)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bloom"])
def test_attention(family):
    model, far = models(family)
    expected = pb.attention(model, PROMPTS)
    with on_single(far):
        found = pb.attention(far, PROMPTS)
    for name in ("distance", "entropy"):
        np.testing.assert_allclose(getattr(found, name).by_head, getattr(expected, name).by_head, rtol=1e-6)
    np.testing.assert_allclose(found.content.off_diagonal.by_head, expected.content.off_diagonal.by_head, rtol=1e-5)
    np.testing.assert_allclose(found.kernels, expected.kernels, rtol=1e-5, atol=1e-9)


FROM_QUESTION = f"key_bias(biases='gamma_key(alpha=3.0)', scales={SCALES}, from_question=True)"


@pytest.mark.parametrize("name", [name for name in MITIGATIONS if issubclass(MITIGATIONS[name], Mitigation)])
def test_methods_inside_the_model(name):
    def answered(model):
        method = FROM_QUESTION if name == "key_bias" else spelled(name, model)
        tokens = model.token_tensor(PROMPTS.token_ids[:1].tolist())
        with mitigated(model, method, passages=SPANS), torch.no_grad():
            return model.network(tokens, use_cache=False).logits.cpu().numpy()

    model, far = models()
    expected = answered(model)
    with on_single(far):
        found = answered(far)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["key_bias", "context_bias", "adapter(rank=2)"])
def test_fits(name, long_llama):
    model, far = (pb.load_model(str(long_llama), dtype="float32", device="cpu") for _ in range(2))
    examples = list(KeyValue(pairs=2).examples(model.tokenizer, count=4, seed=5))
    text = list(pb.load_prompts("default", model, n_positions=16, count=2, seed=0).token_ids)
    options = FitOptions(steps=2, batch=2, penalty=0.1, rate=0.1)
    expected = pb.fit(name, model, examples, text=text, options=options)
    with on_single(far):
        found = pb.fit(name, far, examples, text=text, options=options)
    np.testing.assert_allclose(found.how["answer_loss"], expected.how["answer_loss"], rtol=1e-5)
    assert expected.how["answer_loss"][0] != expected.how["answer_loss"][1]


@pytest.mark.parametrize("member", [copier, retriever])
def test_training(member):
    def trained(device):
        stack = Stack([member(0), member(1, seed=1) if member is copier else member(1)], device=device)
        losses = stack.steps(0, 3, batch=8).cpu()
        return {"losses": losses.numpy(), **stack.evaluate(10)}

    expected = trained(torch.device("cpu"))
    with on_single() as device:
        found = trained(device)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_weights_in_float64_are_refused_in_a_line():
    with on_single() as device:
        check_precision(device, torch.float32)
        with pytest.raises(UsageError, match=r"^meta has no float64; allowed there: float32, bfloat16, float16, or"):
            check_precision(device, torch.float64)
    check_precision(torch.device("cpu"), torch.float64)


def test_answers_and_scores(long_llama):
    model, far = (pb.load_model(str(long_llama), dtype="float32", device="cpu") for _ in range(2))
    requests = [Request("a" * length, answer="bc", max_tokens=4) for length in (9, 14, 20)]

    def replies(model):
        found = LocalResponder(model, LocalOptions(batch=3)).respond(requests, score=True)
        return [reply.response.text for reply in found], [reply.score.logprob for reply in found]

    texts, scores = replies(model)
    with on_single(far):
        found = replies(far)
    assert found[0] == texts
    np.testing.assert_allclose(found[1], scores, rtol=1e-5)


RUNS = {
    "audit": lambda model: pb.audit(model, prompts=SHORT, options=pb.AuditOptions(initialisations=1)),
    "decompose": lambda model: pb.decompose(
        model, SHORT, options=pb.DecomposeOptions(interventions=["no_rope"], kinds=["logit"])
    ),
}


@pytest.mark.parametrize("verb", ["audit", pytest.param("decompose", marks=pytest.mark.slow)])
def test_verbs(verb):
    model, far = narrow_models()
    expected = RUNS[verb](model).record.arrays
    with on_single(far):
        found = RUNS[verb](far).record.arrays
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-7, err_msg=name)
