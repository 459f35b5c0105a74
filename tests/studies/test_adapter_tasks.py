"""Families of tasks of the study of adapters: one entry alone answers the question, by the rule of its task."""

import re
from importlib import util
from pathlib import Path

import pytest

from posbias import UsageError
from posbias.tasks.language import LANGUAGE_TASKS

FAMILIES = ("code_variables", "counts", "dates", "dialogue", "instructions", "json_fields", "roles", "table")


@pytest.fixture
def registered(monkeypatch):
    """The families registered, for one test."""
    monkeypatch.setattr(LANGUAGE_TASKS, "_variants", dict(LANGUAGE_TASKS._variants))
    spec = util.spec_from_file_location("adapters_tasks", Path(__file__).parents[2] / "studies/adapters/tasks.py")
    spec.loader.exec_module(util.module_from_spec(spec))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_right_by_the_rule_of_its_task_and_known_from_one_entry_alone(name, registered):
    task = LANGUAGE_TASKS[name](entries=12)
    for index in range(20):
        ((entries, question, answer),) = list(task.draw(None, count=1, seed=index))
        gold, *others = entries
        assert len(others) == 11
        assert answer in gold
        assert task.answer_rule.right(f" {answer}\nand so on", [answer]) == 1
        asked, told = (set(re.findall(r"\w+", text)) for text in (question, " ".join(others)))
        assert asked & set(re.findall(r"\w+", gold)) - told, "a word of the question stands in that entry alone"


def test_a_family_is_spelled_and_moves_its_entry(registered):
    task = LANGUAGE_TASKS.parse("dates(entries=3)")
    assert str(task) == "dates(entries=3)"
    examples = list(task.examples(None, count=1))
    assert [example.text.index(example.answers[0]) for example in examples] == [
        example.passages[place][0] for place, example in enumerate(examples)
    ]
    with pytest.raises(UsageError, match=r"dates: entries must be 2 ... 40, got 41"):
        LANGUAGE_TASKS.parse("dates(entries=41)")


def test_only_the_moved_demonstration_is_informative(registered):
    for example in LANGUAGE_TASKS.parse("example_order(shots=8, classes=4)").examples(None, count=4):
        labels = re.findall(r"Label: (\w+)", example.text)
        assert [place for place, label in enumerate(labels) if label == example.answers[0]] == [example.gold_position]


@pytest.mark.parametrize("name", [*FAMILIES, "example_order", "token_copy"])
def test_without_the_study_a_family_is_refused_with_what_to_do_instead(name):
    with pytest.raises(
        UsageError, match=rf"^task {name} left posbias after 0\.1\.0: studies/adapters/tasks\.py .* items$"
    ):
        LANGUAGE_TASKS.parse(name)
