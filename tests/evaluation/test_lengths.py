"""Evaluations at several lengths: prompts as long as asked, the effective length as a bound, and the page."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

import posbias as pb
from behaviour_runs import measured
from conftest import refused
from evaluation.replies import Says
from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.evaluation.lengths import LengthLevel, effective_length
from posbias.evaluation.levels import Requirement, levels_of, planned
from posbias.evaluation.options import LEAST_THRESHOLD
from posbias.evaluation.responders import Response, ServerResponder
from posbias.results.page import html_of
from posbias.results.result import report_of
from posbias.statistics import Interval, bounded_mean
from posbias.tasks.language import LANGUAGE_TASKS

OPTIONS = EvaluateOptions(count=20, positions="spread(3)", lengths=(500, 1000), score=False)


@pytest.fixture
def reader(long_model):
    """Knows every answer in prompts of at most 600 characters, and else those at their begin."""

    def say(request):
        key = request.prompt.split('Key: "')[-1].split('"')[0]
        place = request.prompt.index(f'"{key}": "')
        known = len(request.prompt) <= 600 or place < 200
        return request.prompt[place + len(key) + 5 :].split('"')[0] if known else "unknown"

    made = Says(say, "reader")
    made.tokenizer, made.max_positions = long_model.tokenizer, 2048
    return made


@pytest.mark.parametrize(
    ("text", "positions", "alike"), [("worst>=0.8", 3, False), ("mean>=0.7", 3, True), ("spread<=0.4", 2, False)]
)
def test_so_many_samples_as_are_planned_meet_a_bound_in_four_runs_of_five(text, positions, alike):
    """Where the plan is exact, not in many more."""
    require, generator = Requirement.parse(text), np.random.default_rng(0)
    for true, count in [*planned(require, positions).items()][1:3]:
        middle = 0.5 if require.what == "spread" else true
        curve = (
            np.linspace(middle - true / 2, middle + true / 2, positions) if middle == 0.5 else np.full(positions, true)
        )
        draws = generator.random((200, count, 1 if alike else positions))
        runs = np.broadcast_to(draws < curve, (200, count, positions)).astype(np.float64)
        met = np.mean([measured(scores).check(require).met for scores in runs])
        assert 0.8 - 3 * (0.16 / 200) ** 0.5 < met < 0.94, (true, count)


@pytest.mark.parametrize("task", ["documents", "key_value", "needle(depths=3)", "task_among"])
def test_prompts_are_as_long_as_asked(task, long_model):
    lengthened = LANGUAGE_TASKS.parse(task).at_length(700, long_model.tokenizer)
    lengths = [
        example.n_tokens
        for example in lengthened.examples(long_model.tokenizer, count=4, positions=[lengthened.n_items - 1])
    ]
    assert max(lengths) <= 710, "samples differ by a few tokens"
    more = replace(lengthened, **{lengthened.counted: lengthened.n_items + 1})
    if task.startswith("needle"):
        assert max(lengths) > 600
    else:
        longer = [prompt.n_tokens for prompt in more.examples(long_model.tokenizer, count=4, positions=[0])]
        assert max(longer) > 700, "one item more would be too long"


@pytest.mark.parametrize(
    ("task", "tokens", "message"),
    [
        ("pairwise", 500, "pairwise has a fixed number of items, so its prompts cannot be made 500 tokens long"),
        ("mrcr(file='mrcr.jsonl')", 500, "has a fixed number of items"),
        ("task_among", 100, r"task_among: its shortest prompt has \d+ tokens; 100 are asked"),
        ("key_value", 20, r"its shortest prompt has \d+ tokens; 20 are asked"),
        ("documents", 100_000, r"documents: its 40 items make prompts of \d+ tokens; 100000 are asked"),
        ("key_value", None, "counts no tokens without a tokenizer"),
    ],
)
def test_lengths_that_a_task_cannot_have_are_refused(task, tokens, message, long_model):
    with pytest.raises(UsageError, match=message):
        LANGUAGE_TASKS.parse(task).at_length(tokens or 500, long_model.tokenizer if tokens else None)


def test_what_a_reader_of_short_prompts_can_be_trusted_with(reader, tmp_path):
    result = evaluate(reader, "key_value", options=OPTIONS)
    assert result.lengths == (500, 1000)
    means = [[cell.value for cell in level.cells] for level in result.levels]
    np.testing.assert_array_equal(means, [[1, 1, 1], [1, 0, 0]])
    assert (result.effective_length.at_least, result.effective_length.below) == (500, 1000)
    assert [level.worst_depth for level in result.levels][1] == pytest.approx(result.depths[1])
    first, second = result.verdict
    assert first == "Effective length: at least 500 tokens with 0.8 accuracy at every depth (95% confidence)."
    assert second.startswith("At 1000 tokens accuracy is lower: 0.0")
    assert result.check(Requirement.parse("effective_length>=500")).met
    assert not result.check(Requirement.parse("effective_length>=501")).met
    assert not result.check(Requirement.parse("worst>=0.1")).met
    again = pb.load_record(result.save(tmp_path / "run"))
    assert again.verdict == result.verdict
    assert again.effective_length == result.effective_length
    assert again.levels == result.levels
    page = html_of(report_of(result))
    assert "depth of the answer" in page


def test_lengths_at_which_answers_decide_nothing_are_not_decided(reader, monkeypatch, tmp_path):
    """Right in short prompts; in long ones cut off before a word of the answer."""
    say, cut = reader.say, Response("Let me see.\nThe value", "length")
    monkeypatch.setattr(reader, "say", lambda request: cut if len(request.prompt) > 600 else say(request))
    options = replace(OPTIONS, directory=tmp_path, require="worst>=0")
    found = evaluate(reader, "key_value", options=options)
    assert (found.effective_length.at_least, found.effective_length.undecided) == (500, 1000)
    assert found.verdict[1].startswith("1000 tokens are not decided: 60 of 60 answers cannot be judged, more than 10%")
    assert not found.requirement.met
    assert found.requirement.withheld.startswith("at 1000 tokens 60 of 60 answers cannot be judged")
    again = pb.load_record(tmp_path)
    assert (again.verdict, again.requirement.met) == (found.verdict, False)


def test_the_page_opens_with_the_notices_of_all_lengths(reader, monkeypatch):
    own = {**reader.describe(), "own_temperature": True}
    monkeypatch.setattr(reader, "describe", lambda: own)
    (notice,) = report_of(evaluate(reader, "key_value", options=replace(OPTIONS, count=6))).notices
    assert notice.startswith("The model takes no temperature")


def test_each_length_is_resumed_from_its_own_directory(reader, tmp_path):
    options = replace(OPTIONS, directory=tmp_path, count=8)
    evaluate(reader, "key_value", options=options)
    again = evaluate(reader, "key_value", options=replace(options, resume=True))
    assert sum(each.reused for each in again.evaluations.values()) == 16
    with pytest.raises(UsageError, match="holds a finished run of posbias evaluate"):
        evaluate(reader, "key_value", options=options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": (500, 2040)}, r"prompts of 2040 tokens and 100 of an answer do not fit .* lengths up to 1948 do"),
        ({"lengths": (350, 1000)}, r"as many positions at each, got 2 at 350, 3 at 1000; --positions 'spread\(2\)'"),
    ],
)
def test_lengths_that_cannot_be_compared_are_refused(changed, message, reader):
    with pytest.raises(UsageError, match=message):
        evaluate(reader, "key_value", options=replace(OPTIONS, **changed))


@pytest.mark.parametrize(
    "wrong", [{"lengths": (1000, 500)}, {"lengths": (500, 500)}, {"lengths": (0,)}, {"threshold": 1.0}]
)
def test_options_that_say_nothing_are_refused(wrong):
    with refused("evaluate: "):
        replace(OPTIONS, **wrong)
    with refused("takes generated answers"):
        replace(OPTIONS, generate=False, score=True)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("worst>=0.6", False),
        (" worst >= .5", True),
        ("spread<=7e-1", False),
        ("spread<=0.8", True),
        ("mean>=0.8", False),
    ],
)
def test_requirements_are_judged_at_the_safe_end(text, safe):
    value = Interval(0.7, 0.5, 0.75)
    assert Requirement.parse(text).check(value, "accuracy").met is safe
    assert Requirement.parse(str(Requirement.parse(text))) == Requirement.parse(text)


NO_REQUIREMENT = "allowed: worst, mean, spread, recovery, effective_length, >= or <=, and a number"


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        *((OPTIONS, text, NO_REQUIREMENT)
          for text in ("worst>0.6", "best>=0.6", "worst>=", "worst>=high", "", "worst>=0.6 mean>=1")),
        (OPTIONS, "mean>=0.5", "allowed: worst, effective_length, with several lengths"),
        (EvaluateOptions(), "effective_length>=5", "allowed: worst, mean, spread, with one length"),
        (EvaluateOptions(generate=False), "worst>=0.5", "log-probabilities, as nothing is generated, lie in -inf"),
        (EvaluateOptions(generate=False), "spread<=-1", "log-probabilities, as nothing is generated, lie in 0 ... inf"),
        (EvaluateOptions(), "worst>=80", "require worst>=80: accuracies lie in 0 ... 1, and so must the bound"),
        (EvaluateOptions(), "worst>=-1", "accuracies lie in 0 ... 1"),
        (OPTIONS, "worst>=80", "accuracies lie in 0 ... 1"),
    ],
)  # fmt: skip
def test_requirements_that_say_nothing_are_refused(options, text, message):
    with refused(message):
        replace(options, require=text)


def level(length, value, low, high):
    worst = Interval(value, low, high)
    return LengthLevel(length, 20, worst, 0.5, worst)


def test_the_bound_ends_before_the_first_length_that_is_not_reached():
    good, open_, bad = (0.95, 0.85, 1.0), (0.85, 0.7, 0.95), (0.5, 0.3, 0.7)
    levels = [level(1000 * number, *ends) for number, ends in enumerate((good, good, open_, good), start=1)]
    bound = effective_length(levels, 0.8)
    assert (bound.at_least, bound.below, bound.undecided, bound.by_estimate) == (2000, None, 3000, 4000)
    bound = effective_length([level(1000, *bad), level(2000, *good)], 0.8)
    assert (bound.at_least, bound.below, bound.undecided, bound.by_estimate) == (0, 1000, None, 0)
    bound = effective_length([level(1000, *good)], 0.8)
    assert (bound.at_least, bound.below, bound.undecided) == (1000, None, None)


@pytest.mark.parametrize(("share", "threshold"), [(0.9, 0.8), (0.7, 0.6), (0.95, 0.9)])
def test_as_many_samples_as_are_said_to_decide_a_length_do_so_in_four_of_five_runs(share, threshold):
    count = level(1000, share, 0.0, 1.0).deciding(threshold)
    low = [bounded_mean(1.0 * (np.arange(count) < right)).low for right in range(count + 1)]
    passing = next(right for right in range(count + 1) if low[right] >= threshold)
    assert binom.sf(passing - 1, count, share) == pytest.approx(0.8, abs=0.07)


@pytest.mark.parametrize("threshold", [LEAST_THRESHOLD, 0.6, 0.8, 0.95])
def test_a_length_that_fails_is_rarely_claimed(threshold):
    """Exact: of a cell just at the threshold, the share of runs in which its low end is not below it."""
    for count in (*range(6, 50), 100, 300):
        low = [bounded_mean(1.0 * (np.arange(count) < right)).low for right in range(count + 1)]
        passing = next((right for right in range(count + 1) if low[right] >= threshold), count + 1)
        assert binom.sf(passing - 1, count, threshold) <= 0.025 + 1e-12


def test_lengths_are_asked_of_a_server_and_samples_that_are_too_long_are_counted(long_model, tmp_path):
    """A server whose context has 1,000 tokens, one per byte."""
    message = "This model's maximum context length is 1000 tokens"

    def answered(_index, _path, body):
        prompt = body["messages"][0]["content"]
        if len(prompt) > 960:
            return 400, {}, {"error": {"message": message, "code": "context_length_exceeded"}}
        key = prompt.split('Key: "')[-1].split('"')[0]
        return chat(prompt.split(f'"{key}": "')[1].split('"')[0])

    options = EvaluateOptions(count=20, positions="spread(3)", lengths=(500, 1000, 2000, 4000), score=False)
    with stand_in(answered) as server:
        responder = ServerResponder(server.address, "m", tokenizer=long_model.tokenizer)
        result = evaluate(responder, "key_value", options=options)
        assert len(server.asked) <= 3 * 60, "after a length that is too long throughout no longer one is asked"
        with pytest.raises(RunError, match="No example was answered"):
            evaluate(responder, "key_value", options=replace(options, lengths=(2000, 4000)))
    assert result.effective_length.at_least == 500
    assert max(result.too_long) in result.not_evaluated
    assert result.too_long[max(result.too_long)] == 20
    report = report_of(result)
    assert f"too long at {max(result.too_long)} tokens: 20 samples" in report.left_out
    again = pb.load_record(result.save(tmp_path / "run"))
    assert again.too_long == result.too_long


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
