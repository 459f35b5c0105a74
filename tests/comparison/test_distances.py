"""Distances between profiles: known values, bounds, zeros, and the flat line beside them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import posbias.comparison.metrics as metrics
from posbias import Profile, compare
from posbias.comparison.metrics import METRICS, STATISTICS, share_of_span


def profile(seed: int, n_positions: int = 40) -> Profile:
    return Profile.normalised(np.random.default_rng(seed).gamma(0.5, size=n_positions))


def point_mass(position: int, n_positions: int) -> Profile:
    values = np.zeros(n_positions)
    values[position] = 1
    return Profile(values)


@given(first=st.integers(0, 10_000), second=st.integers(0, 10_000), n_positions=st.integers(2, 60))
def test_wasserstein_is_the_earth_movers_distance(first: int, second: int, n_positions: int) -> None:
    from scipy.stats import wasserstein_distance

    left, right = profile(first, n_positions), profile(second, n_positions)
    positions = np.linspace(0, 1, left.n_positions)
    expected = wasserstein_distance(positions, positions, left.influence, right.influence)
    assert compare(left, right).wasserstein == pytest.approx(expected, abs=1e-12)


@given(first=st.integers(0, 10_000), second=st.integers(0, 10_000))
def test_distances_are_symmetric_bounded_and_vanish_on_equality(first: int, second: int) -> None:
    left, right = profile(first), profile(second)
    there, back = compare(left, right), compare(right, left)
    assert there.flat == pytest.approx(compare(Profile.uniform(40), right).metrics, nan_ok=True)
    for name in ("wasserstein", "spearman", "total_variation", "symmetric_kl", "log_error"):
        assert there.metrics[name] == pytest.approx(back.metrics[name], abs=1e-12)
    assert there.metrics["minimum_shift"] == -back.metrics["minimum_shift"]
    assert 0 <= there.wasserstein <= there.metrics["total_variation"] + 1e-12 <= 1 + 1e-12
    assert there.metrics["total_variation"] <= math.sqrt(there.metrics["symmetric_kl"] / 2) + 1e-12, "Pinsker"
    same = compare(left, left)
    assert {value for name, value in same.metrics.items() if name != "spearman"} == {0}
    assert same.metrics["spearman"] == pytest.approx(1)
    apart = compare(point_mass(0, 5), point_mass(4, 5)).metrics
    assert (apart["wasserstein"], apart["total_variation"]) == (1, 1)


def test_spearman_agrees_with_scipy_and_is_undefined_for_a_flat_line() -> None:
    from scipy.stats import spearmanr

    left, right = profile(1), profile(2)
    comparison = compare(left, right)
    assert comparison.metrics["spearman"] == pytest.approx(spearmanr(left.influence, right.influence).statistic)
    assert math.isnan(comparison.flat["spearman"])
    assert comparison.record.scalars["subjects"]["comparison"]["comparisons"][0]["flat"]["spearman"] is None


def test_symmetric_kl_agrees_with_the_definition() -> None:
    left, right = profile(3).influence, profile(4).influence
    expected = (np.sum(left * np.log(left / right)) + np.sum(right * np.log(right / left))) / 2
    assert float(metrics.symmetric_kl(left, right)) == pytest.approx(expected)


def test_zeros_are_handled_explicitly() -> None:
    half = Profile(np.array([0.5, 0.5, 0.0, 0.0]))
    other = Profile(np.array([0.25, 0.75, 0.0, 0.0]))
    assert math.isfinite(compare(half, other).metrics["symmetric_kl"]), "zeros in the same places agree"
    assert compare(half, other).metrics["log_error"] == pytest.approx(np.median([math.log(2), math.log(1.5), 0, 0]))
    shifted = compare(half, Profile(np.array([0.0, 0.5, 0.5, 0.0])))
    assert shifted.metrics["symmetric_kl"] == math.inf
    (stored,) = shifted.record.scalars["subjects"]["comparison"]["comparisons"]
    assert stored["metrics"]["symmetric_kl"] is None
    json.dumps(stored, allow_nan=False)


def test_log_error_is_a_relative_error() -> None:
    flat = np.full(11, 1.0)
    tripled = np.where(np.arange(11) % 2 == 0, 3.0, 1.0)
    assert float(metrics.log_error(tripled, flat)) == pytest.approx(math.log(3))


def test_minimum_shift_counts_positions_between_interior_minima() -> None:
    early = Profile.normalised(np.abs(np.arange(21.0) - 5) + 1)
    late = Profile.normalised(np.abs(np.arange(21.0) - 12) + 1)
    assert compare(early, late).metrics["minimum_shift"] == -7
    assert math.isnan(compare(early, late).flat["minimum_shift"]), "a flat line has no minimum"


def test_metrics_and_statistics_broadcast_over_leading_axes() -> None:
    rows, one = np.stack([profile(seed).influence for seed in range(4)]), profile(9).influence
    for metric in (METRICS[name] for name in METRICS):
        np.testing.assert_allclose(metric(rows, one[None]), [float(metric(row, one)) for row in rows], rtol=1e-12)
    for statistic in (STATISTICS[name] for name in STATISTICS):
        np.testing.assert_allclose(statistic(rows), [float(statistic(row)) for row in rows], rtol=1e-12)


@given(n_positions=st.integers(1, 500))
def test_a_flat_profile_has_a_tenth_in_every_tenth(n_positions: int) -> None:
    flat = Profile.uniform(n_positions).influence
    for name in ("first_tenth", "middle_tenth", "last_tenth"):
        assert float(STATISTICS[name](flat)) == pytest.approx(0.1, abs=1e-12)
    if n_positions >= 20:
        assert float(STATISTICS["last_over_middle"](flat)) == pytest.approx(0, abs=1e-12)
    if n_positions >= 10:
        assert float(STATISTICS["interior_recency"](flat)) == pytest.approx(0.1 - 1 / n_positions, abs=1e-12)


@given(seed=st.integers(0, 1000), n_positions=st.integers(1, 77))
def test_ten_tenths_make_the_whole(seed: int, n_positions: int) -> None:
    values = profile(seed, n_positions).influence
    total = sum(float(share_of_span(values, k / 10, (k + 1) / 10)) for k in range(10))
    assert total == pytest.approx(1)


def test_tenths_cut_through_cells() -> None:
    values = np.arange(1.0, 16.0) / 120  # N = 15: the first tenth is position 0 and half of position 1
    assert float(STATISTICS["first_tenth"](values)) == pytest.approx((1 + 0.5 * 2) / 120)
    assert float(STATISTICS["last_tenth"](values)) == pytest.approx((15 + 0.5 * 14) / 120)
    assert float(STATISTICS["interior_recency"](values)) == pytest.approx(0.5 * 14 / 120)


def test_a_spike_on_the_last_position_is_no_interior_recency() -> None:
    values = Profile.normalised(np.concatenate([np.linspace(2, 1, 99), [50.0]])).influence
    assert float(STATISTICS["last_tenth"](values)) > 0.2
    assert float(STATISTICS["interior_recency"](values)) < 0.09
    assert float(STATISTICS["last_over_middle"](values)) < 0


def test_the_minimum_is_interior_and_a_dead_zone_counts_as_its_middle() -> None:
    minimum = STATISTICS["minimum_position"]
    assert float(minimum(np.array([0.0, 0.5, 0.1, 0.4, 0.0]))) == 2
    assert float(minimum(np.array([0.4, 0.0, 0.0, 0.0, 0.2, 0.4]))) == 2
    assert float(minimum(np.array([0.4, 0.0, 0.0, 0.2, 0.4]))) == 1
    assert math.isnan(float(minimum(np.array([0.4, 0.1, 0.1, 0.4]))))
    assert math.isnan(float(minimum(np.array([0.5, 0.5]))))
