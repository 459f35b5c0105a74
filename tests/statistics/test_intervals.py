"""What an interval says, and what is not said where nothing is known; percentile intervals of what jumps."""

import math

import numpy as np
import pytest

from posbias import Profile, UsageError
from posbias.statistics import Interval, draw_weights, expanded_tail, percentile_interval, weighted_median


def test_an_interval_spells_its_ends_in_the_unit_of_its_value():
    assert str(Interval(0.3, 0.1, 0.5)) == "0.300 [0.100, 0.500]"
    assert Interval(0.31, 0.28, 0.35).text(".0f", scale=100, unit=" %") == "31 % [28, 35]"
    assert Interval(-1e-9, -0.2, 1e-9).text("+.2f") == "+0.00 [-0.20, +0.00]"
    assert Interval(0.3, 0.1, math.inf).text() == "0.300 [0.100, inf]"


@pytest.mark.parametrize("ends", [(-math.inf, math.inf), (0.3, 0.3)])
def test_an_interval_that_says_nothing_or_has_no_width_is_not_shown(ends):
    interval = Interval(0.3, *ends)
    assert str(interval) == "0.300"
    assert interval.as_record() == {"value": 0.3, "low": None, "high": None}
    assert Interval(math.nan, *ends).text() == "–"


def test_a_record_gives_the_interval_back():
    for interval in (Interval(0.3, 0.1, 0.5), Interval(0.3, 0.1, math.inf), Interval(0.3, -math.inf, math.inf)):
        assert Interval.of_record(interval.as_record()) == interval


def test_one_unit_decides_nothing():
    assert len(draw_weights(1, generator=np.random.default_rng(0))) == 0
    assert not percentile_interval(1.0, np.empty(0), 1).excludes(1e9)


def test_the_expanded_tail_tends_to_the_plain_percentile():
    tails = [expanded_tail(n_units) for n_units in (2, 6, 16, 100, 10_000)]
    assert tails == sorted(tails)
    assert tails[1] == pytest.approx(0.0024, abs=1e-4)
    assert tails[2] == pytest.approx(0.014, abs=5e-4)
    assert tails[-1] == pytest.approx(0.025, abs=1e-4)


def test_an_interval_of_one_unit_is_refused():
    with pytest.raises(UsageError, match="at least 2 independent units, got 1"):
        expanded_tail(1)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_weighted_median_is_that_of_the_repeated_values(count: int) -> None:
    """Exact halves included: an even number of repeated values has its median midway between two of them."""
    random = np.random.default_rng(count)
    values = random.normal(size=count)
    counts = random.multinomial(count, np.full(count, 1 / count), size=50)
    expected = [np.median(np.repeat(values, row)) for row in counts]
    np.testing.assert_allclose(weighted_median(values, counts / count), expected, rtol=1e-12)


def test_draws_of_the_median_are_centred_on_it() -> None:
    """Prompts symmetric around a median of 0: over repetitions, interval midpoints are too (lower medians: -.16)."""
    middles = []
    for seed in range(400):
        random = np.random.default_rng(seed)
        values = random.normal(size=8)
        middles.append(np.mean(weighted_median(values, draw_weights(8, generator=random, draws=200))))
    assert np.mean(middles) == pytest.approx(0, abs=0.05)


def test_infinite_draws_count_and_undefined_ones_do_not() -> None:
    drawn = np.linspace(0, 1, 200)
    assert percentile_interval(0.5, np.append(drawn, [np.nan] * 50), 16) == percentile_interval(0.5, drawn, 16)
    upper = percentile_interval(0.5, np.append(drawn, [np.inf] * 20), 16)
    assert upper.high == math.inf
    assert 0 <= upper.low < 0.1
    lower = percentile_interval(0.5, np.append(drawn, [-np.inf] * 20), 16)
    assert lower.low == -math.inf
    assert 0.9 < lower.high <= 1
    everywhere = percentile_interval(math.inf, np.full(200, np.inf), 16)
    assert (everywhere.low, everywhere.high) == (math.inf, math.inf)
    assert percentile_interval(0.5, np.append(drawn, np.inf), 16).high <= 1, "one in 200 lies beyond the end"


def test_profiles_refuse_what_is_not_a_distribution():
    for values in ([0.5, 0.6], [1.5, -0.5], [np.nan, 1.0]):
        with pytest.raises(UsageError):
            Profile(np.array(values))
    with pytest.raises(UsageError, match="cannot normalise"):
        Profile.normalised(np.zeros(3))
    assert Profile.uniform(4).influence.sum() == 1
