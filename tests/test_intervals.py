"""Bootstrap intervals cover what they claim, and say so when they cannot."""

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.profiles import Profile, uniform_profile
from posbias.statistics import Interval, bootstrap_mean, expanded_ends, expanded_tail


@pytest.mark.parametrize(
    ("count", "claimed", "missed"),
    [(2, 0.05, 0.5), (4, 0.05, 0.13), (6, 0.05, 0.073), (16, 0.05, 0.055), (16, 0.2, 0.2)],
)
def test_the_interval_of_a_mean_misses_the_truth_as_often_as_it_says(count, claimed, missed):
    """Columns are repetitions. Plain percentiles miss 15 % at 6 units and 8 % at 16 where 5 % is claimed."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(10):
        low, high = bootstrap_mean(generator.normal(size=(count, 800)), generator=generator, confidence=1 - claimed)
        shares.append(np.mean((low > 0) | (high < 0)))
    assert np.mean(shares) == pytest.approx(missed, abs=0.02 if count < 6 else 0.01)


def test_many_units_have_the_interval_of_the_normal_law():
    units = np.random.default_rng(1).normal(size=(400, 3))
    low, high = bootstrap_mean(units, generator=np.random.default_rng(2), draws=4000)
    half_width = 1.96 * units.std(axis=0, ddof=1) / 20
    np.testing.assert_allclose(high - units.mean(axis=0), half_width, rtol=0.06)
    np.testing.assert_allclose(units.mean(axis=0) - low, half_width, rtol=0.06)


def test_one_unit_decides_nothing():
    low, high = bootstrap_mean(np.ones((1, 3)), generator=np.random.default_rng(0))
    assert np.all(low == -np.inf)
    assert np.all(high == np.inf)
    assert not Interval(1.0, low[0], high[0]).excludes(1e9)


def test_the_expanded_tail_tends_to_the_plain_percentile():
    tails = [expanded_tail(n_units) for n_units in (2, 6, 16, 100, 10_000)]
    assert tails == sorted(tails)
    assert tails[1] == pytest.approx(0.0024, abs=1e-4)
    assert tails[2] == pytest.approx(0.014, abs=5e-4)
    assert tails[-1] == pytest.approx(0.025, abs=1e-4)
    assert expanded_tail(10_000, 0.8) == pytest.approx(0.1, abs=1e-4)


def test_ends_of_draws_are_taken_along_the_first_axis():
    drawn = np.random.default_rng(3).normal(size=(500, 2, 3))
    low, high = expanded_ends(drawn, 8)
    one_low, one_high = expanded_ends(drawn[:, 1, 2], 8)
    assert low.shape == high.shape == (2, 3)
    assert (low[1, 2], high[1, 2]) == (one_low, one_high)


def test_an_interval_of_one_unit_or_of_no_coverage_is_refused():
    with pytest.raises(UsageError, match="at least 2 independent units, got 1"):
        expanded_tail(1)
    with pytest.raises(UsageError, match="confidence must lie in"):
        expanded_ends(np.ones(5), 6, 1.0)


def test_profiles_refuse_what_is_not_a_distribution():
    for values in ([0.5, 0.6], [1.5, -0.5], [np.nan, 1.0]):
        with pytest.raises(UsageError):
            Profile(np.array(values))
    with pytest.raises(UsageError, match="cannot normalise"):
        Profile.normalised(np.zeros(3))
    assert uniform_profile(4).influence.sum() == 1
