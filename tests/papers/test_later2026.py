"""Claims of 2025 and 2026 on RoPE, value aggregation, contraction and sinks: numbers that can be worked out."""

import numpy as np
import pytest

from posbias.architecture import Rope
from posbias_papers.later2026.birth import relu_cosine
from posbias_papers.later2026.distractors import ITEMS, accuracy
from posbias_papers.later2026.rope_length import PAIRS, draw_contents, frequencies, normal_failure
from posbias_papers.later2026.sinks import planted

ROPE, AGGREGATION = "rope-2605.15514/", "aggregation-2605.06611/variance"


def test_frequencies_are_those_of_the_encoding():
    distance = np.arange(50)
    logits = Rope(base=500.0, head_dim=2 * PAIRS).logits(distance, 1)[0]
    np.testing.assert_allclose(np.cos(distance[:, None] * frequencies(500.0)).mean(axis=1), logits, atol=1e-12)


def test_the_order_of_two_keys_lasts_if_hardly_a_pair_turns():
    assert draw_contents(np.random.default_rng(0), 1.0).failures(2**10, 1e60)[1].mean() < 0.01


def test_an_unrelated_key_wins_nowhere_by_its_place():
    assert normal_failure(2**10, 1e4, 0.0) == pytest.approx(0.5)


def test_the_closed_form_meets_the_share_at_every_length(verdicts):
    numbers = verdicts[ROPE + "locality"].finding.numbers
    assert numbers["formula_error"] < 0.03
    assert numbers["first_high"] < 0.1
    assert numbers["last_low"] < 0.5 < numbers["last_high"]


def test_a_larger_base_helps_near_keys_up_to_the_context_length(verdicts):
    numbers = verdicts[ROPE + "base"].finding.numbers
    assert numbers["formula_length"] < numbers["formula_square"] < numbers["formula_root"]
    assert numbers["tokens_last"] < 0.01


def test_variance_is_one_over_the_visible_keys(verdicts):
    numbers = verdicts[AGGREGATION].finding.numbers
    assert numbers["last_low"] < 1 / 64 < numbers["last_high"]
    assert numbers["isolated_low"] < 1 < numbers["isolated_high"]
    assert numbers["large_last"] == pytest.approx(numbers["large_formula"], rel=0.1)


def test_without_attention_states_contract_as_the_arc_cosine_kernel_says(verdicts):
    numbers = verdicts["birth-2602.05927/contraction"].finding.numbers
    assert numbers["alone_low"] < numbers["formula"] < numbers["alone_high"]
    assert relu_cosine()[0] == pytest.approx(1 / (2 * np.pi) / 1.5)


def test_equal_distances_have_equal_logits_and_one_ratio_of_weights(verdicts):
    numbers = verdicts["position-2606.06160/leaks"].finding.numbers
    assert numbers["logits"] < 1e-12
    assert numbers["factor"] < 1e-12
    assert numbers["ratio"] == pytest.approx(numbers["even"], rel=0.05)


def test_sinks_have_the_energies_of_their_sums(verdicts):
    assert verdicts["sinks-2504.02732/perturbations"].finding.numbers["formula_error"] < 0.15
    one, two = planted(2, 0.9), planted(2, 0.9, sink=False)
    np.testing.assert_allclose(one, [[1, 0], [0.95, 0.05]])
    np.testing.assert_allclose(two, [[0.1, 0], [0.05, 0.05]])
    numbers = verdicts["sinks-2603.17771/gradients"].finding.numbers
    assert numbers["formula"] == pytest.approx(np.square(planted(1024, 0.9)[:, 0]).sum())
    assert numbers["short"] > 0.99 > 0.3 > numbers["none"]


def test_distractors_move_a_list_down_one_curve(verdicts):
    numbers = verdicts["mamba-2506.15156/distractors"].finding.numbers
    assert numbers["formula_error"] < 0.04
    assert numbers["none_high"] < numbers["largest_low"]
    np.testing.assert_array_less(accuracy(4, 0.1)[:-1], accuracy(4, 0.1)[1:])
    np.testing.assert_allclose(accuracy(0, 0.0), np.full(ITEMS, accuracy(0, 0.0)[0]), rtol=1e-12)
