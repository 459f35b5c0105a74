"""The judgement judged: planted effects are found with the power it states, and what is not there is not found."""

import numpy as np
import pytest

from planted import Planted, judged, planted_scores, verdict_rates
from posbias import UsageError
from posbias.evaluation.changes import MEAN, WORST
from posbias.mitigation.judging.judge import JudgeOptions
from posbias.mitigation.judging.verdicts import GAINS, HARM, NOTHING

U = (0.8, 0.4, 0.6)
RUNS = 500


def gained(rates):
    """At most so often any method gets a verdict of gain."""
    return sum(rates.get(verdict, 0) for verdict in GAINS)


def test_without_effect_neither_verdict_comes_in_more_than_5_percent_of_runs():
    rates = verdict_rates(Planted(U, (U,)), count=24, runs=RUNS // 2)
    assert gained(rates) <= 0.05
    assert rates.get(HARM, 0) <= 0.05
    assert rates[NOTHING] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize("curve", [(0.9, 0.6, 0.4, 0.5, 0.8), (0.5,) * 5, (0.15,) * 5])
def test_without_effect_neither_verdict_comes_often_whatever_curve_and_scores(curve, count, noise):
    rates = verdict_rates(Planted(curve, (curve,) * 4), count=count, runs=RUNS, noise=noise)
    print(f"{curve} {count} samples, noise {noise}: {rates}")
    assert max(gained(rates), rates.get(HARM, 0)) <= 0.05


def test_a_method_that_only_moves_the_trouble_is_not_applied():
    rates = verdict_rates(Planted(U, ((0.4, 0.8, 0.6),)), count=24, runs=60)
    assert gained(rates) <= 0.1
    assert rates[HARM] > 0.3, "the position that was best loses"
    flat_to_peaked = Planted((0.5, 0.5, 0.5), ((0.75, 0.25, 0.5),))
    assert gained(verdict_rates(flat_to_peaked, count=40, runs=60)) <= 0.05, "the mean is as it was"


def raised(curve, endpoint, rise, noise):
    """The curve with a method: of the mean every position gets the same share of what is missing, or all the same."""
    curve = np.array(curve)
    if endpoint == WORST:
        return tuple(np.full(len(curve), min(1.0, curve.min() + rise)))
    missing = 1 - curve if noise is None else np.ones(len(curve))
    return tuple(curve + rise * missing / missing.mean())


def stated_rises(planted, *, count, runs, noise):
    """By endpoint the mean over runs of the first method, where every run states one; else the median."""
    generator = np.random.default_rng(1)
    options = [JudgeOptions(seed=seed) for seed in range(runs)]
    found = [judged(planted, count=count, generator=generator, noise=noise, options=each) for each in options]
    stated = {name: np.array([run.verdicts[0].changes[name].detectable for run in found]) for name in (MEAN, WORST)}
    return {name: np.mean(each) if np.isfinite(each).all() else np.median(each) for name, each in stated.items()}


def found_rate(planted, endpoint, *, count, runs, noise):
    """Share of runs in which the rise of the first method is established."""
    generator, options = np.random.default_rng(2), JudgeOptions(draws=0)
    found = [judged(planted, count=count, generator=generator, noise=noise, options=options) for _ in range(runs)]
    return np.mean([run.verdicts[0].gains[endpoint] < 0.05 for run in found])


def check_stated_is_found(curve, *, count, noise, methods, runs):
    """What is stated of methods without effect, drawn anew as the effect of one of them, is found in 80 % of runs."""
    idle = (curve,) * methods
    asked = {"count": count, "noise": noise}
    for endpoint, rise in stated_rises(Planted(curve, idle, difficulty=0.05), runs=runs // 2, **asked).items():
        effective = Planted(curve, (raised(curve, endpoint, rise, noise), *idle[1:]), difficulty=0.05)
        rate = found_rate(effective, endpoint, runs=runs, **asked)
        print(f"{curve} {count} samples, {methods} methods, noise {noise}: {endpoint} +{rise:.3f}, found in {rate:.3f}")
        assert 0.8 - 2 * np.sqrt(0.8 * 0.2 / runs) <= rate <= 0.95


@pytest.mark.parametrize("noise", [None, pytest.param(0.3, marks=pytest.mark.slow)])
def test_an_effect_of_the_size_that_is_stated_is_found_in_80_percent_of_runs(noise):
    check_stated_is_found((0.75, 0.35, 0.55), count=40, noise=noise, methods=1, runs=150)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("methods", [1, 5])
@pytest.mark.parametrize("count", [20, 40])
@pytest.mark.parametrize("curve", [(0.75, 0.35, 0.55), (0.8, 0.5, 0.3, 0.5, 0.7)])
def test_stated_effects_are_found_whatever_scores_samples_and_methods(curve, count, methods, noise):
    check_stated_is_found(curve, count=count, noise=noise, methods=methods, runs=400)


def test_planted_answers_have_the_planted_chances():
    planted = Planted(U, ((0.6, 0.6, 0.6),), agreement=1.0)
    before, (after,) = planted_scores(planted, count=20_000, generator=np.random.default_rng(0))
    assert before.mean(axis=0) == pytest.approx(U, abs=0.015)
    assert after.mean(axis=0) == pytest.approx(0.6, abs=0.015)
    assert (after[:, 2] == before[:, 2]).all(), "the same luck and the same chance give the same answer"
    with pytest.raises(UsageError, match=r"3 chances in 0 \.\.\. 1, got"):
        Planted(U, ((0.5, 0.5),))
