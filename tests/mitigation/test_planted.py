"""The judgement judged: planted effects are found with the power it states, and what is not there is not found."""

from itertools import product

import numpy as np
import pytest

from planted import Planted, judged, planted_scores, verdict_rates
from posbias.evaluation.levels import MEAN, samples_for
from posbias.mitigation.judging import GAINS, HARM, NOTHING

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


STATED = list(product([(0.75, 0.35, 0.55), (0.8, 0.5, 0.3, 0.5, 0.7)], [1, 5], [None, 0.3]))


@pytest.mark.parametrize(
    ("curve", "methods", "noise"), [STATED[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in STATED[1:])]
)
def test_the_samples_that_are_stated_find_a_planted_rise(curve, methods, noise):
    """Counted from a first run of methods without effect, they find the rise of one in about 80 % of runs."""
    idle, generator, runs = (curve,) * methods, np.random.default_rng(1), 150
    asked = []
    for _ in range(20):
        before, (after, *_) = planted_scores(Planted(curve, idle), count=40, generator=generator, noise=noise)
        asked.append(samples_for(before, after, 0.15, 2 * methods)[1])
    effective = Planted(curve, (tuple(np.array(curve) + 0.15), *idle[1:]))
    count, found = round(np.mean(asked)), 0
    for _ in range(runs):
        (first, *_) = judged(effective, count=count, generator=generator, noise=noise).verdicts
        found += MEAN in first.established(0.0).gains
    print(f"{curve} {methods} methods, noise {noise}: {count} samples, found in {found / runs:.3f}")
    assert 0.8 - 3 * np.sqrt(0.8 * 0.2 / runs) <= found / runs
