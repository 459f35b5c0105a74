"""Judges that prefer the better response, a slot, or nothing are told apart by their verdicts in both orders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions, evaluate, evaluation_record
from posbias.evaluation.export import export_lm_eval
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.evaluation.verdicts import judge_verdicts
from posbias.report.behaviour import statements_of
from posbias.report.page import html_of, report_of
from posbias.tasks.language import LANGUAGE_TASKS, Pairwise
from posbias.tasks.language.answers import verdict_of

LINE = {"question": "q", "response_A": "good", "response_B": "bad", "label": "A>B", "pair_id": "1"}


class Judge(Responder):
    """Says what `say` makes of the text of Response A."""

    def __init__(self, say: Any) -> None:
        self.say = say

    def respond(self, requests: Any, *, generate: bool = True, score: bool = False) -> list[Reply]:
        texts = [self.say(request.text[slice(*request.passages[0])]) for request in requests]
        return [Reply(Response(text, "stop"), None) for text in texts]

    def describe(self) -> dict[str, Any]:
        return {"kind": "judge", "model": {"source": "judge"}}


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    swapped = {**LINE, "response_A": "bad", "response_B": "good", "label": "B>A"}
    return written(tmp_path / "judge.jsonl", 8 * [LINE, swapped])


@pytest.mark.parametrize(
    ("say", "accuracy", "flips", "first", "leaning"),
    [
        (lambda first: " A" if first == "good" else " B", 1.0, 0.0, 0.5, "no preference for a slot is established"),
        (lambda _: "Response A.", 0.5, 1.0, 1.0, "the first slot is preferred"),
        (lambda _: "**B** since", 0.5, 1.0, 0.0, "the second slot is preferred"),
    ],
)
def test_rates_of_known_judges(pairs: str, say: Any, accuracy: float, flips: float, first: float, leaning: str) -> None:
    found = evaluate(Pairwise(file=pairs), Judge(say), options=EvaluateOptions(count=16, score=False))
    verdicts = found.verdicts
    assert verdicts is not None
    assert [rate.value for rate in (verdicts.accuracy, verdicts.flip_rate, verdicts.first_pick)] == [
        accuracy,
        flips,
        first,
    ]
    for rate in (verdicts.accuracy, verdicts.flip_rate, verdicts.first_pick):
        assert rate.known
        assert 0 <= rate.low <= rate.value <= rate.high <= 1
    record = evaluation_record(found, {})
    assert record.scalars["verdicts"]["flip_rate"]["value"] == flips
    assert any(leaning in text for text in statements_of(record))
    assert "first response picked (1/2 without position bias)" in html_of(report_of(record))


def test_answers_that_name_neither_response_are_wrong_and_counted(pairs: str) -> None:
    found = evaluate(Pairwise(file=pairs), Judge(lambda _: "Both."), options=EvaluateOptions(count=6, score=False))
    verdicts = found.verdicts
    assert verdicts is not None
    assert (verdicts.accuracy.value, verdicts.undecided, verdicts.n_both) == (0.0, 12, 0)
    assert not verdicts.first_pick.known
    assert "12 of 12 answers name neither response" in html_of(report_of(evaluation_record(found, {})))


def test_rates_of_a_table() -> None:
    correct = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [1, 0], [np.nan, 1]], dtype=np.float64)
    first = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [1, np.nan], [np.nan, 0]], dtype=np.float64)
    found = judge_verdicts(correct, first)
    assert found.accuracy.value == pytest.approx(0.5)
    assert found.flip_rate.value == 0.5
    assert found.first_pick.value == 0.5
    assert (found.n_pairs, found.n_both, found.undecided) == (6, 4, 1)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (" A", "A"),
        ("B\n\nbecause A is wrong", "B"),
        ("Response (B)", "B"),
        ("**The better response is A**", "A"),
        ("A is weak, so my verdict is [[B]]", "B"),
        ("I cannot say", None),
        ("Banana", None),
        ("a matter of taste", None),
        ("", None),
    ],
)
def test_verdicts_are_read_by_one_rule(text: str, verdict: str | None) -> None:
    assert verdict_of(text) == verdict


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
        ({"label": "A=B"}, "judge.jsonl, line 1: field 'label' must be 'A>B' or 'B>A', got 'A=B'"),
        ({"label": None}, "got None"),
        ({"response_B": ""}, "line 1: field 'response_B' must be text, got ''"),
        ({"question": 1}, "line 1: field 'question' must be text, got 1"),
    ],
)
def test_wrong_lines_name_the_field_and_the_schema(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Pairwise(file=written(tmp_path / "judge.jsonl", [{**LINE, **change}])).examples(None, count=1)
    assert complaint in str(caught.value)
    assert str(caught.value).endswith(
        "a line holds question, response_A, response_B (texts) and label ('A>B' or 'B>A')"
    )


def test_other_tasks_have_no_verdicts_and_judges_no_lm_eval_task(tmp_path: Path) -> None:
    task = LANGUAGE_TASKS.parse("pairwise()")
    with pytest.raises(UsageError, match="judged by verdicts"):
        export_lm_eval(task, list(task.examples(None, count=1)), tmp_path)
