"""The judgement judged: planted effects are found with the power it states, and what is not there is not found.

Of strongly skewed changes, too, false verdicts stay below 5 %, and too few samples give none.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from planted import Planted, judged, planted_scores, reasons_of, verdict_rates
from posbias.evaluation.curve import bounds_of
from posbias.evaluation.levels import FORMERLY_BEST, MEAN, SPREAD, WORST, changes_of, samples_for
from posbias.mitigation.judging import GAINS, HARM, NOTHING, ArmScores, SideEffect, judge
from posbias.mitigation.page import recommendation
from posbias.statistics import mean_of

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


CHANGES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "exponential": lambda generator, shape: generator.exponential(size=shape) - 1,
    "lognormal": lambda generator, shape: generator.lognormal(size=shape) - np.exp(0.5),
    "sigma 1.5": lambda generator, shape: generator.lognormal(0, 1.5, size=shape) - np.exp(1.125),
}
"""Of mean 0."""


def false_verdicts(name: str, count: int, n_methods: int, runs: int = 4000) -> float:
    """Share of runs in which any of the methods, which change every position alike, is found to help or harm."""
    values = CHANGES[name](np.random.default_rng(count), (count, runs * n_methods))
    p = bounds_of(values, values, 0.05)[2].reshape(runs, n_methods)
    return float(np.mean(p.min(axis=1) * 2 * n_methods < 0.05))


@pytest.mark.parametrize("n_methods", [1, 4])
@pytest.mark.parametrize("count", [16, 20, 40])
@pytest.mark.parametrize("name", CHANGES)
def test_of_skewed_changes_without_effect_at_most_5_percent_get_a_verdict(name: str, count: int, n_methods: int):
    """Before caution: of lognormal changes 8 % with 16 samples and four methods, of sigma 1.5 14 %."""
    assert false_verdicts(name, count, n_methods) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, 20, 40])
@pytest.mark.parametrize("name", ["normal", "exponential", "lognormal"])
def test_of_sixteen_methods_too(name: str, count: int):
    assert false_verdicts(name, count, 16, runs=10_000) <= 0.05


def test_caution_widens_on_both_sides_and_costs_little_with_forty_samples():
    units = np.random.default_rng(2).normal(0.6, 1, size=(40, 2000))
    low, high, p = bounds_of(units, units, 0.05)
    plain = mean_of(units)
    assert (low <= plain.ends()[0] + 1e-12).all()
    assert (high >= plain.ends()[1] - 1e-12).all()
    assert (p >= plain.p() - 1e-12).all()
    found, before = np.mean(p < 0.00625), np.mean(plain.p() < 0.00625)
    assert before - 0.08 < found < before, "the power of one method among four"


def test_fewer_than_16_samples_of_other_scores_than_right_or_wrong_are_not_judged():
    generator = np.random.default_rng(4)
    before = generator.normal(-3, 0.1, (15, 3))
    (verdict,) = judge(before, [ArmScores("clear", before + 2)], positions=range(3), measure="logprob").verdicts
    assert (verdict.verdict, verdict.samples_needed, dict(verdict.changes)) == (NOTHING, 16, {})
    assert "Only 15 samples" in reasons_of(verdict)[-1]
    assert reasons_of(verdict, measure="logprob")[-1].endswith("a verdict by log-probability per token needs 16.")
    longer = np.vstack([before, before[:1]])
    (verdict,) = judge(longer, [ArmScores("clear", longer + 2)], positions=range(3), measure="logprob").verdicts
    assert verdict.verdict in GAINS
    right = np.zeros((15, 3))
    (verdict,) = judge(right, [ArmScores("clear", right + 1)], positions=range(3)).verdicts
    assert verdict.verdict in GAINS
    assert verdict.samples_needed == 6


def test_a_side_effect_with_too_few_units_is_named_as_not_judged():
    right, nats = np.zeros((15, 3)), np.full(15, 3.0) + np.random.default_rng(5).normal(0, 0.01, 15)
    text = SideEffect("ordinary text", nats, nats + 1, worse=1, tolerance=0.02, unit="nats per token")
    found = judge(right, [ArmScores("clear", right + 1, (text,))], positions=range(3))
    (verdict,) = found.verdicts
    assert "Not judged: ordinary text, of which there are 15 units; a verdict needs 16." in reasons_of(verdict)
    assert "ordinary text" not in verdict.harms
    assert "only this task was judged" in " ".join(recommendation(found))
    assert verdict.effects["ordinary text"].value.value == pytest.approx(1)
    assert not verdict.effects["ordinary text"].value.known


@pytest.mark.parametrize("noise", [0.0, 1e-13])
def test_samples_that_all_change_alike_show_what_so_many_can(noise: float):
    before = np.random.default_rng(6).normal(size=(16, 2))
    after = before + 0.25 + noise * np.random.default_rng(7).normal(size=(16, 2))
    changes = changes_of(before, after)
    assert changes[MEAN].p == pytest.approx(2.0**-15)
    assert changes[WORST].p >= 2 * 2.0**-15
    assert changes[FORMERLY_BEST].p == pytest.approx(2 * 2.0**-15)
    assert changes[SPREAD].p > 0.05
