"""Integrated gradients and perturbation: completeness, definitions by brute force, prefixes reused and not."""

import math

import numpy as np
import pytest
import torch

from posbias import UsageError, measure
from posbias.measurement.kinds import IntegratedGradients, Kind, Perturbation
from posbias.measurement.outputs import Influence, PassOptions, Question
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel, trusted_prefix
from posbias.models.model import Model
from posbias.models.networks import random_network
from posbias.models.weights import cast_weights
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import packed, unpacked
from tiny_families import CONFIGS

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def _measure(model: Model, kind: Kind, output: str = "last", seed: int = 0) -> Influence:
    options = PassOptions(output=output)
    question = Question(model, options.read_output.read(model, TOKENS), (seed, 0))
    return kind.measure(question)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("output", "baseline"),
    [("last", "zero"), ("at(position=4)", "mean"), ("mean(last=3)", "zero"), ("target(tokens=[7, 2, 11])", "mean")],
)
def test_attributions_sum_to_the_change_of_the_score(gpt2_64: Model, output: str, baseline: str) -> None:
    kind = IntegratedGradients(steps=200, tolerance=0, baseline=baseline)
    found = _measure(gpt2_64, kind, output)
    change = found.details["score"] - found.details["baseline_score"]
    assert abs(found.details["completeness_gap"]) < 1e-5 * max(abs(change), found.norms.sum())
    assert abs(change) > 1e-5


def test_the_gap_says_when_steps_are_too_few(gpt2_64: Model) -> None:
    found = [_measure(gpt2_64, IntegratedGradients(steps=n, tolerance=0, baseline="zero")) for n in (1, 8, 64)]
    for gap, less in (("path_error", 5), ("path_gap", 10), ("completeness_gap", 10)):
        gaps = [abs(influence.details[gap]) for influence in found]
        assert gaps[0] > less * gaps[1] > less * less * gaps[2]


def test_attributions_agree_with_a_plain_sum_along_the_path(gpt2_64: Model) -> None:
    """The midpoint rule on many steps, written with autograd alone."""
    end = gpt2_64.embed(torch.as_tensor(TOKENS)[None]).detach()
    token = int(gpt2_64.last(end).logits[0].argmax())
    steps, total = 1000, torch.zeros_like(end)
    for places in torch.split((torch.arange(steps, dtype=end.dtype) + 0.5) / steps, 250):
        inputs = (places[:, None, None] * end).requires_grad_()
        score = gpt2_64.last(inputs).logits.log_softmax(dim=-1)[:, token].sum()
        total += torch.autograd.grad(score, inputs)[0].sum(dim=0) / steps
    expected = (total * end)[0].sum(dim=1).abs().numpy()
    found = _measure(gpt2_64, IntegratedGradients(steps=200, tolerance=0, baseline="zero"))
    np.testing.assert_allclose(found.norms, expected, rtol=1e-4, atol=1e-6)


def _by_hand(model: Model, rows: list[int]) -> np.ndarray:
    """KL(p || p') in nats, averaged over rows and over all other tokens, for every place, by whole forward passes."""
    result = []
    for place in range(8):
        prompts = np.tile(TOKENS, (29, 1))
        prompts[:, place] = np.arange(29)
        with torch.no_grad():
            q = model.outputs(model.embed(torch.as_tensor(prompts)), rows).logits.double().softmax(dim=-1)
        p = q[TOKENS[place]]
        result.append(float((p * (p / q).log()).sum(dim=-1).mean(dim=1).sum()) / 28)
    return np.array(result)


@pytest.mark.parametrize("output", ["last", "at(position=4)", "mean(positions=[2, 5, 7])"])
def test_perturbation_is_the_mean_divergence_over_other_tokens(gpt2_64: Model, output: str) -> None:
    """All 28 other tokens at each place, against the estimate from many draws."""
    rows = {"last": [7], "at(position=4)": [4]}.get(output, [2, 5, 7])
    expected = _by_hand(gpt2_64, rows)
    found = _measure(gpt2_64, Perturbation(draws=100, batch=64), output)
    assert found.standard_errors is not None
    assert np.all(np.abs(found.norms - expected) <= 4.5 * found.standard_errors + 1e-15)
    np.testing.assert_array_equal(found.norms[max(rows) + 1 :], 0)
    assert found.details["prefix_reused"] == 1


@pytest.mark.parametrize("root", [False, True])
def test_batches_and_prefixes_change_nothing(gpt2_64: Model, root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Perturbation(draws=3, root=root)
    first = _measure(gpt2_64, kind)
    for batch in (1, 5, 100):
        other = _measure(gpt2_64, Perturbation(draws=3, root=root, batch=batch))
        np.testing.assert_allclose(other.norms, first.norms, rtol=1e-9)
    monkeypatch.setattr("posbias.measurement.kinds.trusted_prefix", lambda *_: None)
    whole = _measure(gpt2_64, kind)
    assert whole.details["prefix_reused"] == 0
    np.testing.assert_allclose(whole.norms, first.norms, rtol=1e-9)
    np.testing.assert_allclose(whole.standard_errors, first.standard_errors, rtol=1e-9)


def test_the_root_is_the_root(gpt2_64: Model) -> None:
    squared, root = (_measure(gpt2_64, Perturbation(draws=3, root=root)) for root in (False, True))
    np.testing.assert_allclose(root.norms**2, squared.norms, rtol=1e-12)
    np.testing.assert_allclose(2 * root.norms * root.standard_errors, squared.standard_errors, rtol=1e-12)


def test_some_positions_stand_for_their_stretch(gpt2_64: Model) -> None:
    found = _measure(gpt2_64, Perturbation(draws=60, positions=4))
    assert found.norms.shape == (8,)
    assert len(np.unique(found.norms)) == 4
    np.testing.assert_array_equal(found.norms[1:4], found.norms[1])
    np.testing.assert_array_equal(found.norms[4:7], found.norms[4])
    every = _measure(gpt2_64, Perturbation(draws=60))
    for position in (0, 7):
        assert abs(found.norms[position] - every.norms[position]) < 5 * every.standard_errors[position]
    picked = {tuple(_measure(gpt2_64, Perturbation(positions=4), seed=seed).norms[1:3]) for seed in range(5)}
    assert len(picked) == 5
    full = _measure(gpt2_64, Perturbation(positions=8))
    assert len(np.unique(full.norms)) == 8


def test_one_draw_has_an_infinite_standard_error(gpt2_64: Model) -> None:
    found = _measure(gpt2_64, Perturbation(draws=1))
    assert np.all(np.isinf(found.standard_errors))


def test_a_network_that_looks_ahead_is_not_trusted(gpt2_64: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position 2 sees what comes later: a cached beginning would not know of the change."""
    original = HuggingFaceModel.outputs

    def leaking(
        self: HuggingFaceModel, embeddings: torch.Tensor, positions: list[int], *, cache: object = None
    ) -> object:
        embeddings = embeddings.clone()
        embeddings[:, min(2, embeddings.shape[1] - 1)] += embeddings[:, -1]
        return original(self, embeddings, positions, cache=cache)

    monkeypatch.setattr(HuggingFaceModel, "outputs", leaking)
    assert trusted_prefix(gpt2_64, gpt2_64.embed(torch.as_tensor(TOKENS)[None]).detach()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faint_look_ahead_is_found_in_any_precision(dtype: torch.dtype) -> None:
    """A network at birth whose attention goes both ways: what it sees ahead is less than bfloat16 rounds away."""
    config = CONFIGS["gemma"]()
    config.use_bidirectional_attention = True
    both_ways = HuggingFaceModel(cast_weights(random_network(config, seed=0), dtype))
    tokens = torch.arange(3, 43)[None]
    assert trusted_prefix(both_ways, both_ways.embed(tokens).detach()) is None
    config.use_bidirectional_attention = False
    causal = HuggingFaceModel(cast_weights(random_network(config, seed=0), dtype))
    assert trusted_prefix(causal, causal.embed(tokens).detach()) is not None


def test_details_are_kept_per_prompt(llama: Model) -> None:
    prompts = Prompts(np.stack([TOKENS, TOKENS[::-1]]))
    kinds = ["integrated_gradients(steps=4, baseline='mean')", "perturbation(draws=2)", "logit"]
    measured = measure(llama, prompts, kinds=kinds)
    assert set(measured.details) == {"integrated_gradients", "perturbation"}
    details = measured.details["integrated_gradients"]
    names = {"path_error", "path_gap", "attributed", "completeness_gap", "score", "baseline_score", "steps"}
    assert set(details) == names
    for index in range(2):
        alone = measure_prompt(llama, prompts.token_ids[index], kinds=measured.kinds, key=(0, index))
        assert unpacked(packed(alone))["details"] == alone.details
        assert details["completeness_gap"][index] == alone.details["integrated_gradients"]["completeness_gap"]
    assert measured.standard_errors.keys() == {"perturbation"}
    assert math.isfinite(details["score"].sum())


def test_a_vocabulary_of_one_token_cannot_be_perturbed(
    gpt2_64: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt2_64, "vocabulary_size", 1)
    with pytest.raises(UsageError, match="at least 2 tokens"):
        _measure(gpt2_64, Perturbation())


def test_a_path_that_did_not_converge_is_told(llama: Model) -> None:
    prompts = Prompts(np.stack([TOKENS, TOKENS[::-1]]))
    coarse = measure(llama, prompts, kinds="integrated_gradients(steps=1, tolerance=1e-6)")
    assert [text.partition(";")[0] for text in coarse.left_out] == [
        "integrated_gradients: on some prompts the path did not converge"
    ]
    again = measure_prompt(llama, prompts.token_ids[0], kinds=coarse.kinds, key=(0, 0))
    assert unpacked(packed(again))["left_out"] == again.left_out
    for kind in ("integrated_gradients", "integrated_gradients(steps=1, tolerance=0)"):
        assert not measure(llama, prompts, kinds=kind).left_out
