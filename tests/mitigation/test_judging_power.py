"""How many samples would decide, rare losses that no sample showed, and what is too small to matter, to every digit."""

import numpy as np
import pytest

from planted import reasons_of
from posbias import UsageError
from posbias.evaluation.curve import change_text
from posbias.evaluation.levels import MEAN, samples_for
from posbias.mitigation.judging import GAINS, HARM, NOTHING, RAISES, SMALL, ArmScores, SideEffect, judge
from posbias.mitigation.page import reasons, recommendation
from posbias.statistics import Interval

PLACES = (0, 1, 2)


def one(before, after, *effects, measure="accuracy", **options):
    tried = ArmScores("method", after, effects)
    return judge(before, [tried], positions=range(before.shape[1]), measure=measure, **options)


def rare_losses(count, n_methods, generator, *, share=0.05, loss=1.0, noise=0.05):
    """Log-probabilities, and those under methods of no effect on average: most samples gain a little, few lose much."""
    before = generator.normal(-3, 1, (count, 2))
    lost = generator.random((n_methods, count, 1)) < share
    gain = share * loss / (1 - share) + noise * generator.normal(size=lost.shape)
    return before, [ArmScores(str(number), before + each) for number, each in enumerate(gain - lost * (gain + loss))]


@pytest.mark.parametrize(
    ("n_methods", "runs"), [(4, 30), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 400), (16, 100)))]
)
@pytest.mark.parametrize("count", [16, 40])
def test_methods_whose_rare_losses_undo_their_gains_are_recommended_in_at_most_5_percent(count, n_methods, runs):
    """By what was seen alone, four methods were recommended in 43 % of runs of 40 samples, 16 in 90 %."""
    generator, recommended = np.random.default_rng(count), 0
    for _ in range(runs):
        before, tried = rare_losses(count, n_methods, generator)
        recommended += judge(before, tried, positions=(0, 1), measure="logprob").recommended is not None
    assert recommended <= 0.05 * runs + 2 * np.sqrt(0.05 * 0.95 * runs)


def test_a_gain_that_rare_losses_could_undo_is_said_with_the_samples_that_would_decide():
    before, (method,) = rare_losses(40, 1, np.random.default_rng(3), share=0.0, noise=0.01)
    judgement = one(before, method.after + 0.05, measure="logprob")
    (verdict,) = judgement.verdicts
    assert (verdict.verdict, judgement.recommended) == (NOTHING, None)
    assert verdict.gains[MEAN] < 0.001 < 0.05 < verdict.unseen[MEAN]
    said = reasons_of(verdict, measure="logprob")
    assert said[0].startswith("Only in these samples, too few to exclude rare losses: mean +0.05")
    assert "method: a gain in these samples, too few to exclude rare losses." in recommendation(judgement)
    _, needed = verdict.changes[MEAN].needed
    more, (same,) = rare_losses(needed + 5, 1, np.random.default_rng(3), share=0.0, noise=0.01)
    assert one(more, same.after + 0.05, measure="logprob").verdicts[0].verdict in GAINS, "so many decide"
    (large,) = one(before, method.after + 0.5, measure="logprob").verdicts
    assert large.verdict in GAINS, "no rare loss of the size of the scores would undo that"


def test_with_six_samples_nothing_can_be_found_and_the_samples_that_would_are_named():
    (verdict,) = one(np.zeros((6, 3)), np.ones((6, 3))).verdicts
    assert verdict.gains[MEAN] == pytest.approx(0.0625), "a perfect cure"
    assert verdict.verdict == NOTHING
    rise, needed = verdict.changes[MEAN].needed
    assert (rise, needed > 6) == (1.0, True)
    decides = f"About {needed} samples ({3 * needed} questions, each at 3 positions) would decide"
    assert any(text.startswith(decides) for text in reasons_of(verdict))


def test_samples_that_would_decide_grow_with_methods_and_spread_and_as_rises_shrink():
    generator = np.random.default_rng(0)
    before = generator.normal(-3, 0.3, (40, 3))
    near, far = (before + generator.normal(0, noise, before.shape) for noise in (0.1, 1.0))
    asked = [samples_for(before, near, 0.5, 2), samples_for(before, near, 0.5, 32), samples_for(before, far, 0.5, 2)]
    assert [rise for rise, _ in asked] == [0.5] * 3
    assert asked[0][1] < min(asked[1][1], asked[2][1])
    assert samples_for(before, near, 0.05, 2)[1] >= np.log(2 / 0.05) / np.log(1.05)
    assert samples_for(np.ones((8, 3)), np.ones((8, 3)), 0.1, 2) is None, "there is no room"
    assert samples_for(before, near, 9.0, 2)[0] == pytest.approx(-before.mean()), "no log-probability is above 0"


def test_the_tests_that_are_counted_are_those_of_the_family():
    before = steady(0.0, 20)[0]
    idle = before + np.random.default_rng(1).normal(0, 0.3, before.shape)
    blank, effect = np.full_like(before, np.nan), SideEffect("short", np.ones(20), np.ones(20))
    judgement = judge(before, [ArmScores("idle", idle, (effect,)), ArmScores("none", blank)], positions=PLACES)
    assert "(80 % power, 2 tests)" in " ".join(reasons(judgement.verdicts[0], judgement))
    with pytest.raises(UsageError, match="judge: smallest must be a finite number >= 0, got -1"):
        judge(before, [ArmScores("idle", before)], positions=PLACES, smallest=-1.0)


def steady(change, count=40):
    """Scores that all change by nearly the same."""
    generator = np.random.default_rng(0)
    before = generator.normal(-1, 0.3, (count, 3))
    return before, before + change + generator.normal(0, 0.001, before.shape)


def test_an_established_change_that_is_smaller_than_matters_decides_nothing_and_is_said():
    judgement = one(*steady(0.005))
    (verdict,) = judgement.verdicts
    assert verdict.verdict == SMALL
    assert reasons_of(verdict)[0].startswith("Established but negligible (below 0.01): mean +0.005 [+0.005, ")
    assert judgement.recommended is None
    assert "to raise accuracy by at least 0.01" in " ".join(recommendation(judgement))
    assert judgement.smallest == 0.01
    assert one(*steady(-0.005)).verdicts[0].verdict == SMALL
    assert one(*steady(0.005, 1000), smallest=0.001).verdicts[0].verdict == RAISES
    assert one(*steady(-0.005), smallest=0.001).verdicts[0].verdict == HARM
    assert one(*steady(0.02, 250)).verdicts[0].verdict == RAISES, "at all positions alike"


def test_small_harm_does_not_forbid_a_gain_that_matters():
    ones, one_less = np.ones(300), np.r_[np.full(150, 0.99), np.full(150, 0.996)]
    before, after = steady(0.1)
    judgement = one(before, after, SideEffect("short form", ones, one_less))
    (verdict,) = judgement.verdicts
    assert verdict.verdict == RAISES
    small = "Established but negligible (below 0.01): short form -0.007 [-0.007, -0.007]."
    assert small in reasons_of(verdict)
    assert "No harm that matters is established" in " ".join(recommendation(judgement))
    assert one(before, after, SideEffect("short form", ones, one_less), smallest=0.001).verdicts[0].verdict == HARM
    text = SideEffect("ordinary text", ones, ones + ones - one_less, worse=1, tolerance=0.002)
    assert one(before, after, text).verdicts[0].verdict == HARM, "what has a tolerance is judged by that"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Interval(0.12, 0.04, 0.2), "+0.120 [+0.040, +0.200]"),
        (Interval(0.0002, 0.0001, 0.0003), "+0.0002 [+0.0001, +0.0003]"),
        (Interval(0.005, 0.00004, 0.01), "+0.00500 [+0.00004, +0.01000]"),
        (Interval(0.0, -0.0001, 0.0002), "+0.0000 [-0.0001, +0.0002]"),
        (Interval(0.01, -0.00001, 0.2), "+0.010 [+0.000, +0.200]"),
        (Interval(-3e-15, -4e-15, -2e-15), "-3.0e-15 [-4.0e-15, -2.0e-15]"),
        (Interval(0.0, 0.0, 0.0), "+0.000"),
        (Interval(0.0004, -np.inf, np.inf), "+0.0004"),
    ],
)
def test_no_interval_reads_as_nothing_that_is_not(value, text):
    assert change_text(value) == text
