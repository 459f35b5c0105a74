"""The judgement judged: planted effects are found with the power it states, and what is not there is not found."""

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.mitigation.judging import APPLY, HARM, MEAN, NOTHING, WORST
from posbias.mitigation.planted import Planted, judged, planted_scores, verdict_rates

U = (0.8, 0.4, 0.6)
RUNS = 500


def test_without_effect_neither_verdict_comes_in_more_than_5_percent_of_runs():
    rates = verdict_rates(Planted(U, (U,)), count=24, runs=RUNS)
    assert rates.get(APPLY, 0) <= 0.05
    assert rates.get(HARM, 0) <= 0.05
    assert rates[NOTHING] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize("curve", [(0.9, 0.6, 0.4, 0.5, 0.8), (0.5,) * 5, (0.15,) * 5])
def test_without_effect_neither_verdict_comes_often_whatever_curve_and_scores(curve, count, noise):
    rates = verdict_rates(Planted(curve, (curve,) * 4), count=count, runs=RUNS, noise=noise)
    assert max(rates.get(APPLY, 0), rates.get(HARM, 0)) <= 0.05


def test_a_method_that_only_moves_the_trouble_is_not_applied():
    rates = verdict_rates(Planted(U, ((0.4, 0.8, 0.6),)), count=24, runs=60)
    assert rates.get(APPLY, 0) <= 0.1
    flat_to_peaked = Planted((0.5, 0.5, 0.5), ((0.75, 0.25, 0.5),))
    assert verdict_rates(flat_to_peaked, count=40, runs=60).get(APPLY, 0) <= 0.05, "the mean is as it was"


@pytest.mark.parametrize("endpoint", [MEAN, WORST])
def test_an_effect_of_the_size_that_is_stated_is_found_in_80_percent_of_runs(endpoint):
    curve, generator = np.array((0.75, 0.35, 0.55)), np.random.default_rng(1)

    def with_gain(gain):
        after = curve + gain if endpoint == MEAN else np.maximum(curve, curve.min() + gain)
        return Planted(tuple(curve), (tuple(after),))

    def found(gain):
        return judged(with_gain(gain), count=40, generator=generator, noise=0.3).verdicts[0]

    stated = np.mean([found(0.0).changes[endpoint].detectable for _ in range(20)])
    rate = np.mean([found(stated).gains[endpoint] < 0.05 for _ in range(60)])
    assert rate >= 0.8 - 2 * np.sqrt(0.8 * 0.2 / 60)


def test_planted_answers_have_the_planted_chances():
    planted = Planted(U, ((0.6, 0.6, 0.6),), agreement=1.0)
    before, (after,) = planted_scores(planted, count=20_000, generator=np.random.default_rng(0))
    assert before.mean(axis=0) == pytest.approx(U, abs=0.015)
    assert after.mean(axis=0) == pytest.approx(0.6, abs=0.015)
    assert (after[:, 2] == before[:, 2]).all(), "the same luck and the same chance give the same answer"
    with pytest.raises(UsageError, match=r"3 chances in 0 \.\.\. 1, got"):
        Planted(U, ((0.5, 0.5),))
