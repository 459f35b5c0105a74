"""Bootstrap intervals cover what they claim, and say so when they cannot."""

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.intervals import bootstrap_mean, bootstrap_statistic
from posbias.profiles import Profile, uniform_profile


def test_the_interval_of_a_mean_covers_the_truth_about_as_often_as_it_claims():
    generator = np.random.default_rng(0)
    covered = [
        not bootstrap_statistic(
            generator.normal(size=(40, 1)), lambda u: float(u.mean()), generator=generator, draws=400
        ).excludes(0.0)
        for _ in range(200)
    ]
    assert 0.88 <= np.mean(covered) <= 0.99


def test_pointwise_and_scalar_bootstrap_agree():
    units = np.random.default_rng(1).normal(size=(30, 2))
    low, high = bootstrap_mean(units, generator=np.random.default_rng(2), draws=4000)
    scalar = bootstrap_statistic(units, lambda u: float(u[:, 0].mean()), generator=np.random.default_rng(3), draws=4000)
    assert low[0] == pytest.approx(scalar.low, abs=0.03)
    assert high[0] == pytest.approx(scalar.high, abs=0.03)


def test_one_unit_decides_nothing():
    interval = bootstrap_statistic(np.ones((1, 3)), lambda u: float(u.mean()), generator=np.random.default_rng(0))
    assert (interval.low, interval.high) == (-np.inf, np.inf)
    assert not interval.excludes(1e9)


def test_profiles_refuse_what_is_not_a_distribution():
    for values in ([0.5, 0.6], [1.5, -0.5], [np.nan, 1.0]):
        with pytest.raises(UsageError):
            Profile(np.array(values))
    with pytest.raises(UsageError, match="cannot normalise"):
        Profile.normalised(np.zeros(3))
    assert uniform_profile(4).influence.sum() == 1
