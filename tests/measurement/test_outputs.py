"""Influence on any output, against dense Jacobians of whole networks by autograd in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, UsageError, measure
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import OUTPUTS, PassOptions, resolve_output
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
MEASURED = ["jacobian(exact=True)", "probability", "logprob", "logit"]
ROUND_OFF = 1e-9
"""float64 through two layers; Llama's norms compute in float32 and get more."""


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def network(request: pytest.FixtureRequest, gpt2_64: HuggingFaceModel, llama: HuggingFaceModel) -> Model:
    model = gpt2_64 if request.param == "gpt2" else HuggingFaceModel(_doubled(llama))
    assert model.dtype == torch.float64
    return model


def _doubled(model: HuggingFaceModel) -> torch.nn.Module:
    import copy

    return copy.deepcopy(model.network).double()


def _all_rows(
    model: Model, tokens: np.ndarray
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], torch.Tensor]:
    """Hidden states and logits of all positions as functions of the embeddings, by the plain transformers call."""
    network = model.network

    def hidden(embeddings: torch.Tensor) -> torch.Tensor:
        return network.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[0]

    def logits(embeddings: torch.Tensor) -> torch.Tensor:
        return network(inputs_embeds=embeddings, use_cache=False).logits[0]

    return hidden, logits, model.embed(torch.as_tensor(tokens)[None]).detach()


def _dense(function: Callable[[torch.Tensor], torch.Tensor], embeddings: torch.Tensor) -> np.ndarray:
    """||d function/dx_j|| over all entries of the function, for every position j."""
    jacobian = torch.autograd.functional.jacobian(function, embeddings)
    return jacobian.reshape(-1, *embeddings.shape[1:]).square().sum(dim=(0, 2)).sqrt().numpy()


def _measured(model: Model, output: str, kinds: list[str]) -> dict[str, np.ndarray]:
    options = PassOptions(output=output)
    return measure_prompt(model, TOKENS, kinds=resolve_kinds(kinds), key=(0, 0), options=options).norms


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
def test_every_output_agrees_with_the_dense_jacobian_of_its_mean(network: Model, output: str, rows: list[int]) -> None:
    hidden, logits, embeddings = _all_rows(network, TOKENS)
    predicted = logits(embeddings)[rows].argmax(dim=-1)
    picked = torch.arange(len(rows))

    def scores(transform: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: transform(logits(x)[rows])[picked, predicted].mean()

    expected = {
        "jacobian": _dense(lambda x: hidden(x)[rows].mean(dim=0), embeddings),
        "probability": _dense(scores(lambda z: z.softmax(dim=-1)), embeddings),
        "logprob": _dense(scores(lambda z: z.log_softmax(dim=-1)), embeddings),
        "logit": _dense(scores(lambda z: z), embeddings),
    }
    measured = _measured(network, output, MEASURED)
    for kind, norms in expected.items():
        np.testing.assert_allclose(measured[kind], norms, rtol=1e-4 if network.width == 24 else ROUND_OFF, err_msg=kind)


def test_a_target_agrees_with_the_dense_gradient_of_its_probability(network: Model) -> None:
    target = [7, 2, 11]
    inputs = np.concatenate([TOKENS, target[:-1]])
    _, logits, embeddings = _all_rows(network, inputs)
    rows, picked = [7, 8, 9], torch.arange(3)

    def combined(values: torch.Tensor) -> torch.Tensor:
        return values[rows][picked, target].sum()

    def log_probability(x: torch.Tensor) -> torch.Tensor:
        return combined(logits(x).log_softmax(dim=-1))

    expected = {
        "logprob": _dense(log_probability, embeddings),
        "probability": _dense(lambda x: log_probability(x).exp(), embeddings),
        "logit": _dense(lambda x: combined(logits(x)), embeddings),
    }
    measured = _measured(network, f"target(tokens={target})", ["logprob", "probability", "logit"])
    for kind, norms in expected.items():
        assert measured[kind].shape == (8,)
        np.testing.assert_allclose(
            measured[kind], norms[:8], rtol=1e-4 if network.width == 24 else ROUND_OFF, err_msg=kind
        )


@pytest.mark.parametrize("output", ["at(position=3)", "at(position=0)", "mean(positions=[1, 3])"])
def test_nothing_after_the_output_has_any_influence(network: Model, output: str) -> None:
    kinds = ["jacobian", "probability", "logprob", "logit", "integrated_gradients(steps=3)", "perturbation"]
    last = {"at(position=0)": 0}.get(output, 3)
    for kind, norms in _measured(network, output, kinds).items():
        assert np.all(norms[: last + 1] > 0), kind
        assert np.all(norms[last + 1 :] == 0), kind


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_every_output_is_spelled_as_it_is_parsed(name: str) -> None:
    spellings = {
        "last": "last",
        "at": "at(position=-5)",
        "mean": "mean(positions=[-8, -1])",
        "target": "target(text=' Paris')",
    }
    assert str(resolve_output(spellings[name])) == spellings[name]
    assert resolve_output(str(resolve_output(spellings[name]))) == resolve_output(spellings[name])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("first", "unknown output 'first'; known: at, last, mean, target"),
        ("at", "argument: 'position'; parameters of at: position"),
        ("mean", "give either positions"),
        ("mean(last=0)", "mean: last must be a whole number >= 1"),
        ("mean(last=2, positions=[1])", "give either positions"),
        ("target", "target: give either text"),
        ("target(text='a', tokens=[1])", "target: give either text"),
    ],
)
def test_wrong_outputs_are_refused(output: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        PassOptions(output=output)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "kinds", "words"),
    [
        ("at(position=8)", "logit", "output position 8 is outside the prompt; allowed: -8 to 7"),
        ("at(position=-9)", "logit", "output position -9 is outside the prompt; allowed: -8 to 7"),
        ("mean(last=9)", "logit", "the prompt has only 8 positions"),
        ("mean(positions=[7, -1])", "logit", "name a position twice"),
        ("target(text=' Paris')", "logit", "the model has no tokenizer; give target"),
        ("target(tokens=[29])", "logit", "token id 29 is outside the model's vocabulary 0 ... 28"),
        (f"target(tokens={[1] * 30})", "logit", "exceed the model's 32 positions"),
        ("target(tokens=[1])", "jacobian", "jacobian looks at no given tokens; output target(tokens=[1]) takes"),
        ("target(tokens=[1])", "jacobian", "takes the kinds integrated_gradients, logit, logprob, probability"),
        ("target(tokens=[1])", "perturbation", "perturbation looks at no given tokens"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(gpt2_64: Model, output: str, kinds: str, words: str) -> None:
    options = MeasureOptions(output=output)
    with pytest.raises(UsageError) as caught:
        measure(gpt2_64, Prompts(TOKENS[None]), kinds=kinds, options=options)
    assert words in str(caught.value)


def test_a_text_is_tokenised_without_special_tokens(tiny_llama: str) -> None:
    from posbias import load_model

    model = load_model(str(tiny_llama))
    own = model.tokenizer("ab", add_special_tokens=False)["input_ids"]
    by_text, by_tokens = (
        measure_prompt(model, TOKENS, kinds=resolve_kinds("logprob"), key=(0, 0), options=PassOptions(output=output))
        for output in ("target(text='ab')", f"target(tokens={own})")
    )
    np.testing.assert_array_equal(by_text.norms["logprob"], by_tokens.norms["logprob"])
