"""Influence on any output, against dense Jacobians of whole networks by autograd in float64."""

import copy

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, UsageError, load_model, measure
from posbias.measurement.outputs import OUTPUTS
from posbias.prompts import Prompts

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
MEASURED = ["jacobian(exact=True)", "probability", "logprob", "logit"]
ROUND_OFF = {12: 1e-9, 24: 1e-4}
"""By width: float64 through two layers of GPT-2; Llama's norms compute in float32."""


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def network(request, gpt2_64, llama):
    return gpt2_64 if request.param == "gpt2" else load_model(copy.deepcopy(llama.network).double())


def all_rows(model, tokens):
    """Hidden states and logits of all positions as functions of the embeddings, by the plain transformers call."""
    network = model.network

    def hidden(embeddings):
        return network.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[0]

    def logits(embeddings):
        return network(inputs_embeds=embeddings, use_cache=False).logits[0]

    return hidden, logits, model.embed(torch.as_tensor(tokens)).detach()


def dense(function, embeddings):
    """||d function/dx_j|| over all entries of the function, for every position j."""
    jacobian = torch.autograd.functional.jacobian(function, embeddings)
    return jacobian.reshape(-1, *embeddings.shape[1:]).square().sum(dim=(0, 2)).sqrt().numpy()


def measured(model, output, kinds):
    found = measure(model, Prompts(TOKENS), kinds=kinds, options=MeasureOptions(output=output))
    return {kind: norms[0] for kind, norms in found.per_prompt.items()}


@pytest.mark.parametrize(
    ("output", "rows"),
    [
        ("last", [7]),
        ("at(position=-5)", [3]),
        ("at(position=0)", [0]),
        ("mean(last=3)", [5, 6, 7]),
        ("mean(positions=[-1, 2, 5])", [2, 5, 7]),
        ("mean(last=8)", list(range(8))),
    ],
)
def test_every_output_agrees_with_the_dense_jacobian_of_its_mean(network, output, rows):
    hidden, logits, embeddings = all_rows(network, TOKENS)
    predicted = logits(embeddings)[rows].argmax(dim=-1)
    picked = torch.arange(len(rows))

    def scores(transform):
        return lambda x: transform(logits(x)[rows])[picked, predicted].mean()

    expected = {
        "jacobian": dense(lambda x: hidden(x)[rows].mean(dim=0), embeddings),
        "probability": dense(scores(lambda z: z.softmax(dim=-1)), embeddings),
        "logprob": dense(scores(lambda z: z.log_softmax(dim=-1)), embeddings),
        "logit": dense(scores(lambda z: z), embeddings),
    }
    found = measured(network, output, MEASURED)
    ones = dense(lambda x: hidden(x)[rows].mean(dim=0).sum(), embeddings)
    (summed,) = measured(network, output, "jacobian(probe='ones')").values()
    np.testing.assert_allclose(summed, ones, rtol=ROUND_OFF[network.width])
    for kind, norms in expected.items():
        np.testing.assert_allclose(found[kind], norms, rtol=ROUND_OFF[network.width], err_msg=kind)


def test_a_target_agrees_with_the_dense_gradient_of_its_probability(network):
    target = [7, 2, 11]
    _, logits, embeddings = all_rows(network, np.append(TOKENS, [target[:-1]], axis=1))

    def combined(values):
        return values[[7, 8, 9], target].sum()

    def log_probability(x):
        return combined(logits(x).log_softmax(dim=-1))

    expected = {
        "logprob": dense(log_probability, embeddings),
        "probability": dense(lambda x: log_probability(x).exp(), embeddings),
        "logit": dense(lambda x: combined(logits(x)), embeddings),
    }
    found = measured(network, f"target(tokens={target})", list(expected))
    for kind, norms in expected.items():
        np.testing.assert_allclose(found[kind], norms[:8], rtol=ROUND_OFF[network.width], err_msg=kind)


@pytest.mark.parametrize("output", ["at(position=3)", "at(position=0)", "mean(positions=[1, 3])"])
def test_nothing_after_the_output_has_any_influence(network, output):
    kinds = ["jacobian", "probability", "logprob", "logit", "integrated_gradients(steps=3)", "perturbation"]
    last = {"at(position=0)": 0}.get(output, 3)
    for kind, norms in measured(network, output, kinds).items():
        assert np.all(norms[: last + 1] > 0), kind
        assert np.all(norms[last + 1 :] == 0), kind


def test_every_output_is_spelled_as_it_is_parsed():
    spellings = ("last", "at(position=-5)", "mean(positions=[-8, -1])", "target(text=' Paris')")
    assert {spelling.partition("(")[0] for spelling in spellings} == set(OUTPUTS)
    for spelling in spellings:
        chosen = MeasureOptions(output=spelling)
        assert chosen.output == str(chosen.read_output) == MeasureOptions(output=chosen.read_output).output == spelling


@pytest.mark.parametrize(
    ("output", "kinds", "words"),
    [
        ("first", "logit", "unknown output 'first'; known: at, last, mean, target"),
        ("at", "logit", "argument: 'position'; parameters of at: position"),
        ("mean", "logit", "give either positions"),
        ("mean(last=0)", "logit", "mean: last must be a whole number >= 1"),
        ("mean(last=2, positions=[1])", "logit", "give either positions"),
        ("target", "logit", "target: give either text"),
        ("target(text='a', tokens=[1])", "logit", "target: give either text"),
        ("at(position=8)", "logit", "output position 8 is outside the prompt; allowed: -8 to 7"),
        ("at(position=-9)", "logit", "output position -9 is outside the prompt; allowed: -8 to 7"),
        ("mean(last=9)", "logit", "the prompt has only 8 positions"),
        ("mean(positions=[7, -1])", "logit", "name a position twice"),
        ("target(text=' Paris')", "logit", "a network brings no tokenizer (give posbias.load_model("),
        ("target(tokens=[29])", "logit", "token id 29 is outside the model's vocabulary 0 ... 28"),
        (f"target(tokens={[1] * 30})", "logit", "exceed the model's 32 positions"),
        ("target(tokens=[1])", "jacobian", "jacobian looks at no given tokens; output target(tokens=[1]) takes"),
        ("target(tokens=[1])", "jacobian", "takes the kinds integrated_gradients, logit, logprob, probability"),
        ("target(tokens=[1])", "perturbation", "perturbation looks at no given tokens"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(gpt2_64, output, kinds, words):
    with pytest.raises(UsageError) as caught:
        measured(gpt2_64, output, kinds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_is_tokenised_without_special_tokens(tiny_llama):
    model = load_model(tiny_llama)
    own = model.tokenizer("ab", add_special_tokens=False)["input_ids"]
    by_text, by_tokens = (measured(model, f"target({how})", "logprob") for how in ("text='ab'", f"tokens={own}"))
    np.testing.assert_array_equal(by_text["logprob"], by_tokens["logprob"])
