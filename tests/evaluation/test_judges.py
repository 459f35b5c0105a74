"""Judges that prefer the better response, a slot, or nothing are told apart by their verdicts in both orders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posbias as pb
from conftest import json_lines, refused
from evaluation.replies import Says
from evaluation.serving import chat, evaluated
from posbias import EvaluateOptions, evaluate
from posbias.evaluation.comparison import compare_evaluations
from posbias.evaluation.evaluation import judge_verdicts
from posbias.evaluation.page import statements_of
from posbias.evaluation.responders import Response
from posbias.results.page import html_of
from posbias.results.result import report_of
from posbias.tasks.language import LANGUAGE_TASKS, RULES, Pairwise

LINE = {"question": "q", "response_A": "good", "response_B": "bad", "label": "A>B", "pair_id": "1"}


def judged(say: Any, task: Any, count: int = 16) -> Any:
    """What a judge comes to that says what `say` makes of the text of Response A."""
    judge = Says(lambda request: say(request.text[slice(*request.passages[0])]), "judge")
    return evaluate(judge, task, options=EvaluateOptions(count=count, score=False))


def knows(first: str) -> str:
    return "A" if first == "good" else "B"


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    swapped = {**LINE, "response_A": "bad", "response_B": "good", "label": "B>A"}
    return json_lines(tmp_path / "judge.jsonl", *8 * [LINE, swapped])


@pytest.mark.parametrize(
    ("say", "accuracy", "flips", "first", "leaning"),
    [
        (lambda first: f" {knows(first)}", 1.0, 0.0, 0.5, "no preference for a slot is established"),
        # Half of its sentences begin with the article A.
        (lambda first: f"A careful comparison with the text shows that Response {knows(first)} is better.",
         1.0, 0.0, 0.5, "no preference for a slot is established"),
        (lambda _: "Response A.", 0.5, 1.0, 1.0, "the first slot is preferred"),
        (lambda _: "**B** since", 0.5, 1.0, 0.0, "the second slot is preferred"),
    ],
)  # fmt: skip
def test_rates_of_known_judges(pairs: str, say: Any, accuracy: float, flips: float, first: float, leaning: str) -> None:
    found = judged(say, Pairwise(file=pairs))
    rates = (found.verdicts.accuracy, found.verdicts.flip_rate, found.verdicts.first_pick)
    assert [rate.value for rate in rates] == [accuracy, flips, first]
    for rate in rates:
        assert rate.known
        assert 0 <= rate.low <= rate.value <= rate.high <= 1
    record = found.record
    assert record.scalars["verdicts"]["flip_rate"]["value"] == flips
    assert any(leaning in text for text in statements_of(found))
    assert "the first response is picked in" in html_of(report_of(record))


def test_answers_without_a_verdict_are_wrong_counted_and_past_a_share_decide_nothing(pairs: str) -> None:
    found = judged(lambda _: "Both.", Pairwise(file=pairs), 6)
    verdicts = found.verdicts
    assert (verdicts.accuracy.value, verdicts.ties, verdicts.n_both) == (0.0, 0, 0)
    assert not verdicts.first_pick.known
    record = found.record
    assert record.scalars["reading"] == {"answers": 12, "unjudged": {"unread": 12}, "thought": 0, "right": 0.0}
    assert record.scalars["measures"] == []
    page = report_of(record)
    assert page.verdict[0].startswith(
        "No conclusion from the generated answers: 12 of 12 answers cannot be judged, more than 10%: 12 unreadable"
    )
    assert "right in" not in html_of(page)
    assert "12 of 12 answers count as wrong because nothing in them can be judged: 12 without" in html_of(page)


def test_a_tenth_of_the_answers_may_be_unreadable(pairs: str) -> None:
    said = iter(["?"] * 3 + ["Response B"] * 32)
    found = judged(lambda _: next(said), Pairwise(file=pairs))
    assert (found.reading.unjudged, found.withheld) == ({"unread": 3}, "")
    assert any("the second slot is preferred" in text for text in statements_of(found))


def test_ties_are_an_outcome_of_their_own(pairs: str) -> None:
    say = {"good": "[[C]]", "bad": "Response B is better."}
    found = judged(say.get, Pairwise(file=pairs))
    verdicts = found.verdicts
    assert (verdicts.accuracy.value, verdicts.tie_rate.value, verdicts.ties) == (0.5, 0.5, 16)
    assert verdicts.n_both == 0, "no pair has a response named in both orders"
    assert not found.withheld


def test_pairs_of_one_group_count_as_one_sample(tmp_path: Path) -> None:
    """Five pairs a question that are all judged alike say no more than one pair a question."""
    hard = {**LINE, "response_A": "fine", "response_B": "poor"}
    lines = [{**(LINE if number % 2 else hard), "group": number} for number in range(12)]

    def found(lines: list[dict[str, Any]]) -> Any:
        task = Pairwise(file=json_lines(tmp_path / f"{len(lines)}.jsonl", *lines))
        say = {"good": "A", "bad": "B", "fine": "A", "poor": "A"}
        return judged(say.get, task, len(lines)).verdicts

    one, five = found(lines), found([line for line in lines for _ in range(5)])
    for rate in ("accuracy", "flip_rate", "first_pick"):
        assert getattr(five, rate) == getattr(one, rate), rate
    assert (five.n_both, five.accuracy.value) == (60, 0.75)
    apart = found([{**line, "group": None} for line in lines for _ in range(5)])
    assert apart.accuracy.high - apart.accuracy.low < 0.6 * (five.accuracy.high - five.accuracy.low)
    with refused("field 'group.str': Input should be a valid string, got []"):
        found([{**LINE, "group": []}])


def test_rates_of_a_table() -> None:
    correct = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [1, 0], [np.nan, 1], [0, 1]], dtype=np.float64)
    first = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [1, np.nan], [np.nan, 0], [np.nan, 0]], dtype=np.float64)
    tie = np.array([[0, 0], [0, 0], [0, 0], [0, 0], [0, np.nan], [np.nan, 0], [1, 0]], dtype=np.float64)
    found = judge_verdicts({"correct": correct, "first_pick": first, "tie": tie})
    assert found.accuracy.value == 0.5
    assert found.flip_rate.value == 0.5
    assert found.first_pick.value == 0.5
    assert found.tie_rate.value == pytest.approx(0.1)
    assert (found.n_both, found.ties) == (4, 1)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (" A", "A"),
        ("B\n\nbecause A is wrong", "B"),
        ("Response (B)", "B"),
        ("Assistant B", "B"),
        ("**The better response is A**", "A"),
        ("**B** since", "B"),
        ("A is weak, so my verdict is [[B]]", "B"),
        ("[[B]] is wrong; [[A]]", "A"),
        ("[[ b ]]", "B"),
        ("[[C]]", "tie"),
        ("[[A>>B]]", "A"),
        ("[[B>A]]", "B"),
        ("[[A=B]]", "tie"),
        ("\\boxed{\\text{B}}", "B"),
        ("Both are fine.\n<answer>B</answer>", "B"),
        ('{"winner": "B", "reason": "A is vague"}', "B"),
        ("It's a tie.", "tie"),
        ("Verdict: tie", "tie"),
        ("Verdict: A > B", "A"),
        ("A careful comparison shows that Response B is better.", "B"),
        ("A or B? I choose B.", "B"),
        ("Is Response A better? No, Response B is better.", "B"),
        ("A's answer is wrong. B.", "B"),
        ("A. It says Paris.\nB. It says Rome.\nTherefore B.", "B"),
        ("The correct answer is B. Response A says B, so Response A is better.", "A"),
        ("Response A is better written than Response B.", "A"),
        # An article, a first letter, a mention, a negation, a condition and a contradiction are no verdicts.
        ("A response that cites its source is better, so it should win.", None),
        ("A and B are equally good", None),
        ("A/B: the same", None),
        ("Answer: A or B", None),
        ("Answer with one letter, A or B.", None),
        ("A. It says that Paris is", None),
        ("Response A is not better than Response B.", None),
        ("If Response A is better, that is due to its length.", None),
        ("Response A is right in style, but Response B is correct", None),
        ('I write "[[A]]" if Response A is better, "[[B]]" if Response B is, "[[C]]" for a tie', None),
        ("It is false that Response B is better.", None),
        ("Who says that Response A is better has not read it.", None),
        ("Response A is the better-written.", None),
        ("I prefer A response that cites", None),
        ("Option A is correct", None),
        ("A\n\nB", None),
        ("Both.", None),
        ("I cannot say", None),
        ("Banana", None),
        ("a matter of taste", None),
        ("?", None),
        ("", None),
        ("Response A is better written, but Response B is the one that answers the question.", None),
        ("Response A is better organised. However, Response B is more accurate.", None),
        ("At first glance, Response A is better. On closer look its year is false and B's is true.", None),
        ("Response A is better than Response B in brevity, but Response B is more accurate overall.", None),
        ("Response A is concise, but Response B is better.", "B"),
        ("Response A is best avoided.", None),
        ("Response B is the best answer.", "B"),
        ("Few would say A is better", None),
        ("B: it is more accurate", "B"),
        ("B (Response B is more concise)", "B"),
        ("A, B are similar", None),
    ],
)
def test_verdicts_are_read_from_anchored_forms(text: str, verdict: str | None) -> None:
    assert RULES.parse("verdict").read(text) == verdict


def test_a_continued_prompt_is_read_with_the_sentence_that_it_ends_in(pairs: str) -> None:
    said = iter([" A. The second", "\n B because", " A careful comparison", " A or B"])
    judge = Says(lambda _: Response(next(said), "stop", continues=True))
    found = evaluate(judge, Pairwise(file=pairs), options=EvaluateOptions(count=2))
    assert found.tables["first_pick"].tolist() == [[1.0, 0.0], pytest.approx([np.nan, np.nan], nan_ok=True)]


def test_a_pattern_of_ones_own_is_the_only_form() -> None:
    said = {"Winner: B, not [[A]]": 0.0, "Winner: B. Winner: A": 1.0, "Winner: A. Winner: tie": np.nan, "[[A]]": np.nan}
    asked = {"count": 2, "score": False, "answer_pattern": "Winner: (A|B|tie)"}
    found = evaluated(lambda index, *_: chat([*said][index]), "pairwise()", **asked)
    assert found.tables["first_pick"].ravel().tolist() == pytest.approx([*said.values()], nan_ok=True)
    assert found.tables["tie"].ravel().tolist() == pytest.approx([0, 0, 1, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(A", "is not a regular expression: missing )"),
        ("A|B", "has 0 groups in brackets; allowed: 1"),
        ("(A)(B)", "has 2 groups in brackets; allowed: 1"),
        ("", "must be a regular expression of 1 to 500 characters, got ''"),
    ],
)
def test_wrong_patterns_are_refused_before_anything_is_asked(pattern: Any, complaint: str) -> None:
    with refused("evaluate: answer_pattern", complaint):
        EvaluateOptions(answer_pattern=pattern)


def test_generated_pairs_hold_their_answer_and_change_places() -> None:
    for first, second in zip(*[iter(Pairwise().examples(None, count=3))] * 2, strict=True):
        one, other = (
            [str(example.prompt)[begin:end] for begin, end in example.passages] for example in (first, second)
        )
        assert one == other[::-1]
        assert (first.answers, second.answers) == (("A",), ("B",))
        town = one[0].removesuffix(".").split()[-1]
        assert str(first.prompt).count(town) == 2, "in the question's text and in the right response"
        assert str(first.prompt).endswith("The better response is Response")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": "A=B"}, "judge.jsonl, line 1, field 'label': Input should be 'A>B' or 'B>A', got 'A=B'"),
        ({"label": None}, "got None"),
        ({"response_B": ""}, "field 'response_B': String should have at least 1 character, got ''"),
        ({"question": 1}, "field 'question': Input should be a valid string, got 1"),
    ],
)
def test_wrong_lines_name_the_field_and_the_schema(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with refused(complaint, "; its fields: question, response_A, response_B, label, group"):
        Pairwise(file=json_lines(tmp_path / "judge.jsonl", {**LINE, **change})).examples(None, count=1)


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "judge.jsonl", LINE)
    template = tmp_path / "prompt.txt"
    template.write_text("Judge by brevity. {question}\n{responses}\nBest:")
    task = LANGUAGE_TASKS.parse(f"pairwise(file={path!r}, template={str(template)!r}, chat=True)")
    prompts = [example.text for example in task.examples(None, count=1)]
    assert prompts[1] == "Judge by brevity. q\nResponse A:\nbad\n\nResponse B:\ngood\nBest:"


def test_judges_and_their_prompts_are_compared_by_question_and_corrected(tmp_path: Path) -> None:
    path, template = json_lines(tmp_path / "judge.jsonl", *30 * [LINE]), tmp_path / "prompt.txt"
    template.write_text("The good one. {question}\n{responses}\nBest:")
    plain, told = (f"pairwise(file={path!r}{words})" for words in ("", f", template={str(template)!r}"))
    biased = judged(lambda _: "A", plain, 30)
    result = compare_evaluations([biased, judged(knows, told, 30), judged(lambda _: "A", plain, 30)])
    first, right, same = result.compared
    assert first.changes == {}
    assert right.changes["mean"].value.value == 0.5
    assert right.p["mean"] < 0.001
    assert set(same.p.values()) == {1.0}
    assert "template=" in right.name
    again = pb.load_record(result.save(tmp_path / "run"))
    assert again.compared == result.compared
    with refused("another task cannot be paired"):
        compare_evaluations([biased, judged(knows, "pairwise()", 30)])
