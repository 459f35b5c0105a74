"""The judgement of methods: bounds by hand, coverage whatever the curves, and verdicts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from planted import Planted, planted_scores, reasons_of
from posbias import UsageError
from posbias.evaluation.evaluation import Reading
from posbias.evaluation.levels import FORMERLY_BEST, MEAN, SPREAD, WORST, levels_of
from posbias.mitigation import judging
from posbias.mitigation.judging import ArmScores, SideEffect, judge
from posbias.mitigation.page import recommendation, warnings, words
from posbias.mitigation.result import ArmResult, Effort
from posbias.results.result import as_stored, from_stored

PLACES = (0, 1, 2)
ARM = ArmResult("unchanged", "", Effort(1.0, 8), Reading(), "", None, "", "", needs_passages=False)


def paired(before, after, *, count=40, noise=0.2, seed=0):
    """Scores around two curves."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(0, noise, (count, len(before)))
    return np.array(before) + shared, np.array(after) + shared + generator.normal(0, noise, shared.shape)


def one(before, after, **effects):
    (found,) = judge(before, [ArmScores("method", after, **effects)], positions=range(before.shape[1])).verdicts
    return found


def test_the_worst_position_is_bounded_by_the_ends_of_all_pairs():
    before, after = paired((0.9, 0.2, 0.5), (0.6, 0.7, 0.4))
    change = one(before, after).changes[WORST]
    level = 1 - 0.05 / 3
    ends = np.array(
        [[stats.ttest_1samp(new - old, 0).confidence_interval(level) for old in before.T] for new in after.T]
    )
    assert change.value.value == pytest.approx(after.mean(axis=0).min() - before.mean(axis=0).min())
    # Student's interval, cautious about skewness, is at most wider.
    assert change.value.low <= ends[:, :, 0].max(axis=1).min() + 1e-12
    assert change.value.high >= ends[:, :, 1].max(axis=1).min() - 1e-12
    assert change.value.low == pytest.approx(ends[:, :, 0].max(axis=1).min(), abs=0.02)
    p = [[stats.ttest_1samp(new - old, 0, alternative="greater").pvalue for old in before.T] for new in after.T]
    assert 1 <= change.p / (3 * 2 * np.min(p, axis=1).max()) < 2


def test_an_interval_leaves_out_nothing_exactly_where_its_p_value_is_below_5_percent():
    for seed in range(8):
        for scores in (
            paired((0.5, 0.4, 0.6), (0.6, 0.55, 0.5), seed=seed),
            binary((0.5, 0.3, 0.7), (0.7, 0.6, 0.4), seed),
        ):
            for name, change in one(*scores).changes.items():
                assert change.value.excludes(0.0) == (change.p < 0.05), (seed, name)


def binary(before, after, seed, count=40):
    old, (new,) = planted_scores(Planted(before, (after,)), count=count, generator=np.random.default_rng(seed))
    return old, new


def test_changes_of_scores_of_0_and_1_by_hand():
    before = np.tile([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]], (10, 1))
    after = np.tile([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], (10, 1))
    found = one(before, after)
    assert found.changes[MEAN].value.value == pytest.approx(1 / 3)
    assert found.changes[WORST].value.value == pytest.approx(0.5)  # from 0 in the middle to .5 at the end
    assert found.changes[SPREAD].value.value == pytest.approx(-0.5)
    assert found.changes[FORMERLY_BEST].value.value == 0
    assert found.changes[WORST].p == pytest.approx(3 * 2 * 0.5**10)
    assert (found.before.worst.value, found.after.worst.value) == (0, 0.5)
    assert found.verdict == judging.APPLY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0.5, 0.5, 0.5, 0.5), (0.9, 0.9, 0.5, 0.9)),  # a plain bootstrap finds a rise in a third of these
        ((0.9, 0.5, 0.9, 0.9), (0.5, 0.5, 0.5, 0.5)),
        ((0.5, 0.6, 0.6, 0.6), (0.5, 0.5, 0.5, 0.5)),  # where a choice on other samples misses
    ],
)
def test_intervals_of_worst_position_and_spread_hold_the_truth(before, after):
    generator, runs, missed = np.random.default_rng(3), 60, np.zeros(4)
    worst = min(after) - min(before)
    spread = max(after) - min(after) - max(before) + min(before)
    for _ in range(runs):
        old, (new,) = planted_scores(Planted(before, (after,)), count=30, generator=generator, noise=0.25)
        found = judge(old, [ArmScores("method", new)], positions=range(4)).verdicts[0]
        missed += [
            found.changes[WORST].value.excludes(worst),
            found.changes[SPREAD].value.excludes(spread),
            found.after.worst.excludes(min(after)),
            found.after.spread.excludes(max(after) - min(after)),
        ]
    assert (missed / runs <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / runs)).all(), missed / runs


def test_harm_anywhere_forbids_what_helps_elsewhere():
    before, after = paired((0.9, 0.2, 0.5), (0.9, 0.7, 0.8))
    assert one(before, after).verdict == judging.APPLY
    nats = np.random.default_rng(1).normal(3, 0.1, 20)

    def with_text(change, tolerance):
        after_text = nats + change + np.random.default_rng(2).normal(0, 0.003, 20)
        text = SideEffect("ordinary text", nats, after_text, worse=1, tolerance=tolerance, unit="nats per token")
        return one(before, after, effects=(text,))

    assert with_text(0.05, 0.02).verdict == judging.HARM
    assert "ordinary text +0.05" in reasons_of(with_text(0.05, 0.02))[0]
    assert with_text(0.01, 0.02).verdict == judging.APPLY, "less than is accepted"
    assert with_text(0.01, 0.0).verdict == judging.HARM
    assert with_text(-0.05, 0.0).verdict == judging.APPLY, "text improves"
    short = SideEffect("oracle", np.ones(20), np.r_[np.zeros(9), np.ones(11)])
    assert one(before, after, effects=(short,)).verdict == judging.HARM
    fallen = one(after, before)
    assert fallen.verdict == judging.HARM
    assert reasons_of(fallen)[0].startswith("Harm: mean -0.")
    assert "worst position -" in reasons_of(fallen)[0]


def test_the_more_methods_the_more_each_must_show():
    before, after = paired((0.5, 0.4, 0.6), (0.57, 0.47, 0.67), count=16, seed=5)
    alone = judge(before, [ArmScores("good", after)], positions=PLACES)
    idle = [ArmScores(f"idle {number}", before) for number in range(9)]
    among = judge(before, [ArmScores("good", after), *idle], positions=PLACES)
    assert alone.verdicts[0].gains[MEAN] < among.verdicts[0].gains[MEAN]
    assert alone.verdicts[0].changes[MEAN].needed < among.verdicts[0].changes[MEAN].needed
    assert alone.verdicts[0].unseen[MEAN] < among.verdicts[0].unseen[MEAN]
    assert {verdict.verdict for verdict in among.verdicts[1:]} == {judging.NOTHING}
    assert among.verdicts[1].changes[MEAN].needed is None, "nothing changed, so nothing is known of its spread"


def test_the_recommendation_names_the_best_and_warns_of_the_harmful():
    before, good = paired((0.9, 0.2, 0.5), (0.9, 0.5, 0.6))
    better, worse = paired((0.9, 0.2, 0.5), (0.9, 0.8, 0.9))[1], paired((0.9, 0.2, 0.5), (0.5, 0.0, 0.2))[1]
    arms = [ArmScores("good", good), ArmScores("better", better), ArmScores("bad", worse)]
    found = judge(before, arms, positions=PLACES)
    assert found.recommended == "better"
    assert recommendation(found)[0] == "Apply better."
    assert "good also gains" in " ".join(recommendation(found))
    assert "Do not apply bad" in " ".join(recommendation(found))
    nothing = judge(before, [ArmScores("idle", before), ArmScores("bad", worse)], positions=PLACES)
    assert nothing.recommended is None
    assert " ".join(recommendation(nothing)).startswith("Leave the model as it is")


def test_a_method_that_changes_nothing_at_all_says_so():
    scores, _ = paired((-0.9, -1.2, -0.5), (0, 0, 0))
    found = one(scores, scores.copy())
    assert found.verdict == judging.NOTHING
    assert reasons_of(found) == ["It changes no score of these 40 samples at all."]
    assert all(str(change.value.text("+.3f")) == "+0.000" for change in found.changes.values())
    answers = binary((0.9, 0.5), (0.9, 0.5), 1)[0]  # other samples might be answered otherwise
    assert one(answers, answers).changes[MEAN].value.high > 0


def test_samples_are_paired_and_too_few_decide_nothing():
    before, after = paired((0.9, 0.2, 0.5), (0.9, 0.7, 0.8), count=12)
    after[:4, 1] = np.nan
    found = one(before, after)
    assert (found.n_samples, found.lost) == (8, 4)
    after[:7, 1] = np.nan
    few = one(before, after)
    assert few.verdict == judging.NOTHING
    assert not few.changes
    assert "Only 5 samples" in reasons_of(few)[-1]


def test_a_single_position_is_mean_and_worst_at_once():
    before, after = binary((0.4,), (0.8,), 0)
    found = one(before, after)
    assert replace(found.changes[MEAN], needed=None) == found.changes[WORST]
    assert found.verdict == judging.APPLY
    assert not found.dependence
    assert found.changes[SPREAD].value.value == 0
    mean, worst = levels_of(after).mean, levels_of(after).worst
    assert (mean.value, mean.low) == (worst.value, worst.low)


def test_at_floor_and_ceiling_log_probabilities_decide():
    low, middle, logs = np.full((8, 3), 0.05), np.full((8, 3), 0.5), np.full((8, 3), -1.0)
    assert judging.choose_measure({"accuracy": middle, "logprob": logs}) == judging.MeasureChoice("accuracy")
    below = judging.choose_measure({"accuracy": low, "logprob": logs})
    assert (below.measure, below.level) == ("logprob", pytest.approx(0.05))
    alone = judging.choose_measure({"accuracy": 1 - low})
    assert (alone.measure, alone.level) == ("accuracy", pytest.approx(0.95))
    assert judging.choose_measure({"logprob": logs}) == judging.MeasureChoice("logprob")
    assert "floor: 0.050 on average" in warnings(below, [ARM])[0]
    assert "ceiling: 0.950 on average" in warnings(alone, [ARM])[0]
    with pytest.raises(UsageError, match="nothing can be compared"):
        judging.choose_measure({})


def test_what_cannot_be_compared_is_refused():
    before = np.zeros((8, 3))
    with pytest.raises(UsageError, match="at least 1 method, and each only once, got none"):
        judge(before, [], positions=PLACES)
    with pytest.raises(UsageError, match="each only once, got a, a"):
        judge(before, [ArmScores("a", before)] * 2, positions=PLACES)
    with pytest.raises(UsageError, match=r"a: .* the same samples"):
        judge(before, [ArmScores("a", before[:4])], positions=PLACES)


def answers(*shares, count=100):
    """Right answers at so many of all samples, the same samples at every position first."""
    return np.column_stack([(np.arange(count) < round(share * count)).astype(float) for share in shares])


def test_a_gain_that_the_best_position_pays_for_evens_out():
    # Of a record: .90, .00, .00 to .35, .53, .60 was told "no harm is established".
    judgement = judge(answers(0.9, 0, 0), [ArmScores("windows", answers(0.35, 0.53, 0.6))], positions=(0, 4, 7))
    (found,) = judgement.verdicts
    assert (found.verdict, found.dependence, found.formerly_best) == (judging.EVENS, judging.SHRANK, 0)
    assert words(found) == "evens out: the best position loses 0.55"
    assert found.harms[FORMERLY_BEST] < 0.001
    assert reasons_of(found)[1].startswith("Price: formerly best position (0) -0.550 [-0.")
    said = " ".join(recommendation(judgement))
    assert said.startswith("windows evens scores out. On average over positions, accuracy goes from 0.30 to 0.49")
    assert "The best position, 0, pays (-0.55 [-0." in said


def test_a_loss_of_the_best_position_that_evens_nothing_out_is_harm():
    judgement = judge(answers(0.6, 0.3, 0.3), [ArmScores("moved", answers(0.3, 0.9, 0.9))], positions=PLACES)
    (found,) = judgement.verdicts
    assert (found.verdict, found.dependence, judgement.recommended) == (judging.HARM, judging.GREW, None)
    assert reasons_of(found)[0].startswith("Harm: formerly best position (0) -0.300")


def test_a_rise_at_all_positions_alike_leaves_position_as_it_was():
    # Of a first trial: the spread rose from .33 to .67, and "Apply" was all that was said.
    same = one(answers(0.2, 0.5, 0.8), answers(0.35, 0.65, 0.95))
    assert (same.verdict, same.dependence, same.lowered) == (judging.RAISES, judging.STEADY, 0)
    assert words(same) == "raises all, position matters as before"
    assert reasons_of(same)[-1].startswith("The dependence on position is as before: best minus worst position goes")
    few = one(answers(0.3, 0.4, 0.5, count=20), answers(0.7, 0.8, 0.8, count=20))
    assert (few.verdict, few.dependence) == (judging.RAISES, judging.OPEN)
    assert words(few) == "raises all, whether position matters less is not decided"
    unequal = judge(answers(0.1, 0.2, 0.43), [ArmScores("more", answers(0.33, 0.6, 1))], positions=PLACES)
    (found,) = unequal.verdicts
    assert (found.verdict, found.dependence) == (judging.RAISES, judging.GREW)
    assert words(found) == "raises all, position matters more"
    assert "The dependence on position grew" in recommendation(unequal)[-1]
    some = one(answers(0.5, 0.4, 0.3), answers(0.52, 0.38, 0.9))
    assert (words(some), some.lowered) == ("raises some, position matters more", 1)


def test_a_verdict_is_read_from_its_record_as_it_was():
    for after in (answers(0.35, 0.53, 0.6), answers(1, 0.1, 0.1), answers(0.9, 0, 0)):
        found = judge(answers(0.9, 0, 0), [ArmScores("method", after)], positions=PLACES)
        stored = json.loads(json.dumps(as_stored(found)))
        read = from_stored(judging.Judgement, stored)
        assert as_stored(read) == stored
        assert judging.settle(read.verdicts, found.smallest)[0] == read.verdicts
