"""Multiple choice: the letters stay and the right content moves; letters are read where they are named."""

import json

import numpy as np
import pytest

from posbias import EvaluateOptions, UsageError, evaluate
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.report.evaluate import tables_of
from posbias.tasks.language import MultipleChoice
from posbias.tasks.language.verdict_parsing import letter_in

LINE = {"question": "Which is a fruit?", "choices": ["saw", "plum", "van"], "answer": 1}


def written(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("answer", [1, "B"])
def test_the_right_content_moves_and_the_others_keep_their_order(answer, tmp_path):
    task = MultipleChoice(options=3, file=written(tmp_path / "own.jsonl", {**LINE, "answer": answer}))
    examples = list(task.examples(None, count=1))
    assert [example.answers for example in examples] == [("A",), ("B",), ("C",)]
    assert examples[0].prompt == "Which is a fruit?\nA. plum\nB. saw\nC. van\nAnswer:"
    assert examples[2].prompt == "Which is a fruit?\nA. saw\nB. van\nC. plum\nAnswer:"
    assert examples[2].target == " C"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**LINE, "answer": 3}, "line 1: field 'answer' must be 0 ... 2 or A ... C, got 3"),
        ({**LINE, "answer": "plum"}, "field 'answer' must be 0 ... 2 or A ... C, got 'plum'"),
        ({**LINE, "answer": True}, "field 'answer' must be"),
        ({**LINE, "choices": ["saw", "plum"]}, "field 'choices' must hold 3 different texts, got 2 different ones"),
        ({**LINE, "choices": ["saw", "saw", "van"]}, "field 'choices' must hold 3 different texts"),
        ({**LINE, "choices": ["saw", 5, "van"]}, "field 'choices' must hold 3 different texts, got 5"),
        ({**LINE, "question": ""}, "field 'question'"),
    ],
)
def test_lines_that_say_something_else_are_refused(line, message, tmp_path):
    task = MultipleChoice(options=3, file=written(tmp_path / "own.jsonl", line))
    with pytest.raises(UsageError, match=message):
        list(task.examples(None, count=1))


@pytest.mark.parametrize("options", [1, 11])
def test_numbers_of_options_without_letters_are_refused(options):
    with pytest.raises(UsageError, match="multiple_choice: options must be"):
        MultipleChoice(options=options)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (" B", "B"),
        ("B.", "B"),
        ("(C) van", "C"),
        ("**C**: because it is one", "C"),
        ("B\nQuestion:", "B"),
        ("The answer is B.", "B"),
        ("It could be A, but the answer is (C).", "C"),
        ("Answer: A\n\nAnswer: B", None),
        ("so \\boxed{C}", "C"),
        ("[[A]]", "A"),
        ("A dog is no fruit", None),
        ("the answer is a plum", None),
        ("Because", None),
        ("D", None),
        ("", None),
    ],
)
def test_a_letter_is_read_where_it_is_named(text, choice):
    assert letter_in(text, "ABC") == choice


class FirstLetter(Responder):
    """Names the first letter whatever is asked, and sometimes nothing."""

    def respond(self, requests, *, generate=True, score=False):
        return [Reply(Response("A", "stop"), None) for _ in requests]

    def describe(self):
        return {"kind": "first", "model": {"source": "first"}}


def test_a_preference_for_a_letter_is_seen():
    result = evaluate(FirstLetter(), "multiple_choice(options=4)", options=EvaluateOptions(count=8, score=False))
    np.testing.assert_array_equal(result.tables["correct"], np.tile([1.0, 0, 0, 0], (8, 1)))
    table = next(table for table in tables_of(result) if table.title.startswith("Letters chosen, 8 samples"))
    assert [row[0] for row in table.cells] == ["A", "B", "C", "D"]
    assert table.cells[0][1].startswith("1.000")
    assert {row[2] for row in table.cells} == {"0.250"}
