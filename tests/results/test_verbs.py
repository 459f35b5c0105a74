"""What the pages of single verbs say first, and draw: in numbers that can be true, and of curves that can be seen."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from behaviour_runs import measured
from posbias import DesignOptions, Record, design, place
from posbias.comparison.page import GLOSSARY, NOTE
from posbias.comparison.tables import AGAINST_FLAT, OF_FLAT, OF_HALVES, OF_ONE
from posbias.evaluation.curve import PositionCurve, Shape
from posbias.evaluation.place import Placement
from posbias.measurement.attention_statistics import HeadShare, HeadStatistic, PromptMean
from posbias.results.figures import Figure
from posbias.results.records import plain
from posbias.results.result import report_of, verdict
from posbias.statistics import Interval


def test_intervals_of_shares_end_at_one_and_open_ones_stay_open() -> None:
    spread = np.array([0.9, 0.2])
    assert PromptMean.of(spread[:, None]).high.tolist() == [1.0]
    head = HeadStatistic.of(spread[:, None, None])
    assert head.high[0] > 1, "of a number that may be any"
    assert HeadShare.of(spread[:, None, None]).high.tolist() == [1.0]
    assert np.isposinf(HeadShare.of(spread[:1, None, None]).high[0])


def placed(curve: list[float], *, count: int = 40) -> Placement:
    scores = (np.random.default_rng(0).random((count, len(curve))) < curve).astype(np.float64)
    return place([0.5, 0.3, 0.2], measured(scores))


def test_a_placement_answers_with_its_order_its_worth_and_its_curve() -> None:
    report = report_of(placed([0.1, 0.9, 0.5]))
    assert report.verdict[0] == "Best order of the passages, first to last (0 is the first given): 2,0,1."
    assert report.verdict[1].startswith("On held-out samples accuracy rises, over best first")
    assert report.verdict[2] == "No gain in accuracy is shown over best last."
    assert report.verdict[3].startswith("Over 40 samples ")
    (figure,) = report.picture
    assert isinstance(figure, Figure)
    assert figure.title == "Place 1 is used best and holds passage 0; place 0 is used worst and holds passage 2"
    assert len(figure.curves[0].y) == 3


def evaluated(kind: str = "local", values: Sequence[float] = (0.2, 0.5, 0.6)) -> Record:
    ends = tuple(Interval(value, value - 0.1, value + 0.1) for value in values)
    shape = Shape("rising", 0.01, 0.5)
    curve = PositionCurve((0, 4, 9), ends, (8, 8, 8), 8, 8, shape=shape)
    scalars = {"curves": {"accuracy": plain(asdict(curve))}, "n_items": 10}
    scalars |= {"skipped": {}, "cut_off": 0, "reading": {}, "examples": 24}
    responder = {"kind": kind, "model": {"source": "some one/a model"}}
    resolved = {"title": "a model: keys", "task": "key_value(pairs=10)", "positions": [0, 4, 9], "responder": responder}
    return Record("evaluate", {}, resolved, scalars=scalars)


def test_answers_by_position_name_best_and_worst_and_what_to_do_with_this_model() -> None:
    said = verdict(evaluated())
    assert said[0].endswith(": accuracy 0.60 [0.50, 0.70] at position 9, 0.20 [0.10, 0.30] at position 0.")
    assert "`posbias mitigate 'some one/a model' --task 'key_value(pairs=10)' --positions 0,4,9` tries" in said[1]
    assert len(verdict(evaluated("server"))) == 1, "a server does not give its weights; pairs are in no order to choose"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5, 0.5, 0.5], "accuracy is 0.50 [0.40, 0.60] at every position."),
        ([0.2, 0.6, 0.2], "accuracy 0.60 [0.50, 0.70] at position 4, 0.20 [0.10, 0.30] at positions 0, 9."),
        ([0.6, 0.2, 0.6], "accuracy 0.60 [0.50, 0.70] at positions 0, 9, 0.20 [0.10, 0.30] at position 4."),
    ],
)
def test_positions_that_are_alike_are_all_named(values: list[float], said: str) -> None:
    assert said in verdict(evaluated(values=values))[0]


def test_what_counts_as_wrong_is_not_left_out_and_skipped_examples_are_no_answers() -> None:
    record = evaluated()
    record.scalars |= {"skipped": {"9": 4}, "cut_off": 3, "empty": 2, "verdicts": {"unread": 1, "ties": 0}}
    record.resolved["max_tokens"] = 8
    rates = ("accuracy", "flip_rate", "first_pick", "tie_rate")
    record.scalars["verdicts"] |= {rate: {"value": 0.5, "low": 0.1, "high": 0.9} for rate in rates}
    record.scalars["verdicts"] |= {"n_both": 7}
    reasons = ["empty", "unread", "too_long", "empty"]
    record.scalars["unjudged"] = [{"sample": "0-1", "position": 9, "reason": reason} for reason in reasons]
    report = report_of(record)
    assert list(report.caveats) == [
        "3 of 20 generated answers ended at --max-tokens 8, not by themselves.",
        "3 of 20 answers count as wrong because nothing in them can be judged: 2 empty; 1 without what the task's rule "
        "judges (a verdict, letter, number or call).",
    ]
    assert list(report.left_out) == ["4 of 24 prompts are longer than the model's context (position 9: 4)"]


def noticed() -> dict[str, Any]:
    return {
        "gold_repeated": {"samples": [*range(9)]},
        "control_tokens": {"samples": [3], "tokens": {"</s>": 1, "<s>": 2}},
    }


def test_what_is_odd_about_samples_is_said_of_servers_and_of_several_runs_too() -> None:
    record = evaluated("chat")
    record.scalars["notices"] = noticed()
    record.resolved["count"] = 12
    repeated, spelled = report_of(record).notices
    assert repeated.startswith(
        "In 9 of 12 samples (number 0, 1, 2, 3, 4, 5, 6, 7 ...) the right passage stands in the "
    )
    assert (
        "('</s>', '<s>' 2 times): it is not known whether whatever runs the model reads them as ordinary text."
        in spelled
    )
    group = {"title": "a model: own", "n_items": 2, "n_samples": 12, "positions": [0, 1]}
    group |= {"means": {}, "series": [], "notices": noticed()}
    scalars = {"groups": [group], "pooled": []}
    first, second = report_of(Record("correlate", {}, scalars=scalars)).notices
    assert first.startswith("a model: own: In 9 of 12 samples")
    assert second.endswith("they were read as ordinary text, never as the tokens.")


def test_the_target_of_a_design_is_on_top_and_like_no_other_curve() -> None:
    (figure,) = report_of(
        design("u_shape(middle=4.0)", over="key_bias", options=DesignOptions(depth=4, n_positions=32)).record
    ).picture
    assert isinstance(figure, Figure)
    assert [curve.name for curve in figure.curves][-2:] == ["target", "flat line"]
    strokes = [curve.stroke for curve in figure.curves]
    assert len({stroke.colour for stroke in strokes}) == len({stroke.dash for stroke in strokes}) == len(strokes)


def test_the_glossary_explains_what_the_tables_columns_are_called() -> None:
    terms = {term.lower() for term in GLOSSARY}
    assert {OF_FLAT, OF_HALVES, OF_ONE, AGAINST_FLAT} <= terms
    assert OF_HALVES in NOTE
    assert OF_ONE in NOTE
