"""Samples that are added until they decide: coverage of every look, what is saved, and a run that is resumed."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

import posbias as pb
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.evaluation import compare_evaluations
from posbias.evaluation.evaluation import LengthLevel
from posbias.evaluation.requirements import Requirement, levels_of
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.evaluation.sequential import looks_of
from posbias.report import report_of
from posbias.report.page import html_of
from posbias.statistics import Interval, bounded_mean

WORST = Requirement.parse("worst>=0.8")
TASK = "key_value(pairs=3)"
OPTIONS = EvaluateOptions(count=200, score=False, require=WORST, sequential=True)


class Reader(Responder):
    """Right with a chance of its own at every place, told by a generator; gives up after `patience` requests."""

    def __init__(self, *chances, patience=None):
        self.chances, self.patience, self.asked = chances, patience, 0

    def respond(self, requests, *, generate=True, score=False):
        return [Reply(self._answer(request), None) for request in requests]

    def _answer(self, request):
        if self.patience is not None and self.asked >= self.patience:
            raise RunError("the server went away")
        self.asked += 1
        key = request.prompt.split('Key: "')[-1].split('"')[0]
        pairs = [line.split('"')[1::2] for line in request.prompt.split("\n") if '": "' in line]
        place = [name for name, _ in pairs].index(key)
        luck = np.random.default_rng(list(request.prompt.encode())).random()
        return Response(pairs[place][1] if luck < self.chances[place] else "unknown", "stop", prompt_tokens=100)

    def describe(self):
        return {"kind": "reader", "model": {"source": "reader"}}


def claims(chance, threshold, looks):
    """Exact probabilities of claiming at least the threshold, and less, at any look at one position."""
    state, reached, above, below = np.ones(1), 0, 0.0, 0.0
    for look in looks:
        added = look.count - reached
        state, reached = np.convolve(state, binom.pmf(np.arange(added + 1), added, chance)), look.count
        ends = [
            bounded_mean((np.arange(reached) < right).astype(float), 1 - look.alpha) for right in range(reached + 1)
        ]
        up = np.array([end.low >= threshold for end in ends])
        down = np.array([end.high < threshold for end in ends])
        above, below = above + state[up].sum(), below + state[down].sum()
        state = np.where(up | down, 0.0, state)
    return above, below


@pytest.mark.parametrize("count", [24, 50, 100, 200])
@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.8, 0.95])
def test_whichever_look_ends_the_run_a_bound_is_rarely_claimed_wrongly(count, threshold):
    above, _ = claims(threshold - 1e-9, threshold, looks_of(count, sequential=True))
    assert above <= 0.025, "a two-sided 95 % interval spends 2.5 % on this side"


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("cells", [1, 5, 45])
def test_cells_at_the_threshold_are_rarely_called_too_low(threshold, cells):
    """Of so many independent cells, each exactly at the threshold; Wilson's ends did so in up to half of all runs."""
    for count in (6, 12, 40):
        right = np.arange(count + 1)
        tables = [(np.arange(count) < number).astype(float)[:, None] for number in right]
        too_low = np.array([levels_of(table, curves=cells).worst.high < threshold for table in tables])
        alone = (binom.pmf(right, count, threshold) * too_low).sum()
        assert 1 - (1 - alone) ** cells <= 0.025


def test_looks_double_and_spend_five_percent():
    looks = looks_of(200, sequential=True)
    assert [look.count for look in looks] == [25, 50, 100, 200]
    assert sum(look.alpha for look in looks) == pytest.approx(0.05)
    assert [look.count for look in looks_of(12, sequential=True)] == [6, 12]
    assert [(look.count, look.alpha) for look in looks_of(30, sequential=False)] == [(30, pytest.approx(0.05))]


@pytest.mark.parametrize(
    ("chances", "count", "met"), [((1, 1, 1), 50, True), ((1, 0.3, 1), 25, False), ((1, 0.8, 1), 200, False)]
)
def test_samples_are_added_until_they_decide(chances, count, met):
    reader = Reader(*chances)
    result = evaluate(reader, TASK, options=OPTIONS)
    assert result.count == len(result.tables["correct"]) == count
    assert reader.asked == 3 * count
    assert result.check(WORST).met is met
    assert (result.sequential.decided, result.sequential.most) == (count < 200, 200)
    assert (result.sequential.tokens, result.sequential.fixed_tokens) == (300 * count, 60_000)
    alpha = {25: 1 / 8, 50: 1 / 8, 200: 1 / 2}[count] * 0.05
    assert result.check(WORST).interval == levels_of(result.measures["accuracy"], alpha=alpha).worst
    page, saved = html_of(report_of(result)), 1 - count / 200
    assert f"{3 * count} of 600 prompts" in page
    assert f"({saved:.0%} fewer)" in page
    assert "Samples were added until they decided" in page


def test_a_killed_run_goes_on_and_ends_where_it_would_have_ended(tmp_path):
    options = replace(OPTIONS, directory=tmp_path)
    with pytest.raises(RunError, match="went away"):
        evaluate(Reader(1, 1, 1, patience=100), TASK, options=options)
    again = Reader(1, 1, 1)
    resumed = evaluate(again, TASK, options=replace(options, resume=True))
    whole = evaluate(Reader(1, 1, 1), TASK, options=OPTIONS)
    assert again.asked < 150
    assert (resumed.count, resumed.sequential) == (whole.count, whole.sequential)
    np.testing.assert_array_equal(resumed.tables["correct"], whole.tables["correct"])
    saved = pb.load_record(resumed.save(tmp_path / "saved"))
    assert saved.sequential == whole.sequential
    with pytest.raises(UsageError, match="a comparison needs a fixed number of samples"):
        compare_evaluations([whole, whole])


def test_lengths_that_can_no_longer_change_the_bound_are_not_asked(long_model):
    class Short(Reader):
        tokenizer, max_positions = long_model.tokenizer, 4000

        def _answer(self, request):
            self.asked += 1
            key = request.prompt.split('Key: "')[-1].split('"')[0]
            value = request.prompt.split(f'"{key}": "')[1].split('"')[0]
            return Response(value if len(request.prompt) < 700 else "unknown", "stop")

    options = replace(OPTIONS, lengths=(500, 1000, 2000), positions="spread(3)", count=48, require=None)
    result = evaluate(Short(), "key_value", options=options)
    assert (result.lengths, result.not_evaluated) == ((500, 1000), (2000,))
    assert [level.n_complete for level in result.levels] == [24, 6]
    assert (result.effective_length.at_least, result.effective_length.below) == (500, 1000)
    assert result.sequential.prompts == 3 * 30
    assert result.sequential.fixed_prompts == 3 * 3 * 48
    assert result.sequential.fixed_tokens > 4 * result.sequential.tokens
    assert " fewer)" in result.verdict[-1]
    enough = evaluate(
        Short(), "key_value", options=replace(options, require=Requirement.parse("effective_length>=500"))
    )
    assert enough.not_evaluated == (1000, 2000)
    assert enough.check(Requirement.parse("effective_length>=500")).met


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"require": None}, "sequential needs a bound that samples can decide"),
        ({"require": replace(WORST, by_estimate=True)}, "not by the estimate"),
        ({"lengths": (500,), "threshold": 0.7}, "adds samples that decide threshold 0.7, not worst>=0.8"),
    ],
)
def test_designs_that_decide_nothing_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        replace(OPTIONS, **wrong)


def test_a_length_whose_answers_decide_nothing_is_not_decided():
    low = Interval(0.1, 0.05, 0.2)
    level = LengthLevel(256, "task", 250.0, 20, low, 0.5, low)
    assert level.reaches(0.8) is False
    assert replace(level, withheld="5 of 40 answers cannot be judged").reaches(0.8) is None
