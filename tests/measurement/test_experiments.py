"""Integrated gradients and perturbation: completeness, definitions by brute force, cliffs along a path."""

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, UsageError, measure
from posbias.measurement.kinds import integrate_path
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.networks import random_network
from posbias.models.weights import cast_weights
from posbias.prompts import Prompts
from tiny_families import CONFIGS

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
PROMPTS = Prompts(np.stack([TOKENS, TOKENS[::-1]]))


def measured(model, kind, output="last", seed=0):
    """Raw norms of the first prompt, their standard errors and details."""
    found = measure(model, Prompts(TOKENS[None]), kinds=kind, seed=seed, options=MeasureOptions(output=output))
    (name,) = found.per_prompt
    details = {detail: values[0] for detail, values in found.details.get(name, {}).items()}
    return found.per_prompt[name][0], found.standard_errors.get(name, [None])[0], details


@pytest.mark.parametrize("output", ["last", "at(position=4)", "mean(last=3)", "target(tokens=[7, 2, 11])"])
def test_attributions_sum_to_the_change_of_the_score(gpt2_64, output):
    norms, _, details = measured(gpt2_64, "integrated_gradients(steps=200, tolerance=0)", output)
    change = details["score"] - details["baseline_score"]
    assert abs(details["completeness_gap"]) < 1e-5 * max(abs(change), norms.sum())
    assert abs(change) > 1e-5


def test_the_gap_says_when_steps_are_too_few(gpt2_64):
    kinds = [f"integrated_gradients(steps={n}, tolerance=0)" for n in (1, 8, 64)]
    found = [measured(gpt2_64, kind)[2] for kind in kinds]
    for gap, less in (("path_error", 5), ("completeness_gap", 10)):
        gaps = [abs(details[gap]) for details in found]
        assert gaps[0] > less * gaps[1] > less * less * gaps[2]


def test_attributions_agree_with_a_plain_sum_along_the_path(gpt2_64):
    """The midpoint rule on many steps, written with autograd alone."""
    end = gpt2_64.embed(torch.as_tensor(TOKENS)[None]).detach()
    start = gpt2_64.embed(torch.arange(gpt2_64.vocabulary_size)[None]).detach().mean(dim=1)
    token = int(gpt2_64.last(end).logits[0].argmax())
    steps, total = 1000, torch.zeros_like(end)
    for places in torch.split((torch.arange(steps, dtype=end.dtype) + 0.5) / steps, 250):
        inputs = (start + places[:, None, None] * (end - start)).requires_grad_()
        score = gpt2_64.last(inputs).logits.log_softmax(dim=-1)[:, token].sum()
        total += torch.autograd.grad(score, inputs)[0].sum(dim=0) / steps
    expected = (total * (end - start))[0].sum(dim=1).abs().numpy()
    norms, _, _ = measured(gpt2_64, "integrated_gradients(steps=200, tolerance=0)")
    np.testing.assert_allclose(norms, expected, rtol=1e-4, atol=1e-6)


def by_hand(model, rows):
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


@pytest.mark.parametrize(
    ("output", "rows"), [("last", [7]), ("at(position=4)", [4]), ("mean(positions=[2, 5, 7])", [2, 5, 7])]
)
def test_perturbation_is_the_mean_divergence_over_other_tokens(gpt2_64, output, rows):
    """All 28 other tokens at each place, against the estimate from many draws."""
    norms, errors, _ = measured(gpt2_64, "perturbation(draws=100)", output)
    assert np.all(np.abs(norms - by_hand(gpt2_64, rows)) <= 4.5 * errors + 1e-15)
    np.testing.assert_array_equal(norms[max(rows) + 1 :], 0)


def test_the_root_is_the_root_and_one_draw_has_an_infinite_error(gpt2_64):
    norms, errors, _ = measured(gpt2_64, "perturbation(draws=3, root=True)")
    whole, whole_errors, _ = measured(gpt2_64, "perturbation(draws=3)")
    np.testing.assert_allclose(whole, norms**2, rtol=1e-9)
    np.testing.assert_allclose(whole_errors, 2 * norms * errors, rtol=1e-9)
    assert np.all(np.isinf(measured(gpt2_64, "perturbation(draws=1)")[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("both_ways", [True, False])
def test_a_faint_look_ahead_is_found_in_any_precision(dtype, both_ways):
    """A network at birth whose attention goes both ways: what it sees ahead is less than bfloat16 rounds away."""
    config = CONFIGS["gemma"]()
    config.use_bidirectional_attention = both_ways
    model = HuggingFaceModel(cast_weights(random_network(config, seed=0), dtype))
    assert looks_ahead(model, model.embed(torch.arange(3, 43)[None])) == both_ways


def test_details_are_kept_per_prompt(llama):
    kinds = ["integrated_gradients(steps=4)", "perturbation(draws=2)", "logit"]
    found = measure(llama, PROMPTS, kinds=kinds)
    assert set(found.details) == {"integrated_gradients"}
    details = found.details["integrated_gradients"]
    names = {"path_error", "attributed", "completeness_gap", "score", "baseline_score", "steps"}
    assert set(details) == names
    assert np.isfinite(details["score"]).all()
    assert details["completeness_gap"][0] == measured(llama, kinds[0])[2]["completeness_gap"]
    assert found.standard_errors.keys() == {"perturbation"}


def test_a_vocabulary_of_one_token_cannot_be_perturbed(gpt2_64, monkeypatch):
    monkeypatch.setattr(gpt2_64, "vocabulary_size", 1)
    with pytest.raises(UsageError, match="at least 2 tokens"):
        measure(gpt2_64, Prompts(0 * TOKENS[None]), kinds="perturbation")


def test_a_path_that_did_not_converge_is_told(llama):
    coarse = measure(llama, PROMPTS, kinds="integrated_gradients(steps=1, tolerance=1e-6)")
    assert [text.partition(";")[0] for text in coarse.left_out] == [
        "integrated_gradients: on some prompts the path did not converge"
    ]
    for kind in ("integrated_gradients", "integrated_gradients(steps=1, tolerance=0)"):
        assert not measure(llama, PROMPTS, kinds=kind).left_out


SHARES = np.array([0.75, -0.5, 0.75])
"""Of a scalar slope; they sum to 1."""


def integrated(score, slope, **settings):
    def evaluate(place):
        return float(score(np.array(place))), slope(np.array(place)) * SHARES

    return integrate_path(evaluate, (float(score(np.array(0.0))), float(score(np.array(1.0)))), **settings)


def cliff(**settings):
    """A sigmoid of width 1/2000 at .337: between any two of 256 evenly spaced places nothing happens."""
    slope = lambda a: 1 + 5000 * (1 - np.tanh(2000 * (a - 0.337)) ** 2)  # noqa: E731
    assert abs(np.mean(slope((np.arange(256) + 0.5) / 256)) - 6) > 0.3
    return integrated(lambda a: a + 2.5 * np.tanh(2000 * (a - 0.337)), slope, **settings)


def test_a_cliff_is_found_where_even_steps_pass_over_it():
    values, error, steps = cliff(steps=256, tolerance=1e-5)
    np.testing.assert_allclose(values, 6 * SHARES, rtol=2e-6)
    assert error <= 1e-5 * np.abs(values).sum()
    assert steps < 256


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 33])
def test_never_more_places_than_allowed_and_the_error_holds_what_is_missed(steps):
    values, error, used = cliff(steps=steps, tolerance=0)
    assert max(1, steps - 2) <= used <= steps
    assert error >= abs(values.sum() - 6) - 1e-12


def test_one_step_is_exact_for_a_straight_score_and_halving_for_a_quartic_off_the_first_piece():
    one, confirmed = (
        integrated(lambda a: 3 * a + 1, lambda a: 3 + 0 * a, steps=steps, tolerance=1e-12) for steps in (1, 9)
    )
    np.testing.assert_allclose(one[0], 3 * SHARES)
    assert one[1] == pytest.approx(6), "nothing else was asked that could confirm it"
    assert confirmed[1:] == (0, 4)
    beyond = lambda a: np.maximum(a - 0.25, 0)  # noqa: E731
    values, _, _ = integrated(lambda a: beyond(a) ** 4, lambda a: 4 * beyond(a) ** 3, steps=10, tolerance=1e-12)
    np.testing.assert_allclose(values, 0.75**4 * SHARES, rtol=1e-12)


def test_the_slope_at_the_start_is_never_asked_for_and_one_that_is_not_finite_ends_it():
    values, _, _ = integrated(np.sqrt, lambda a: 0.5 / np.sqrt(a), steps=200, tolerance=1e-3)
    np.testing.assert_allclose(values, SHARES, rtol=2e-3)
    values, _, steps = integrated(lambda a: a, lambda a: np.where(a == 0.25, np.nan, 2.0), steps=200, tolerance=1e-3)
    assert np.all(np.isnan(values))
    assert steps == 4


def test_a_jump_ends_the_search_and_stays_in_the_error():
    values, error, steps = integrated(lambda a: a + 2.0 * (a > 0.3), lambda a: 1 + 0 * a, steps=1000, tolerance=1e-3)
    assert steps < 60
    assert error == pytest.approx(2, abs=1e-5)
    np.testing.assert_allclose(values, SHARES, rtol=1e-9)


def test_shares_that_sum_rightly_by_chance_are_not_taken_for_right():
    """Half-way the slopes of two inputs sum to the score's change; what each is due lies elsewhere on the path."""

    def evaluate(place):
        return place + 3, np.array([6 * (place - 0.5) ** 2, 1 - 6 * (place - 0.5) ** 2])

    coarse, found = (integrate_path(evaluate, (3.0, 4.0), steps=steps, tolerance=0.02) for steps in (1, 100))
    np.testing.assert_allclose(coarse[0], [0, 1])
    assert coarse[1] == pytest.approx(1)
    np.testing.assert_allclose(found[0], [0.5, 0.5], atol=0.01)
    assert found[2] < 20
