"""The shipped study of mitigation: its tables are those of its records, and its headline that of its answers."""

import json
from collections import Counter
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from posbias.evaluation.levels import ALPHA
from posbias.mitigation.judging import APPLY, EVENS, HARM, RAISES, Judgement, settle
from posbias.mitigation.page import words
from posbias.results.records import read_record
from posbias.results.result import from_stored

STUDY = Path(__file__).parents[2] / "studies" / "mitigation"
BESIDE = ("demo_documents_strength", "demo_documents_designed", "demo_key_value_ratios")
BESIDE += ("demo_key_value_carried", "demo_documents_carried", "demo_key_value_carried_20")
"""Records whose methods stand side by side in a table."""
GUIDE = STUDY.parents[1] / "docs" / "mitigate.md"
TOLD = ("qwen_documents_accuracy", "qwen_order_accuracy")
"""Records of generated answers that are told in a sentence, not in a table."""


@cache
def _script(name: str) -> ModuleType:
    spec = util.spec_from_file_location(name, STUDY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return _script("models")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def _rows(page: str) -> list[list[str]]:
    return [_cells(line) for line in (STUDY / f"{page}.md").read_text().splitlines()]


def test_the_verdicts_on_three_models_and_the_changes_behind_them_are_those_of_the_records(
    models: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    records = list(map(str, sorted((STUDY / "records").iterdir())))
    models.table(*records)
    verdicts = [_cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(verdicts) > 15
    shown = _rows("README")
    assert all(row in shown for row in verdicts)
    models.changes(*records)
    assert capsys.readouterr().out == (STUDY / "changes.csv").read_text()


def test_tasks_and_strengths_side_by_side_are_those_of_the_records(
    models: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    models.beside(*(str(STUDY / "records" / name) for name in BESIDE))
    assert capsys.readouterr().out == (STUDY / "beside.csv").read_text()


def test_the_generated_answers_are_those_of_the_records(models: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    judged = [str(path) for path in sorted((STUDY / "records").glob("*_accuracy*")) if path.name not in TOLD]
    models.answer_changes(*judged)
    assert capsys.readouterr().out == (STUDY / "answers.csv").read_text()


def test_the_verdicts_are_those_of_todays_rule_and_counted_as_the_page_says(models: ModuleType) -> None:
    found = []
    for directory in sorted((STUDY / "records").iterdir()):
        judgement = from_stored(Judgement, read_record(directory).scalars["judgement"])
        decided, recommended = settle(judgement.verdicts, judgement.smallest)
        assert list(map(words, decided)) == list(map(words, judgement.verdicts)), directory.name
        assert recommended == judgement.recommended
        found += decided
    count = Counter(each.verdict for each in found)
    paid = sum(each.verdict == HARM and min(each.gains.values()) < ALPHA for each in found)
    page = " ".join((STUDY / "appendix.md").read_text().split())
    assert f"Of all {len(found)} verdicts of the records, each judged by itself, {count[APPLY]} are *apply*" in page
    assert f"*apply*, {count[EVENS]} *evens out* and {count[RAISES]} *raises*; {count[HARM]} are *do not apply*" in page
    assert f"{paid} of them for methods whose mean or worst position rises" in page


def test_the_learning_curves_are_those_of_their_scores(capsys: pytest.CaptureFixture[str]) -> None:
    _script("curves").tables(json.loads((STUDY / "learning_curves.json").read_text()))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) == 13
    page = (STUDY / "key_bias_appendix.md").read_text()
    assert all(line in page.splitlines() for line in printed[:5])
    for carried in ("+2.199 [1.666, 2.730]", "-2.605 [-3.194, -1.953]"):
        assert sum(carried in line for line in printed[5:]) == 1
    assert "(+2.20 [1.67, 2.73])" in page
    assert "2.61 [1.95, 3.19]" in page


@pytest.mark.parametrize(
    "rise", [0.1, pytest.param(0.05, marks=pytest.mark.slow), pytest.param(0.3, marks=pytest.mark.slow)]
)
def test_the_samples_that_find_a_rise_are_those_of_the_guide(rise: float) -> None:
    drawn_once = _script("power").row(rise).removesuffix(" |").rpartition(" | ")[0]  # what draws anew is not shown
    assert f"\n{drawn_once} |\n" in GUIDE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "count", "way", "shown"), [(("dip", "flat"), 40, 0, "52 %"), (("flat", "slope"), 20, 1, "30 %")]
)
def test_other_intervals_miss_often_and_ours_as_often_as_the_guide_says(
    pair: tuple[str, str], count: int, way: int, shown: str
) -> None:
    bounds = _script("bounds")
    misses = [share for share, _ in bounds.missed(*pair, count, 9, None).values()]
    assert f"{misses[way]:.0%}".replace("%", " %") == shown
    assert misses[2] <= 0.05
    assert "([5 % miss](../studies/mitigation/bounds.py))" in GUIDE.read_text()
