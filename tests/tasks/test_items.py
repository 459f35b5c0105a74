"""Items of one's own: one unit moves over its places, the others stay in order; files and rules that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import json_lines, refused
from posbias.tasks.language import Example, Items, encode

UNITS = ["Tom owns a van.", {"text": "Ann owns a boat.", "id": "ann"}, "Ida owns a bike.", "Max owns a tram."]
RECORD = {"units": UNITS, "moved": "ann", "question": "What does Ann own?", "answer": "boat"}


def asked(task: Items, tokenizer: Any = None, count: int = 1, **arguments: Any) -> list[Example]:
    return list(task.examples(tokenizer, count=count, **arguments))


@pytest.mark.parametrize(
    "marked",
    [{"moved": "ann"}, {"moved": 1}, {"moved": None, "units": [UNITS[0], {**UNITS[1], "moved": True}, *UNITS[2:]]}],  # type: ignore[dict-item]
)
def test_the_named_unit_moves_and_the_others_keep_their_order(marked: Any, tokenizer: Any, tmp_path: Path) -> None:
    examples = asked(Items(file=json_lines(tmp_path / "own.jsonl", {**RECORD, **marked})), tokenizer)
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
    json_lines(tmp_path / "own.jsonl", RECORD)
    (tmp_path / "prompt.txt").write_text("{question}\n<list>\n{units}\n</list>\nReply: \n")
    task = Items(file=str(tmp_path / "own.jsonl"), template=str(tmp_path / "prompt.txt"), entry="- {number}: {text};")
    (example,) = asked(task, positions=[0])
    listed = "- 1: Ann owns a boat.;\n- 2: Tom owns a van.;\n- 3: Ida owns a bike.;\n- 4: Max owns a tram.;"
    assert example.text == f"What does Ann own?\n<list>\n{listed}\n</list>\nReply:"


def test_the_letter_of_the_moved_option_is_the_answer(tmp_path: Path) -> None:
    record = {"units": ["saw", "plum", "van"], "moved": 1, "question": "Which is a fruit?"}
    task = Items(file=json_lines(tmp_path / "own.jsonl", record), rule="choice")
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
    file = json_lines(tmp_path / "own.jsonl", RECORD, longer)
    with refused("own.jsonl, line 2: the moved one has 6 places, in the first record 4; items"):
        asked(Items(file=file), count=2)
    lines = [example.text.split("\n") for example in asked(Items(file=file, depths=3), count=2)]
    assert [["Ann" in line for line in each].index(True) for each in lines] == [0, 2, 3, 0, 2, 5]


def test_records_of_one_group_are_one_cluster(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "own.jsonl", RECORD, {**RECORD, "group": "b"}, {**RECORD, "group": "b"})
    clusters = [example.cluster for example in asked(Items(file=file), count=3, positions=[1])]
    assert clusters == ["own.jsonl, line 1", "group b", "group b"]
    assert [example.cluster for example in asked(Items(file=json_lines(tmp_path / "one.jsonl", RECORD)))] == [""] * 4


def test_fillers_make_prompts_as_long_as_asked(tokenizer: Any, tmp_path: Path) -> None:
    file = json_lines(tmp_path / "own.jsonl", RECORD)
    fillers = json_lines(tmp_path / "fillers.jsonl", *[f"Page {page} of the register is blank." for page in range(90)])
    task = Items(file=file, fillers=fillers, depths=3).at_length(900, tokenizer)
    examples = asked(task, tokenizer)  # type: ignore[arg-type]
    assert task.n_items == 3
    assert {example.n_tokens for example in examples} == {examples[0].n_tokens}
    assert 850 < (examples[0].n_tokens or 0) <= 900
    kept = [line[line.index(" ") + 1 :] for line in examples[1].text.split("\n") if "owns" in line]
    assert [text for text in kept if "Ann" not in text] == ["Tom owns a van.", "Ida owns a bike.", "Max owns a tram."]
    with refused("prompts are made longer by a file of further units"):
        Items(file=file).at_length(900, tokenizer)
    with refused("its 90 items make prompts of"):
        Items(file=file, fillers=fillers).at_length(90_000, tokenizer)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"colour": 1}, "'colour': Extra inputs are not permitted, got 1; its fields: units, messages, tools, moved"),
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
    with refused(complaint, "own.jsonl, line 1"):
        asked(Items(file=json_lines(tmp_path / "own.jsonl", {**RECORD, **changed})))


def test_a_file_that_holds_too_little_is_refused(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "own.jsonl", RECORD)
    with refused("holds 1 records; 3 samples are asked"):
        asked(Items(file=file), count=3)
    with refused("holds no record"):
        asked(Items(file=json_lines(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("rule", "answer", "complaint"),
    [
        ("regex", "(", "is not a regular expression"),
        ("number", "many", "the answer must be a number, got 'many'"),
        ("call", '{"name": "look"}', "the answer must be a tool's name, or an object with name and arguments"),
    ],
)
def test_answers_that_a_rule_cannot_judge_are_refused(rule: str, answer: str, complaint: str, tmp_path: Path) -> None:
    file = json_lines(tmp_path / "own.jsonl", {**RECORD, "answer": answer})
    with refused("own.jsonl, line 1: field 'answer': ", complaint):
        asked(Items(file=file, rule=rule))


def test_a_pattern_has_no_text_to_score_but_a_target(tmp_path: Path) -> None:
    pattern = {**RECORD, "answer": "bo.t"}
    file = json_lines(tmp_path / "own.jsonl", pattern, {**pattern, "target": "boat"})
    targets = [example.target for example in asked(Items(file=file, rule="regex"), count=2, positions=[0])]
    assert targets == ["", " boat"]
