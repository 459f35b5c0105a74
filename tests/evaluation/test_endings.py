"""How generated answers ended, and what begins with the right one."""

import numpy as np
import pytest

from posbias import EvaluateOptions, evaluate
from posbias.evaluation.endings import Undecided, endings_of, open_answers, why_undecided
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.tasks.language.answers import starts_with

TASK = "key_value(pairs=4)"


class Ending(Responder):
    """Gives each answer one of several texts with its ending, in turn; `{}` stands for the right answer."""

    def __init__(self, *texts):
        self.texts = texts

    def respond(self, requests, *, generate=True, score=False):
        said = [self.texts[number % len(self.texts)] for number in range(len(requests))]
        right = [str(request.answer).strip() for request in requests]
        return [
            Reply(Response(text.format(answer), end), None) for (text, end), answer in zip(said, right, strict=True)
        ]

    def describe(self):
        return {"kind": "ending", "model": str(self.texts)}


def evaluated(*texts, count=6):
    return evaluate(Ending(*texts), TASK, options=EvaluateOptions(count=count, positions=(0, 3)))


def test_endings_are_counted_as_they_came():
    found = evaluated(
        ("{}", "stop"),
        ("The value is", "length"),  # cut off before anything was said
        ("{} is the val", "length"),  # cut off, and right already
        ("\n\nI do not know.\nThe JSON", "length"),  # a line has ended before
        ("{}", "content_filter"),
        ("", "length"),
    ).endings
    assert (found.answers, found.finished, found.ran_on, found.cut, found.open, found.others) == (12, 2, 2, 6, 4, 2)
    assert found.contains == pytest.approx(1 / 2)
    assert found.starts == pytest.approx(6 / 10), "of an empty answer that was cut off, it is not known"
    record = evaluated(("{}", "stop")).record
    assert record.scalars["endings"] == {
        "answers": 12,
        "finished": 12,
        "ran_on": 0,
        "cut": 0,
        "open": 0,
        "others": 0,
        "contains": 1.0,
        "starts": 1.0,
    }


def test_answers_that_are_not_generated_have_no_endings():
    tables = {name: np.full((4, 2), np.nan) for name in ("cut", "correct", "starts")}
    found = endings_of(tables, [{"text": None, "finish": None}] * 8)
    assert (found.answers, found.open, found.share) == (0, 0, 0.0)
    assert found.as_record()["contains"] is None
    assert why_undecided(tables, tables) is None


@pytest.mark.parametrize(
    ("text", "answers", "goes_on", "expected"),
    [
        ("Paris.", ["Paris"], False, 1.0),
        (' "The Hague" is it', ["Hague"], False, 1.0),  # signs and articles do not count
        ("Parisian", ["Paris"], False, 0.0),  # whole words only
        ("It is Paris", ["Paris"], False, 0.0),
        ("lyon or Paris", ["Paris", "Lyon"], False, 1.0),
        ("New", ["New York"], False, 0.0),
        ("New", ["New York"], True, None),
        ("Old", ["New York"], True, 0.0),
        ("", ["New York"], True, None),
        ("", ["New York"], False, 0.0),
    ],
)
def test_an_answer_begins_with_the_right_one_as_whole_words(text, answers, goes_on, expected):
    assert starts_with(text, answers, goes_on=goes_on) == expected


def tables(opened, right=0.5, count=20):
    """Tables with so many open answers of 2 x count, the first samples', and others finished."""
    cut = np.zeros((count, 2))
    cut.flat[:opened] = 1
    return {"cut": cut, "correct": np.where(cut > 0, 0.0, (np.arange(2 * count) % 2).reshape(count, 2))}


def test_answers_decide_nothing_where_many_were_cut_off_or_the_two_differ():
    assert why_undecided(tables(0), tables(0)) is None
    assert why_undecided(tables(4), tables(4)) is None, "a tenth, and alike"
    assert why_undecided(tables(5), tables(0)) == Undecided(5, 40, 0, 40, p=None)
    assert why_undecided(tables(0), tables(20)) == Undecided(0, 40, 20, 40, p=None)
    assert why_undecided(tables(1), tables(0)) is None, "one answer is no established difference"
    large = why_undecided(tables(0, count=200), tables(30, count=200))
    assert large == Undecided(0, 400, 30, 400, p=large.p)
    assert large.p < 0.05
    right = tables(20) | {"correct": np.ones((20, 2))}
    assert not open_answers(right).any(), "what is right stays right however it goes on"
    assert why_undecided(right, right) is None
