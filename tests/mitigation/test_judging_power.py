"""What would have been found, and what is too small to matter: the same tests, the range of scores, every digit."""

import numpy as np
import pytest

from planted import Planted, planted_scores, reasons_of
from posbias import UsageError
from posbias.evaluation.changes import MEAN, WORST, change_text, changes_of
from posbias.mitigation.judging import power
from posbias.mitigation.judging.judge import ArmScores, JudgeOptions, SideEffect, judge
from posbias.mitigation.judging.power import DetectableRise, detectable_rises
from posbias.mitigation.judging.verdicts import HARM, NOTHING, RAISES, SMALL
from posbias.report.mitigate_wording import reasons, recommendation
from posbias.statistics import Interval

PLACES = (0, 1, 2)


def drawn(before=(0.3, 0.5, 0.4), after=(0.8, 0.7, 0.9), *, count=20, noise=None, generator):
    old, (new,) = planted_scores(Planted(before, (after,)), count=count, generator=generator, noise=noise)
    return old, new


def one(before, after, *effects, measure="accuracy", **options):
    tried, asked = ArmScores("method", after, effects), JudgeOptions(**options)
    return judge(before, [tried], positions=range(before.shape[1]), measure=measure, options=asked)


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("noise", [None, 0.3])
def test_what_is_planted_is_judged_by_the_tests_of_the_judgement(noise, places, monkeypatch):
    monkeypatch.setattr(power, "_widened", lambda values, centre, count: np.asarray(values))
    generator, aim = np.random.default_rng(0), np.zeros((places, places))
    for count in (7, 7, 7, 7, 7, 20, 20, 20):
        before, after = drawn(
            (0.3, 0.5, 0.4)[:places], (0.8, 0.7, 0.9)[:places], count=count, noise=noise, generator=generator
        )
        changes = changes_of(before, after)
        for endpoint, rise_of in power._RISES.items():
            (rise,), (p,) = rise_of(after[:, None], before[:, None], aim, noise is None)
            change = changes[endpoint]
            assert rise == pytest.approx(change.value.value)
            assert p == pytest.approx(change.p if rise > 0 else 1.0, rel=1e-6)


def test_samples_that_all_agree_show_no_more_than_so_many_can():
    shift = np.full((20, 1, 3), 0.25)
    _, (p,) = power._rise_of_mean(shift, np.zeros_like(shift), np.zeros((3, 3)), False)
    assert p == 2.0**-19
    assert changes_of(np.zeros((20, 3)), shift[:, 0])[MEAN].p == p


def test_with_six_samples_nothing_can_be_found_and_that_is_said():
    judgement = one(np.zeros((6, 3)), np.ones((6, 3)))
    (verdict,) = judgement.verdicts
    assert verdict.gains[MEAN] == pytest.approx(0.0625), "a perfect cure"
    assert verdict.verdict == NOTHING
    assert all(np.isinf(verdict.changes[endpoint].detectable) for endpoint in (MEAN, WORST))
    none = (
        "No rise of the mean or of the worst position could have been found with so few samples (80 % power, 2 tests)."
    )
    assert none in reasons_of(verdict)[0]
    assert "So few samples could not have shown any rise of the mean" in " ".join(recommendation(judgement))
    assert judgement.as_record()["verdicts"][0]["changes"][MEAN]["detectable"] is None
    (seven,) = one(np.zeros((7, 1)), np.zeros((7, 1))).verdicts
    assert 0.9 < seven.changes[MEAN].detectable <= 1


@pytest.mark.parametrize("count", [16, 20, 40])
def test_no_rise_beyond_the_best_scores_is_said_to_be_found(count):
    generator = np.random.default_rng(count)
    for _ in range(5):
        before, after = drawn((0.75, 0.35, 0.55), (0.75, 0.35, 0.55), count=count, generator=generator)
        found = detectable_rises(before, after, DetectableRise(2, 0.01, (0.0, 1.0), 100, 0))
        levels = {MEAN: before.mean(), WORST: before.mean(axis=0).min()}
        assert all(np.isinf(rise) or 0.01 < rise <= 1 - levels[name] for name, rise in found.items())
        (verdict,) = one(before - 1, after - 1, measure="logprob", draws=100).verdicts
        assert all(verdict.changes[name].detectable in (np.inf, pytest.approx(found[name], rel=1)) for name in levels)
        assert all(
            not verdict.changes[name].detectable < np.inf or verdict.changes[name].detectable <= 1 for name in levels
        )


def test_the_tests_that_are_counted_are_those_of_the_family():
    before, after = drawn((0.5, 0.4, 0.6), (0.5, 0.4, 0.6), generator=np.random.default_rng(3))
    blank = np.full_like(after, np.nan)
    effect = SideEffect("short", np.ones(20), np.ones(20))
    alone = judge(before, [ArmScores("idle", after, (effect,))], positions=PLACES).verdicts[0]
    beside_nothing = judge(before, [ArmScores("idle", after), ArmScores("unscored", blank)], positions=PLACES)
    beside_another = judge(before, [ArmScores("idle", after), ArmScores("too", after)], positions=PLACES)
    assert reasons_of(alone) == reasons(beside_nothing.verdicts[0], beside_nothing)
    assert "(80 % power, 2 tests)" in reasons_of(alone)[0]
    assert "(80 % power, 4 tests)" in reasons(beside_another.verdicts[0], beside_another)[0]
    assert alone.changes[MEAN].detectable < beside_another.verdicts[0].changes[MEAN].detectable


def test_what_would_have_been_found_is_the_same_again_and_can_be_left_out():
    before, after = drawn((0.5, 0.4, 0.6), (0.5, 0.4, 0.6), generator=np.random.default_rng(3))
    first, second, other = (one(before, after, seed=seed).verdicts[0].changes for seed in (0, 0, 1))
    assert first == second
    assert first[MEAN].detectable == pytest.approx(other[MEAN].detectable, rel=0.2)
    (left_out,) = one(before, after, draws=0).verdicts
    assert left_out.changes[MEAN].detectable is None
    assert "would have been found" not in " ".join(reasons_of(left_out))
    with pytest.raises(UsageError, match="judge: smallest must be a finite number >= 0, got -1"):
        JudgeOptions(smallest=-1.0)


def steady(change, count=40):
    """Scores that all change by nearly the same."""
    generator = np.random.default_rng(0)
    before = generator.normal(-1, 0.3, (count, 3))
    return before, before + change + generator.normal(0, 0.001, before.shape)


def test_an_established_change_that_is_smaller_than_matters_decides_nothing_and_is_said():
    judgement = one(*steady(0.005))
    (verdict,) = judgement.verdicts
    assert verdict.verdict == SMALL
    assert reasons_of(verdict)[0].startswith("Established but negligible (below 0.01): mean rises by 0.005 [0.005, ")
    assert judgement.recommended is None
    assert "to raise accuracy by at least 0.01" in " ".join(recommendation(judgement))
    assert judgement.as_record()["smallest"] == 0.01
    assert one(*steady(-0.005)).verdicts[0].verdict == SMALL
    assert one(*steady(0.005), smallest=0.001).verdicts[0].verdict == RAISES
    assert one(*steady(-0.005), smallest=0.001).verdicts[0].verdict == HARM
    assert one(*steady(0.02)).verdicts[0].verdict == RAISES, "at all positions alike"


def test_small_harm_does_not_forbid_a_gain_that_matters():
    ones, one_less = np.ones(300), np.r_[np.full(150, 0.99), np.full(150, 0.996)]
    before, after = steady(0.1)
    judgement = one(before, after, SideEffect("short form", ones, one_less))
    (verdict,) = judgement.verdicts
    assert verdict.verdict == RAISES
    assert reasons_of(verdict)[2] == (
        "Established but negligible (below 0.01): short form changes by -0.007 [-0.007, -0.007]."
    )
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
    assert change_text(value, "+") == text


@pytest.mark.parametrize("binary", [True, False])
def test_rises_are_the_same_however_many_draws_are_judged_at_a_time(binary, monkeypatch):
    generator = np.random.default_rng(5)
    before, after = generator.random((2, 30, 3))
    if binary:
        before, after = np.round(before), np.round(after)
    sought = DetectableRise(2, 0.01, (0.0, 1.0), 50, 0)
    whole = detectable_rises(before, after, sought)
    monkeypatch.setattr(power, "VALUES_AT_ONCE", 1000)
    monkeypatch.setattr(power, "TABLED", 0)
    assert detectable_rises(before, after, sought) == whole
