"""Tasks on short generated entries: one of them alone answers the question, by the rule of its task."""

import re

import pytest

from posbias import UsageError
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.tasks.language.generated import Entries

TASKS = [name for name in LANGUAGE_TASKS if issubclass(LANGUAGE_TASKS[name], Entries)]


def test_there_are_eight_families():
    assert [
        *("code_variables", "counts", "dates", "dialogue", "instructions", "json_fields", "roles", "table"),
    ] == TASKS


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_is_right_by_the_rule_of_its_task_and_known_from_one_entry_alone(name):
    task = LANGUAGE_TASKS[name](entries=12)
    for index in range(20):
        (sample,) = list(task.draw(None, count=1, seed=index))
        gold, *others = sample.entries
        assert len(others) == 11
        assert sample.answer in gold
        assert task.answer_rule.right(f" {sample.answer}\nand so on", [sample.answer]) == 1
        asked, told = (set(re.findall(r"\w+", text)) for text in (sample.question, " ".join(others)))
        assert asked & set(re.findall(r"\w+", gold)) - told, "a word of the question stands in that entry alone"


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("table", "412", ["412", " It is 412 euros, not 5", "412.0"], ["", "4120", "5 or 412", "5\n412"]),
        ("counts", "7", ["7 plums", "Seven.", "There are seven"], ["17", "eight, or 7", "often"]),
        ("json_fields", '"Oslo"', ['"Oslo"', "Oslo", '"Oslo", "age": 3'], ["New Oslo", '"oslo"', '{"city": "Oslo"}']),
        ("code_variables", "957", ["957", "0x3bd", "957  # the letter"], ["957 apples", "print(957)", "'957'"]),
        (
            "dates",
            "March 3, 1921",
            ["March 3, 1921", "on 3 March 1921.", "1921-03-03", "Mar 3, 1921", "March 3rd, 1921"],
            ["March 13, 1921", "1921", "February 30, 1921", "May 1, 1900, then March 3, 1921"],
        ),
        ("roles", "Nils", ["Nils", "It is Nils, the cook.", "nils"], ["Nilsson", "Olga. Nils is not", "Olga\nNils"]),
        ("dialogue", "Olga", ["Olga said so"], ["the organ"]),
        ("instructions", "candle", ["candle", " Candle.", '"candle"'], ["I say candle", "candles", "paper candle"]),
    ],
)
def test_rules_take_other_forms_of_an_answer_and_nothing_else(name, answer, right, wrong):
    task = LANGUAGE_TASKS[name]()
    assert [text for text in right if not task.answer_rule.right(text, [answer])] == []
    assert [text for text in wrong if task.answer_rule.right(text, [answer])] == []


def test_too_many_entries_are_refused():
    with pytest.raises(UsageError, match=r"dates: entries must be 2 ... 40, got 41"):
        LANGUAGE_TASKS.parse("dates(entries=41)")
