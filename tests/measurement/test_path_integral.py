"""Integrals along a path: cliffs, exactness, how many places."""

import numpy as np
import pytest

from posbias.measurement.kinds import integrate_path

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
