"""Rules of judging, the published ones among them, on answers worked by hand."""

import re

import pytest

from conftest import json_lines, refused
from evaluation.replies import Says
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.tasks.language import RULES


@pytest.mark.parametrize(
    ("rule", "answer", "right", "wrong"),
    [
        ("contains", "boat", ["A Boat, of course"], ["a van"]),
        ("contains", "6f-AB", [' "6F-ab"', "first\nthen 6f-ab"], ["6fab", "6f- ab"]),  # any line; punctuation counts
        ("contains", ["x", "y"], ["y"], [""]),
        ("best_subspan_em", "Wilhelm Conrad Röntgen", ["It was Wilhelm Conrad Röntgen, in 1901."], []),
        ("best_subspan_em", "The Wilhelm-Conrad Röntgen", [], ["wilhelm  conrad\tröntgen"]),  # one word in the answer
        ("best_subspan_em", ["Beatles", "Stones"], ["THE BEATLES", "beat-les"], ["beat the less"]),
        ("best_subspan_em", "1901", ["in 19014"], []),  # a span of characters, not of words
        # Only the first line counts that is not blank.
        ("best_subspan_em", "Paris", ["\nParis"], ["I do not know\nParis", "\n \r\n Rome\nParis", ""]),
        ("best_subspan_em", "Tower of the London", ["Tower of London"], []),
        ("best_subspan_em", "cat owl and dog", ["a cat, an owl and the dog"], []),
        ("best_subspan_em", "theatre of another area", ["Theatre of another area"], []),  # articles are whole words
        ("best_subspan_em", "usa", ["U.S.A."], []),
        ("best_subspan_em", "theend", ["the-end"], []),  # punctuation goes first, so the article is no longer a word
        ("best_subspan_em", "röntgens “rays”", ["Röntgen's “rays”"], ["Röntgens rays"]),  # of ASCII alone
        ("equals", "New  York", ["new york.", "\n New York\nand more"], ["in New York", "New York City"]),
        ("equals", "candle", ["candle", " Candle.", '"candle"'], ["I say candle", "candles", "paper candle"]),
        ("regex", r"\bboats?\b", ["two boats"], ["boating"]),
        ("number(tolerance=0.5)", "10", ["10.5", "9.5", "= 10"], ["10.6", "-10", "−10"]),
        ("number", "412", ["412", " It is 412 euros, not 5", "412.0"], ["", "4120", "5 or 412", "5\n412"]),
        ("number", "7", ["7 plums", "Seven.", "There are seven"], ["17", "eight, or 7", "often"]),
        (
            "call",
            "look",
            [
                '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
                'Well. <tool_call>{"name": "look", "arguments": {"a": 1}}',
                '{"name": "look", "parameters": {}}',
                '[TOOL_CALLS] [{"name": "look", "arguments": "{}"}, {"name": "fly", "arguments": {}}]',
            ],
            [
                "I would look.",
                '{"name": "look"}',
                '{"name": "fly", "arguments": {}}',
                "<tool_call>look it up</tool_call>",
            ],
        ),
        (
            "call",
            '{"name": "look", "arguments": {"at": "1"}}',
            ['{"name": "look", "arguments": {"at": "1", "in": "2"}}'],
            ['{"name": "look", "arguments": {"at": "2"}}', '{"name": "look", "arguments": {}}'],
        ),
        ("whole_words", "Nils", ["It is Nils, the cook.", "nils"], ["Nilsson", "Olga. Nils is not", "Olga\nNils"]),
        ("whole_words", "Olga", ["Olga said so"], ["the organ"]),
        # A fence is no line of an answer.
        *((rule, "Town", ["```\nTown\n```", "\n```text\nTown", "Town\n```", "```\nTown"], [])
          for rule in ("equals", "whole_words", "best_subspan_em")),
    ],
)  # fmt: skip
def test_rules_judge_as_they_say(rule, answer, right, wrong):
    judge, answers = RULES.parse(rule), [answer] if isinstance(answer, str) else answer
    for each in answers:
        judge.check(each, "here")
    assert [judge.right(text, answers) for text in right] == [1.0] * len(right)
    assert [judge.right(text, answers) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("rule", "answers", "complaint"),
    [
        ("best_subspan_em", ["The"], "holds nothing but articles"),
        ("contains", [], "at least 1 text, none empty"),
        ("contains", [""], "at least 1 text, none empty"),
    ],
)
def test_answers_that_would_always_be_right_are_refused(rule, answers, complaint):
    with refused(complaint):
        RULES.parse(rule).right("anything", answers)


def test_a_pattern_that_takes_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr("posbias.tasks.language.readings.PATTERN_SECONDS", 0.05)
    with pytest.raises(UsageError, match=r"takes longer than 0\.05 s on \d+ characters"):
        RULES.parse("regex").right("1," * 30, ["(?:.*?,){11}(P)"])


def test_a_function_of_ones_own_judges(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def half(text, answers):\n    return 0.5 * (answers[0] in text)\n\ndef bad(text, answers):\n    return 2\n"
        "\ndef broken(text, answers):\n    raise KeyError('x')\n"
    )
    rule = RULES.build("python", function=f"{tmp_path / 'judge.py'}:half")
    assert rule.right("a boat", ["boat"]) == 0.5
    for name, complaint in (("bad", "must return 0 ... 1, got 2.0"), ("broken", "failed: KeyError")):
        with pytest.raises(RunError, match=re.escape(complaint)):
            RULES.build("python", function=f"{tmp_path / 'judge.py'}:{name}").right("a", ["b"])
    with refused("cannot import 'no.such.module:f': ModuleNotFoundError"):
        RULES.build("python", function="no.such.module:f").right("a", ["b"])


def test_a_preference_for_a_letter_is_seen_in_the_letters_that_are_right(tmp_path):
    record = {"units": ["saw", "plum", "van", "dog"], "moved": 1, "question": "Which is a fruit?"}
    task = f"items(file={json_lines(tmp_path / 'own.jsonl', *[record] * 8)!r}, rule='choice')"
    result = evaluate(Says(lambda _: "A"), task, options=EvaluateOptions(count=8, score=False))
    assert result.tables["correct"].tolist() == [[1.0, 0, 0, 0]] * 8
    assert result.tables["chosen"].tolist() == [[0.0] * 4] * 8
