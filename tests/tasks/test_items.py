"""Items of one's own: one unit moves over its places, the others stay in order; files and rules that are refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import save_byte_tokenizer
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.tasks.language import LANGUAGE_TASKS, Example, Items, encode
from posbias.tasks.language.rules import RULES

UNITS = ["Tom owns a van.", {"text": "Ann owns a boat.", "id": "ann"}, "Ida owns a bike.", "Max owns a tram."]
RECORD = {"units": UNITS, "moved": "ann", "question": "What does Ann own?", "answer": "boat"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte."""
    directory = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def written(path: Path, *records: Any) -> str:
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def asked(task: Items, tokenizer: Any = None, count: int = 1, **arguments: Any) -> list[Example]:
    return list(task.examples(tokenizer, count=count, **arguments))


@pytest.mark.parametrize(
    "marked",
    [{"moved": "ann"}, {"moved": 1}, {"moved": None, "units": [UNITS[0], {**UNITS[1], "moved": True}, *UNITS[2:]]}],  # type: ignore[dict-item]
)
def test_the_named_unit_moves_and_the_others_keep_their_order(marked: Any, tokenizer: Any, tmp_path: Path) -> None:
    examples = asked(Items(file=written(tmp_path / "own.jsonl", {**RECORD, **marked})), tokenizer)
    assert [example.gold_position for example in examples] == [0, 1, 2, 3]
    for place, example in enumerate(examples):
        others = ["Tom owns a van.", "Ida owns a bike.", "Max owns a tram."]
        listed = [*others[:place], "Ann owns a boat.", *others[place:]]
        lines = [f"[{number}] {text}" for number, text in enumerate(listed, 1)]
        assert example.text == "\n".join(lines) + "\n\nQuestion: What does Ann own?\nAnswer:"
        assert (example.answers, example.target) == (("boat",), " boat")
        moved = encode(example.prompt, tokenizer).token_ids[example.gold_token : example.gold_end]
        assert tokenizer.decode(moved) == lines[place]
        assert example.text[slice(*example.passages[place])] == "Ann owns a boat."


def test_a_json_file_and_a_template_of_ones_own(tmp_path: Path) -> None:
    written(tmp_path / "own.jsonl", RECORD)
    (tmp_path / "prompt.txt").write_text("{question}\n<list>\n{units}\n</list>\nReply: \n")
    task = Items(file=str(tmp_path / "own.jsonl"), template=str(tmp_path / "prompt.txt"), entry="- {number}: {text};")
    (example,) = asked(task, positions=[0])
    listed = "- 1: Ann owns a boat.;\n- 2: Tom owns a van.;\n- 3: Ida owns a bike.;\n- 4: Max owns a tram.;"
    assert example.text == f"What does Ann own?\n<list>\n{listed}\n</list>\nReply:"


def test_the_letter_of_the_moved_option_is_the_answer(tmp_path: Path) -> None:
    record = {"units": ["saw", "plum", "van"], "moved": 1, "question": "Which is a fruit?"}
    task = Items(file=written(tmp_path / "own.jsonl", record), rule="choice")
    examples = asked(task)
    assert [example.answers for example in examples] == [("A",), ("B",), ("C",)]
    assert examples[0].prompt == "Which is a fruit?\nA. plum\nB. saw\nC. van\nAnswer:"
    assert examples[2].prompt == "Which is a fruit?\nA. saw\nB. van\nC. plum\nAnswer:"
    assert examples[2].target == " C"
    assert asked(replace(task, chat=True))[2].text.endswith("C. plum\nAnswer with one letter.")
    assert (task.noted("(C) plum"), task.noted("none")) == ({"chosen": 2.0}, {"chosen": None})
    assert task.answer_rule.right("(C) plum", ("C",)) == 1
    assert task.answer_rule.right("B", ("C",)) == 0


def test_records_with_different_numbers_of_units_have_the_same_depths(tmp_path: Path) -> None:
    longer = {**RECORD, "units": [*UNITS, "Eva owns a kite.", "Leo owns a drum."]}
    file = written(tmp_path / "own.jsonl", RECORD, longer)
    with pytest.raises(
        UsageError, match=r"own.jsonl, line 2: the moved one has 6 places, in the first record 4; items"
    ):
        asked(Items(file=file), count=2)
    examples = asked(Items(file=file, depths=3), count=2)
    places = [
        example.text.split("\n").index(next(line for line in example.text.split("\n") if "Ann" in line))
        for example in examples
    ]
    assert places == [0, 2, 3, 0, 2, 5]


def test_records_of_one_group_are_one_cluster(tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", RECORD, {**RECORD, "group": "b"}, {**RECORD, "group": "b"})
    clusters = [example.cluster for example in asked(Items(file=file), count=3, positions=[1])]
    assert clusters == ["own.jsonl, line 1", "group b", "group b"]
    assert [example.cluster for example in asked(Items(file=written(tmp_path / "one.jsonl", RECORD)))] == [""] * 4


def test_fillers_make_prompts_as_long_as_asked(tokenizer: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", RECORD)
    fillers = written(tmp_path / "fillers.jsonl", *[f"Page {page} of the register is blank." for page in range(90)])
    task = Items(file=file, fillers=fillers, depths=3).at_length(900, tokenizer)
    examples = asked(task, tokenizer)  # type: ignore[arg-type]
    assert task.n_items == 3
    assert {example.n_tokens for example in examples} == {examples[0].n_tokens}
    assert 850 < (examples[0].n_tokens or 0) <= 900
    kept = [line[line.index(" ") + 1 :] for line in examples[1].text.split("\n") if "owns" in line]
    assert [text for text in kept if "Ann" not in text] == ["Tom owns a van.", "Ida owns a bike.", "Max owns a tram."]
    with pytest.raises(UsageError, match="prompts are made longer by a file of further units"):
        Items(file=file).at_length(900, tokenizer)
    with pytest.raises(UsageError, match="its 90 items make prompts of"):
        Items(file=file, fillers=fillers).at_length(90_000, tokenizer)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {"colour": 1},
            "field 'colour': Extra inputs are not permitted, got 1; its fields: units, messages, tools, moved",
        ),
        ({"units": []}, "field 'units': List should have at least 1 item"),
        ({"units": ["a", {"txt": "b"}]}, "field 'units.1.text': Field required, got {'txt': 'b'}; its fields: units"),
        ({"units": ["a", ""]}, "field 'units.1.text': String should have at least 1 character"),
        ({"units": ["a"], "moved": 0}, "the moved one has 1 of at least 2 places"),
        ({"moved": 4}, "field 'moved' must name one unit, by its index (0 ... 3) or 'id'"),
        ({"moved": None}, 'or a unit be marked "moved": true, got None'),
        ({"moved": True}, "field 'moved' must name one unit"),
        ({"units": None}, "need one of the fields 'units' and 'messages'"),
        ({"messages": [1]}, "need one of the fields 'units' and 'messages'"),
        ({"tools": [1]}, "field 'tools' goes with 'messages'"),
        ({"question": None}, "need the field 'question'"),
        ({"question": 5}, "field 'question': Input should be a valid string, got 5"),
        ({"answer": None}, "need one of the fields 'answer' (a text or number) and 'answers' (a list)"),
        ({"answers": ["a"]}, "need one of the fields 'answer'"),
        ({"answer": True}, "field 'answer' must hold texts or numbers, none empty, got True"),
        ({"answer": " "}, "field 'answer' must hold texts or numbers, none empty"),
        ({"target": "x"}, "field 'target' goes with a rule whose answer is no text; contains scores it"),
        ({"group": [1]}, "field 'group.str': Input should be a valid string, got [1]"),
    ],
)
def test_bad_records_are_refused_in_one_line_with_file_line_and_field(
    changed: Any, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        asked(Items(file=written(tmp_path / "own.jsonl", {**RECORD, **changed})))
    assert complaint in str(caught.value)
    assert "own.jsonl, line 1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spelling", "complaint"),
    [
        ("items()", "missing a required argument: 'file'"),
        (
            "items(file='x', rule='has')",
            "unknown rule 'has'; known: best_subspan_em, call, choice, contains, equals",
        ),
        ("items(file='x', rule='number(tolerance=-1)')", "tolerance must be a finite number >= 0, got -1"),
        (
            "items(file='x', rule='python(function=\"os.system\")')",
            "function must be module:function or file.py:function",
        ),
        ("items(file='x', entry='{number}')", "entry must hold, in this order, {text} or {number} {text} or {letter}"),
        ("items(file='x', entry='{text} {number}')", "entry must hold, in this order, {text} or"),
        ("items(file='x', among='all')", "among must be one of alike, "),
        ("items(file='x', among='tools', fillers='y')", "among='tools' takes no fillers"),
        ("items(file='x', filled=2)", "prompts are made longer by a file of further units"),
        ("items(file='x', depths=1)", "depths must be a whole number >= 2"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(spelling: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        LANGUAGE_TASKS.parse(spelling)


def test_a_file_that_holds_too_little_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", RECORD)
    with pytest.raises(UsageError, match="holds 1 records; 3 samples are asked"):
        asked(Items(file=file), count=3)
    with pytest.raises(UsageError, match="holds no record"):
        asked(Items(file=written(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("rule", "answer", "right", "wrong"),
    [
        ("contains", "boat", ["A Boat, of course"], ["a van"]),
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
    ],
)
def test_rules_judge_as_they_say(rule: str, answer: str, right: list[str], wrong: list[str]) -> None:
    judge = RULES.parse(rule)
    judge.check(answer)
    assert [judge.right(text, [answer]) for text in right] == [1.0] * len(right)
    assert [judge.right(text, [answer]) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("rule", "answer", "complaint"),
    [
        ("regex", "(", "is not a regular expression"),
        ("number", "many", "the answer must be a number, got 'many'"),
        ("call", '{"name": "look"}', "the answer must be a tool's name, or an object with name and arguments"),
    ],
)
def test_answers_that_a_rule_cannot_judge_are_refused(rule: str, answer: str, complaint: str, tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", {**RECORD, "answer": answer})
    with pytest.raises(UsageError, match=re.escape("own.jsonl, line 1: field 'answer': ")) as caught:
        asked(Items(file=file, rule=rule))
    assert complaint in str(caught.value)


def test_a_pattern_has_no_text_to_score_but_a_target(tmp_path: Path) -> None:
    file = written(tmp_path / "own.jsonl", {**RECORD, "answer": "bo.t"}, {**RECORD, "answer": "bo.t", "target": "boat"})
    targets = [example.target for example in asked(Items(file=file, rule="regex"), count=2, positions=[0])]
    assert targets == ["", " boat"]


def test_a_function_of_ones_own_judges(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def half(text, answers):\n    return 0.5 * (answers[0] in text)\n\ndef bad(text, answers):\n    return 2\n"
        "\ndef broken(text, answers):\n    raise KeyError('x')\n"
    )
    rule = RULES.build("python", function=f"{tmp_path / 'judge.py'}:half")
    assert rule.right("a boat", ["boat"]) == 0.5
    for name, complaint in (("bad", "must return 0 ... 1, got 2.0"), ("broken", "failed: KeyError")):
        with pytest.raises(RunError, match=complaint):
            RULES.build("python", function=f"{tmp_path / 'judge.py'}:{name}").right("a", ["b"])
    with pytest.raises(UsageError, match=r"cannot import 'no\.such\.module:f': ModuleNotFoundError"):
        RULES.build("python", function="no.such.module:f").right("a", ["b"])


class FirstLetter(Responder):
    """Names the first letter whatever is asked."""

    def respond(self, requests: Any, *, generate: bool = True, score: bool = False) -> list[Reply]:
        return [Reply(Response("A", "stop"), None) for _ in requests]

    def describe(self) -> dict[str, Any]:
        return {"kind": "first", "model": {"source": "first"}}


def test_a_preference_for_a_letter_is_seen_in_the_letters_that_are_right(tmp_path: Path) -> None:
    record = {"units": ["saw", "plum", "van", "dog"], "moved": 1, "question": "Which is a fruit?"}
    file = written(tmp_path / "own.jsonl", *[record] * 8)
    task = f"items(file={file!r}, rule='choice')"
    result = evaluate(FirstLetter(), task, options=EvaluateOptions(count=8, score=False))
    assert result.tables["correct"].tolist() == [[1.0, 0, 0, 0]] * 8
    assert result.tables["chosen"].tolist() == [[0.0] * 4] * 8
