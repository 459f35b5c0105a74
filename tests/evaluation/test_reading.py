"""Answers that cannot be judged: what counts as such, and that above a tenth nothing is concluded from any of them."""

import itertools
import json

import pytest

import posbias as pb
from conftest import json_lines
from evaluation.replies import Says
from posbias import EvaluateOptions, UsageError, evaluate
from posbias.evaluation.levels import Requirement
from posbias.evaluation.responders import AnswerScore, Reply, Response
from posbias.evaluation.responders.base import REFUSED, UNFINISHED

TASK = "key_value(pairs=4)"
RIGHT = ("{}", "stop")
SPREAD, MEAN = Requirement.parse("spread<=0.5"), Requirement.parse("mean>=0.1")


class Ending(Says):
    """Gives each answer one of several texts with its ending, in turn; `{}` stands for the right answer."""

    def __init__(self, *texts):
        turns = itertools.cycle(texts)
        super().__init__(lambda request: ended(*next(turns), request.answer), f"ending-{len(texts)}")


def ended(text, end, answer):
    if end == REFUSED:
        return Response("", end, skipped="content filter")
    said = text.format(str(answer).strip())
    return Response(said, end, thinking=UNFINISHED if text == "thinking" else None)


def evaluated(*texts, count=6, **how):
    return evaluate(Ending(*texts), TASK, options=EvaluateOptions(count=count, positions=(0, 3), **how))


KINDS = {
    "cut off": (("Let me see.\nThe value", "length"), "2 cut off too early"),
    "empty": (("", "stop"), "2 empty"),
    "within thoughts": (("thinking", "length"), "2 still within thoughts"),
    "refused": (("", REFUSED), "2 refused by the server"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_above_a_tenth_nothing_is_concluded_whatever_the_kind(kind, tmp_path):
    lost, words = KINDS[kind]
    most = evaluated(*9 * [RIGHT], lost, *8 * [RIGHT], lost, RIGHT, count=10, require=MEAN)
    assert (most.withheld, most.curves["accuracy"].shape.label, most.requirement.met) == ("", "flat", True)
    found = evaluated(*5 * [RIGHT], lost, count=6, require=MEAN, directory=tmp_path)
    reason = f"2 of 12 answers cannot be judged, more than 10%: {words}"
    assert found.withheld == reason
    assert found.verdict[0] == f"No conclusion from the generated answers: {reason}."
    assert not found.curves
    assert not found.requirement.met
    assert found.requirement.withheld == reason
    with pytest.raises(UsageError, match="the run has no 'accuracy'"):
        pb.place([1.0, 0.5], found, options=pb.PlaceOptions(by="accuracy"))
    again = pb.load_record(tmp_path)
    assert (again.verdict, again.requirement.met, again.withheld) == (found.verdict, False, reason)


def test_kinds_count_together():
    found = evaluated(*17 * [RIGHT], ("", "stop"), ("It is", "length"), RIGHT, RIGHT, RIGHT, count=11)
    assert found.withheld == ""
    found = evaluated(*17 * [RIGHT], ("", "stop"), ("It is", "length"), ("thinking", "length"), RIGHT, RIGHT, count=11)
    assert found.withheld.startswith("3 of 22 answers cannot be judged, more than 10%: 1 still within thoughts, 1 cut")


def test_answers_cut_before_the_line_that_is_right_are_no_flat_curve():
    """50 of 50 were "No dependence on position: 0.00 everywhere"; with more tokens the end is right, the middle not."""
    found = evaluated(("Let me go through them.\nThe first", "length"), count=25)
    assert found.verdict[0].startswith("No conclusion from the generated answers: 50 of 50 answers cannot be judged")
    assert found.verdict[1] == "outputs.jsonl has them, --max-tokens allows longer answers."
    right = evaluated(("Let me go through them.\nIt is {} and", "length"), count=25)
    assert right.curves["accuracy"].means[0].value == 1, "what is right stays right however it goes on"


@pytest.mark.parametrize(
    ("rule", "text", "cut"),
    [
        ("contains", "It says\nmany", True),
        ("regex", "It says\nmany", True),
        ("equals", "It says\nmany", False),
        ("equals", "\n\nIt says", True),
        ("number", "Let me count.\nThere are", True),
        ("number", "Answer: 77\nThere are", False),
        ("call", '{"name": "cou', True),
        ("call", '{"name": "count", "arguments": {}}\nand', False),
    ],
)
def test_what_is_cut_off_follows_what_the_rule_reads(rule, text, cut, tmp_path):
    answer = {"regex": "[0-9]+", "call": "other"}.get(rule, 5)
    record = {"units": ["Tom has 5 boats.", "Ann has none."], "moved": 0, "question": "How many?", "answer": answer}
    task = f"items(file={json_lines(tmp_path / 'own.jsonl', record)!r}, rule={rule!r})"
    found = evaluate(Says(lambda _: Response(text, "length")), task, options=EvaluateOptions(count=1, score=False))
    assert [entry.reason for entry in found.unjudged] == (["cut_off"] * 2 if cut else [])


def test_subjects_whose_answers_decide_nothing_are_not_compared(tmp_path):
    options = EvaluateOptions(count=8, positions=(0, 3), require=SPREAD, directory=tmp_path)
    cut = Ending(("It is", "length"), ("", "stop"), ("", "stop"))
    found = evaluate([Ending(RIGHT), cut], TASK, options=options)
    assert found.verdict[0].startswith(
        "No conclusion from the generated answers of ending-3: 16 of 16 answers cannot be judged, more than 10%: 6 cut"
    )
    assert found.verdict[1] == "ending-3 and ending-1 are not compared by accuracy."
    for record in (found.record, pb.load_record(tmp_path).record):
        required = record.scalars["requirement"]
        assert (required["text"], required["met"], required["low"]) == ("spread<=0.5", False, None)
        assert record.scalars["verdict"] == list(found.verdict)
    assert [evaluation.requirement.met for evaluation in found.evaluations.values()] == [True, False]


def test_a_finished_run_takes_another_requirement(tmp_path):
    evaluated(RIGHT, count=8, directory=tmp_path)
    assert pb.load_record(tmp_path).requirement is None
    evaluated(RIGHT, count=8, directory=tmp_path, resume=True, require=SPREAD)
    required = json.loads((tmp_path / "record.json").read_text())["scalars"]["requirement"]
    assert (required["text"], required["met"], required["value"]) == ("spread<=0.5", True, 0.0)
    assert 0 <= required["low"] <= required["high"] <= 0.5


def test_an_order_by_another_measure_than_accuracy_says_why():
    def scoring(text):
        logprobs = itertools.cycle((-0.1, -1.1))
        return Says(lambda request: Reply(ended(text, "stop", request.answer), AnswerScore((next(logprobs),), (1,))))

    why = "By probability, since accuracy decides nothing: 16 of 16 answers cannot be judged"
    placed = pb.place([0.9, 0.1], evaluated_by(scoring("")))
    assert placed.measure == "logprob"
    assert [line for line in placed.verdict if line.startswith("By ")] == [f"{why}, more than 10%: 16 empty."]
    for run, by in ((scoring(""), "logprob"), (scoring("{}"), None)):
        placed = pb.place([0.9, 0.1], evaluated_by(run), options=pb.PlaceOptions(by=by))
        assert why not in " ".join(placed.verdict)


def evaluated_by(responder):
    return evaluate(responder, TASK, options=EvaluateOptions(count=8, positions=(0, 3)))


def test_answers_that_are_not_generated_are_not_counted():
    scores = Says(lambda _: Reply(None, AnswerScore((-1.0,), (1,))))
    found = evaluate(scores, TASK, options=EvaluateOptions(count=6, generate=False))
    assert (found.reading.answers, found.reading.unjudged, found.withheld) == (0, {}, "")
