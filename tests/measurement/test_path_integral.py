"""Integrals along a path: cliffs, exactness, how many places."""

import numpy as np
import pytest

from posbias.measurement.kinds import Evaluate, PathIntegral, integrate_path

SHARES = np.array([0.75, -0.5, 0.75])
"""Of a scalar slope; they sum to 1."""


def _of(score, slope) -> tuple[Evaluate, tuple[float, float]]:
    def evaluate(place: float) -> tuple[float, np.ndarray]:
        return float(score(np.array(place))), slope(np.array(place)) * SHARES

    return evaluate, (float(score(np.array(0.0))), float(score(np.array(1.0))))


def _cliff_slope(a: np.ndarray) -> np.ndarray:
    return 1 + 5000 * (1 - np.tanh(2000 * (a - 0.337)) ** 2)


def _cliff(steps: int, tolerance: float = 1e-6) -> PathIntegral:
    """A sigmoid of width 1/2000 at .337: between any two of 256 evenly spaced places nothing happens."""
    evaluate, ends = _of(lambda a: a + 2.5 * np.tanh(2000 * (a - 0.337)), _cliff_slope)
    return integrate_path(evaluate, ends, steps=steps, tolerance=tolerance)


def test_a_cliff_is_found_where_even_steps_pass_over_it() -> None:
    found = _cliff(256, tolerance=1e-5)
    np.testing.assert_allclose(found.values, 6 * SHARES, rtol=2e-6)
    assert found.gap <= found.error <= 1e-5 * np.abs(found.values).sum()
    assert found.steps < 256
    even = (np.arange(256) + 0.5) / 256
    assert abs(np.mean(_cliff_slope(even)) - 6) > 0.3


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 33])
def test_never_more_places_than_allowed_and_the_gap_is_what_is_missed(steps: int) -> None:
    found = _cliff(steps, tolerance=0)
    assert found.steps <= steps
    assert found.steps >= max(1, steps - 2)
    assert found.error >= found.gap >= abs(found.values.sum() - 6) - 1e-12


def test_one_step_is_exact_for_a_straight_score_and_halving_for_a_quartic_off_the_first_piece() -> None:
    evaluate, ends = _of(lambda a: 3 * a + 1, lambda a: 3 + 0 * a)
    one = integrate_path(evaluate, ends, steps=1, tolerance=1e-12)
    np.testing.assert_allclose(one.values, 3 * SHARES)
    assert one.gap == 0
    assert one.error == pytest.approx(6)  # nothing else was asked that could confirm it
    confirmed = integrate_path(evaluate, ends, steps=9, tolerance=1e-12)
    assert (confirmed.steps, confirmed.error) == (4, 0)
    evaluate, ends = _of(
        lambda a: np.where(a < 0.25, 0, (a - 0.25) ** 4), lambda a: np.where(a < 0.25, 0, 4 * (a - 0.25) ** 3)
    )
    found = integrate_path(evaluate, ends, steps=10, tolerance=1e-12)
    np.testing.assert_allclose(found.values, 0.75**4 * SHARES, rtol=1e-12)


def test_the_slope_at_the_start_is_never_asked_for_and_one_that_is_not_finite_ends_it() -> None:
    evaluate, ends = _of(np.sqrt, lambda a: 0.5 / np.sqrt(a))
    found = integrate_path(evaluate, ends, steps=200, tolerance=1e-3)
    np.testing.assert_allclose(found.values, SHARES, rtol=2e-3)
    evaluate, ends = _of(lambda a: a, lambda a: np.where(a == 0.25, np.nan, 2.0))
    broken = integrate_path(evaluate, ends, steps=200, tolerance=1e-3)
    assert np.all(np.isnan(broken.values))
    assert broken.steps == 4


def test_a_jump_ends_the_search_and_stays_in_the_gap() -> None:
    evaluate, ends = _of(lambda a: a + 2.0 * (a > 0.3), lambda a: 1 + 0 * a)
    found = integrate_path(evaluate, ends, steps=1000, tolerance=1e-3)
    assert found.steps < 60
    assert found.gap == pytest.approx(2, abs=1e-5)
    np.testing.assert_allclose(found.values, SHARES, rtol=1e-9)


def test_shares_that_sum_rightly_by_chance_are_not_taken_for_right() -> None:
    """Half-way the slopes of two inputs sum to the score's change; what each is due lies elsewhere on the path."""

    def evaluate(place: float) -> tuple[float, np.ndarray]:
        return place + 3, np.array([6 * (place - 0.5) ** 2, 1 - 6 * (place - 0.5) ** 2])

    coarse = integrate_path(evaluate, (3.0, 4.0), steps=1, tolerance=0.02)
    np.testing.assert_allclose(coarse.values, [0, 1])
    assert coarse.gap == pytest.approx(0, abs=1e-12)
    assert coarse.error == pytest.approx(1)
    found = integrate_path(evaluate, (3.0, 4.0), steps=100, tolerance=0.02)
    np.testing.assert_allclose(found.values, [0.5, 0.5], atol=0.01)
    assert found.steps < 20
