"""Published files and one's own are read as they are; a wrong line is named in one line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import json_lines, refused
from posbias.tasks.language import Documents, Example

CONTEXTS = [{"title": "T", "text": "gold", "isgold": True}, {"title": "U", "text": "other", "isgold": False}]
QUESTION = {"question": "q", "answers": ["x"], "ctxs": CONTEXTS}


def read(file: str, count: int = 1, **how: Any) -> list[Example]:
    """Examples of two documents, or of a setting that has none or one."""
    parameters = how if "setting" in how else {"documents": 2, **how}
    return list(Documents(file=file, **parameters).examples(None, count=count))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "qa.jsonl, line 2: is not JSON"),
        ('{"key": "\\ud800"}', "line 2: holds text with half a character"),
        ("[1, 2]", "line 2: need a JSON object, got list"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: Any, complaint: str) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text(f"{json.dumps(QUESTION)}\n{line}\n")
    with refused(complaint):
        read(str(path), count=2)
    assert len(read(str(path))) == 2, "lines not asked for do not matter"


OWN = {
    "question": "q",
    "answers": ["x"],
    "documents": [{"text": "o", "is_gold": False}, {"text": "g", "is_gold": True}],
}


def test_ones_own_passages_are_read_like_published_ones(tmp_path: Path) -> None:
    titled = {**OWN, "documents": [{"text": "o", "title": "T", "is_gold": False, "score": 0.3}, OWN["documents"][1]]}
    path = json_lines(tmp_path / "own.jsonl", OWN, titled)
    prompts = [str(example.prompt) for example in read(path, count=2)]
    assert "\nDocument [1] g\nDocument [2] o\n" in prompts[0]
    assert "\nDocument [1] o\nDocument [2] g\n" in prompts[1]
    assert "\nDocument [1](Title: T) o\nDocument [2] g\n" in prompts[3]
    (oracle,) = read(path, setting="oracle")
    assert "\nDocument [1] g\n\nQuestion" in str(oracle.prompt)


def test_the_example_file_is_read() -> None:
    found = read(str(Path(__file__).parents[2] / "examples" / "passages.jsonl"), count=40, documents=5)
    assert len(found) == 200
    for example in found:
        passages = [str(example.prompt)[begin:end].lower() for begin, end in example.passages]
        told = [any(answer.lower() in passage for answer in example.answers) for passage in passages]
        assert [place for place, tells in enumerate(told) if tells] == [example.gold_position]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"question": ""}, "field 'question': String should have at least 1 character"),
        ({"question": 7}, "field 'question': Input should be a valid string, got 7"),
        ({"answers": []}, "field 'answers': List should have at least 1 item"),
        ({"answers": None}, "field 'answers': Input should be a valid list, got None"),
        ({"answers": [3]}, "field 'answers.0': Input should be a valid string"),
        ({"answers": ["x", "The ..."]}, "field 'answers.1': holds nothing but articles and punctuation, got 'The ...'"),
        ({"documents": "none"}, "field '@': Input should be a valid list"),
        ({"documents": ["o"]}, "field '@.0': Input should be a valid dictionary"),
        ({"documents": [{"text": "o", "@gold": 1}]}, "field '@.0.@gold': Input should be a valid boolean, got 1"),
        ({"documents": [{"text": "", "@gold": True}]}, "field '@.0.text': String should have at least 1 character"),
        ({"documents": [{"text": "o", "title": 3}]}, "field '@.0.title': Input should be a valid string, got 3"),
        ({"documents": [{"title": "o"}]}, "field '@.0.text': Field required, got {'title': 'o'}"),
    ],
)
def test_wrong_lines_of_documents_are_named_with_their_field(
    tmp_path: Path, change: dict[str, Any], complaint: str, published: bool
) -> None:
    line = json.dumps({**OWN, **change}).replace("@gold", "is_gold")
    if published:
        line = line.replace('"documents"', '"ctxs"').replace("is_gold", "isgold")
    expected = complaint.replace("@gold", "isgold" if published else "is_gold")
    path = tmp_path / "own.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line}\n".encode()))
    field = expected.replace("@", "ctxs" if published else "documents")
    with refused(f"own.jsonl.gz, line 1, {field}", "; its fields: question, answers, documents"):
        read(str(path))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "need one of the fields 'documents' and, as published, 'ctxs'"),
        ({"ctxs": [], "documents": []}, "need one of the fields 'documents' and, as published, 'ctxs'"),
        ({"documents": []}, "no documents are gold (is_gold true, as published isgold); need 1"),
        ({"documents": [{"text": "o"}]}, "no documents are gold"),
        ({"ctxs": CONTEXTS[:1] * 2}, "2 documents are gold"),
    ],
)
def test_lines_without_one_gold_document_are_refused(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    with refused(f"own.jsonl, line 1: {complaint}"):
        read(json_lines(tmp_path / "own.jsonl", {"question": "q", "answers": ["x"], **fields}))


GOLD = {"text": "She was born in Rome.", "title": "She", "is_gold": True}


@pytest.mark.parametrize(
    ("answer", "other", "notices"),
    [
        ("Rome", "He lives elsewhere.", ()),
        ("Paris", "He lives elsewhere.", ("gold_without_answer",)),
        ("Rome", "she was   born in ROME", ("gold_repeated", "answer_elsewhere")),
        ("Rome", "Rome is a town.", ("answer_elsewhere",)),
        ("Rome", "Romeo loves Juliet.", ()),  # part of a word
        ("rom", "Romeo loves Juliet.", ()),
        ("Paris", "Paris, too.", ("gold_without_answer", "answer_elsewhere")),
        ("the Rome", "All roads lead to: Rome!", ("answer_elsewhere",)),
        ("京", "他在北京出生。", ("gold_without_answer", "answer_elsewhere")),  # no blanks between words
        ("рим", "Например, так.", ("gold_without_answer",)),
    ],
)
def test_what_is_odd_about_a_question_is_noticed(
    tmp_path: Path, answer: str, other: str, notices: tuple[str, ...]
) -> None:
    line = {"question": "q", "answers": [answer], "documents": [GOLD, {"text": other, "is_gold": False}]}
    path = json_lines(tmp_path / "own.jsonl", line)
    assert [example.notices for example in read(path)] == [notices, notices]
    alone = tuple(name for name in notices if name == "gold_without_answer")
    (oracle,) = read(path, setting="oracle")
    assert oracle.notices == alone, "what is not in the prompt is not noticed"
    (closed,) = read(path, setting="closed_book")
    assert closed.notices == ()


def test_a_title_may_be_empty(tmp_path: Path) -> None:
    untitled = [{**entry, "title": ""} for entry in CONTEXTS]
    first, _ = read(json_lines(tmp_path / "qa.jsonl", {**QUESTION, "ctxs": untitled}))
    assert "Document [1](Title: ) gold" in str(first.prompt)


def test_oracle_and_closed_book_need_less(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "oracle.jsonl", {**QUESTION, "ctxs": CONTEXTS[:1]})
    (oracle,) = read(path, setting="oracle")
    assert "Document [1](Title: T) gold" in str(oracle.prompt)
    with refused("line 1 has 1 documents; 2 were asked (documents=1 takes all)"):
        read(path)
    (closed,) = read(json_lines(tmp_path / "bare.jsonl", {"question": "q", "answers": ["x"]}), setting="closed_book")
    assert closed.prompt == "Question: q\nAnswer:"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(QUESTION) + "\n" for _ in range(500)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    json_lines(tmp_path / "short.jsonl", QUESTION)
    for name, count, *words in (
        ("none.jsonl", 1, "cannot read", "none.jsonl", "No such file"),
        (".", 1, "cannot read"),
        ("cut.jsonl.gz", 500, "is a broken gzip file"),
        ("short.jsonl", 2, "holds 1 examples; 2 asked"),
        ("binary.jsonl", 1, "line 1: "),
    ):
        with refused(*words):
            read(str(tmp_path / name), count=count)
