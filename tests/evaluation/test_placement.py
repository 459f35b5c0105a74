"""Placing: sorting is optimal, noise is not mistaken for a curve, and a gain is only claimed on held-out samples."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from behaviour_runs import measured
from conftest import refused
from posbias import PlaceOptions, place
from posbias.evaluation.finished_page import placement_report
from posbias.evaluation.place import (
    BEST_FIRST,
    LEAVE,
    REFERENCES,
    REORDER,
    SAMPLES_TO_CONFIRM,
    SHUFFLED,
    order_by_curve,
    shrink_to_flat,
    slot_weights,
)

U_SHAPE = np.array([0.9, 0.5, 0.3, 0.45, 0.8])
RELEVANCE = [0.1, 0.5, 0.05, 0.3, 0.05]


def drawn(curve, count, seed=0):
    """Right and wrong answers of `count` samples with a difficulty of their own."""
    generator = np.random.default_rng(seed)
    ease = generator.normal(0, 0.1, (count, 1))
    return (generator.random((count, len(curve))) < curve + ease).astype(np.float64)


def use(curve, count, seed=0):
    return measured(drawn(curve, count, seed))


numbers = some.floats(0, 1, allow_nan=False).map(lambda value: round(value, 3))


@given(some.lists(some.tuples(numbers, numbers), min_size=1, max_size=5))
def test_sorting_passages_and_slots_alike_is_best_among_all_orders(pairs):
    relevance, curve = (np.array(side) for side in zip(*pairs, strict=True))
    falling = np.sort(relevance)[::-1]
    slots = order_by_curve(curve[None], np.ones(1))[0]
    best = max(falling @ curve[list(order)] for order in itertools.permutations(range(len(curve))))
    assert falling @ curve[slots] == pytest.approx(best, abs=1e-12)


def test_slots_are_the_measured_positions_where_all_were_measured_and_lie_between_them_elsewhere():
    np.testing.assert_array_equal(slot_weights(range(4), n_items=4, n_slots=4), np.eye(4))
    curve = np.array([1.0, 0.0, 3.0])
    np.testing.assert_allclose(curve @ slot_weights([0, 2, 4], n_items=5, n_slots=5), [1, 0.5, 0, 1.5, 3])
    np.testing.assert_allclose(curve @ slot_weights([1, 2, 3], n_items=5, n_slots=3), [1, 0, 3])
    np.testing.assert_allclose(slot_weights([0, 3, 9], n_items=10, n_slots=7).sum(axis=0), 1)
    np.testing.assert_allclose(curve @ slot_weights([0, 2, 4], n_items=5, n_slots=1), [1])


def test_f_is_that_of_a_two_way_layout_and_the_kept_share_follows_from_it():
    scores = drawn(U_SHAPE, 30)
    curves, shares = shrink_to_flat(scores, np.ones((1, 30)))
    rest = scores - scores.mean(axis=1, keepdims=True) - scores.mean(axis=0) + scores.mean()
    ratio = 30 * np.square(scores.mean(axis=0) - scores.mean()).sum() / 4 / (np.square(rest).sum() / (29 * 4))
    assert shares[0] == pytest.approx(1 - 1 / ratio)
    expected = scores.mean() + shares[0] * (scores.mean(axis=0) - scores.mean())
    np.testing.assert_allclose(curves[0], expected)


def test_flat_curves_are_called_flat_in_about_95_of_100_cases():
    flat = np.full(6, 0.5)
    kept = [shrink_to_flat(drawn(flat, 20, seed), np.ones((1, 20)))[1][0] for seed in range(400)]
    assert 0.02 < np.mean(np.array(kept) > 0) < 0.09


def test_samples_that_all_agree_need_no_shrinking_and_constant_scores_are_flat():
    agreed = np.tile([1.0, 0.0, 1.0], (7, 1))
    assert shrink_to_flat(agreed, np.ones((1, 7)))[1][0] == 1
    for value in (0.0, 1.0, 0.1):
        curves, shares = shrink_to_flat(np.full((7, 3), value), np.ones((1, 7)))
        assert shares[0] == 0
        np.testing.assert_allclose(curves[0], value)


def test_the_most_relevant_passages_stand_where_the_model_uses_them():
    found = place(RELEVANCE, use(U_SHAPE, 400))
    assert found.decided
    assert found.order == (1, 0, 4, 2, 3) or found.order == (1, 0, 2, 4, 3)
    assert found.advice == REORDER
    assert [gain.over for gain in found.gains] == [*REFERENCES, SHUFFLED]
    by_name = {gain.over: gain for gain in found.gains}
    assert by_name["best_first"].order == (1, 3, 0, 2, 4)
    shares = np.array([0.5, 0.3, 0.1, 0.05, 0.05])
    best = shares @ np.sort(U_SHAPE)[::-1]
    for name in ("best_first", "reversed"):
        true = best - shares[REFERENCES[name](5)] @ U_SHAPE
        gain = by_name[name]
        assert gain.gain.low <= true <= gain.gain.high
        assert gain.raises


def test_noise_leaves_best_first_and_claims_nothing():
    raised, orders = 0, 0
    for seed in range(40):
        found = place(RELEVANCE, use(np.full(5, 0.5), 24, seed))
        raised += any(gain.raises for gain in found.gains)
        orders += found.decided
        if not found.decided:
            assert found.order == (1, 3, 0, 2, 4)
            assert found.gains[0].gain.as_record() == {"value": 0.0, "low": None, "high": None}
    assert orders <= 6
    assert raised <= 2


def true_gain(found, curve, over):
    """Of the order that the curve gives, on the curve that the samples were drawn from."""
    relevance = np.array(RELEVANCE)
    usual = next(gain.order for gain in found.gains if gain.over == over)
    if over == SHUFFLED:
        return float(relevance[list(found.estimated)] @ curve - curve.mean())
    return float((relevance[list(found.estimated)] - relevance[list(usual)]) @ curve)


@pytest.mark.parametrize("count", [8, 24])
@pytest.mark.parametrize("curve", [U_SHAPE, np.array([0.7, 0.5, 0.4, 0.5, 0.65]), np.linspace(0.4, 0.75, 5)])
def test_the_interval_holds_the_true_gain_whether_or_not_the_curve_is_decided(curve, count):
    held, decided = [], []
    for seed in range(30):
        found = place(RELEVANCE, use(curve, count, seed))
        decided.append(found.decided)
        for gain in found.gains:
            true = true_gain(found, curve, gain.over)
            if gain.order == found.estimated:
                assert true == gain.gain.value == 0
                assert not gain.gain.known
            else:
                held.append(gain.gain.low <= true <= gain.gain.high)
    assert np.mean(held) >= 0.9
    assert len(set(decided)) == 2 or count == 24


def test_where_nothing_is_decided_the_gain_of_the_usual_order_is_not_shrunk_to_nothing():
    curve = np.array([0.75, 0.65, 0.55, 0.55, 0.55])
    undecided = [found for seed in range(30) if not (found := place(RELEVANCE, use(curve, 12, seed))).decided]
    assert len(undecided) > 5
    gains = [found.gains[1] for found in undecided]
    assert np.mean([gain.gain.value for gain in gains]) > 0.02
    assert all(gain.gain.known and gain.gain.low < gain.gain.high for gain in gains)


def test_leave_the_order_leaves_the_order_given():
    flat = use(np.full(5, 0.5), 40, seed=1)
    left = place(sorted(RELEVANCE, reverse=True), flat)
    assert (left.advice, left.order) == (LEAVE, (0, 1, 2, 3, 4))
    assert placement_report(left).verdict[0].startswith("Leave the order: none is shown to be better")
    first = place(RELEVANCE, flat)
    assert (first.advice, first.order) == (BEST_FIRST, (1, 3, 0, 2, 4)), "given otherwise, it is not left"
    assert placement_report(first).verdict[0].startswith("Best first, by the scores given: none is shown to be better")
    falling = place(RELEVANCE, use(np.linspace(0.9, 0.2, 5), 60))
    assert (falling.order, falling.advice) == ((1, 3, 0, 2, 4), BEST_FIRST), "best first is the order there is"
    assert {gain.over: gain.raises for gain in falling.gains}[SHUFFLED], "though a shuffled one would be worse"


def test_equal_relevances_gain_nothing_and_keep_their_order():
    found = place([1, 1, 1, 1, 1], use(np.linspace(0.9, 0.1, 5), 60))
    assert found.order == (0, 1, 2, 3, 4)
    for gain in found.gains:
        assert gain.gain.value == pytest.approx(0, abs=1e-12)
        assert not gain.raises


def test_other_numbers_of_passages_are_placed_by_interpolation_and_say_so():
    found = place(np.linspace(1, 0.1, 9).tolist(), use(U_SHAPE, 200))
    assert found.interpolated
    assert sorted(found.order) == list(range(9))
    assert found.order[0] == 0
    assert found.order[-1] == 1
    assert place([2.0], use(U_SHAPE, 50)).order == (0,)
    assert not place(RELEVANCE, use(U_SHAPE, 50)).interpolated


def test_few_samples_never_raise():
    scores = np.tile([0.0, 0.0, 1.0], (SAMPLES_TO_CONFIRM - 1, 1))
    found = place([3, 2, 1], measured(scores))
    assert (found.estimated, found.order) == ((1, 2, 0), (0, 1, 2)), "which is best first"
    assert not any(gain.raises for gain in found.gains)


@pytest.mark.parametrize(
    ("relevance", "complaint"),
    [
        ([], "one of them above 0"),
        ([0.0, 0.0], "one of them above 0"),
        ([0.5, -1.0], "turn logits into probabilities first), one of them above 0; got [-1.0]"),
        ([float("nan")], "relevance must be a list, each a finite number"),
        ([float("inf"), 1], "relevance must be a list, each a finite number"),
        (["high"], "relevance must be a list, each a finite number"),
        ([[1, 2], [3]], "relevance must be a list, each a finite number"),
    ],
)
def test_wrong_relevances_are_refused(relevance, complaint):
    with refused(complaint):
        place(relevance, use(U_SHAPE, 20))


def test_curves_that_cannot_carry_an_order_are_refused():
    skipped = drawn(U_SHAPE, 9)
    skipped[:4, 2] = np.nan
    for scores, got in (
        (drawn(U_SHAPE, 5), "got 5 and 5"),
        (np.ones((9, 1)), "got 1 and 9"),
        (skipped, "got 5 and 5"),
    ):
        with refused(got):
            place(RELEVANCE, measured(scores))


def test_the_record_is_plain_and_the_seed_decides():
    first, again = (place(RELEVANCE, use(U_SHAPE, 30), options=PlaceOptions(seed=3)).record for _ in range(2))
    assert json.dumps(first.scalars) == json.dumps(again.scalars)
