"""Published files and one's own are read as they are; a wrong line is named in one line."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from posbias import UsageError
from posbias.tasks.language import Documents

CONTEXTS = [{"title": "T", "text": "gold", "isgold": True}, {"title": "U", "text": "other", "isgold": False}]
QUESTION = {"question": "q", "answers": ["x"], "ctxs": CONTEXTS}


def written(path: Path, lines: list[Any]) -> str:
    data = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data.encode()))
    else:
        path.write_text(data)
    return str(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "qa.jsonl, line 2: is not JSON"),
        ('{"key": "\\ud800"}', "line 2: holds text with half a character"),
        ("[1, 2]", "line 2: need a JSON object, got list"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: Any, complaint: str) -> None:
    path = written(tmp_path / "qa.jsonl", [QUESTION, line])
    with pytest.raises(UsageError) as caught:
        Documents(documents=2, file=path).examples(None, count=2)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(list(Documents(documents=2, file=path).examples(None, count=1))) == 2, (
        "lines not asked for do not matter"
    )


OWN = {
    "question": "q",
    "answers": ["x"],
    "documents": [{"text": "o", "is_gold": False}, {"text": "g", "is_gold": True}],
}


def test_ones_own_passages_are_read_like_published_ones(tmp_path: Path) -> None:
    titled = {**OWN, "documents": [{"text": "o", "title": "T", "is_gold": False, "score": 0.3}, OWN["documents"][1]]}
    path = written(tmp_path / "own.jsonl", [OWN, titled])
    prompts = [str(example.prompt) for example in Documents(file=path, documents=2).examples(None, count=2)]
    assert "\nDocument [1] g\nDocument [2] o\n" in prompts[0]
    assert "\nDocument [1] o\nDocument [2] g\n" in prompts[1]
    assert "\nDocument [1](Title: T) o\nDocument [2] g\n" in prompts[3]
    (oracle,) = Documents(file=path, setting="oracle").examples(None, count=1)
    assert "\nDocument [1] g\n\nQuestion" in str(oracle.prompt)


def test_the_example_file_is_read() -> None:
    path = Path(__file__).parents[2] / "examples" / "passages.jsonl"
    found = list(Documents(file=str(path), documents=5).examples(None, count=40))
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
    path = written(tmp_path / "own.jsonl.gz", [line])
    with pytest.raises(UsageError) as caught:
        Documents(file=path, documents=2).examples(None, count=1)
    assert f"own.jsonl.gz, line 1, {expected.replace('@', 'ctxs' if published else 'documents')}" in str(caught.value)
    assert str(caught.value).endswith("; its fields: question, answers, documents")
    assert "\n" not in str(caught.value)


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
    path = written(tmp_path / "own.jsonl", [{"question": "q", "answers": ["x"], **fields}])
    with pytest.raises(UsageError, match=re.escape(f"own.jsonl, line 1: {complaint}")):
        Documents(file=path, documents=2).examples(None, count=1)


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
    path = written(tmp_path / "own.jsonl", [line])
    found = list(Documents(documents=2, file=path).examples(None, count=1))
    assert [example.notices for example in found] == [notices, notices]
    alone = tuple(name for name in notices if name == "gold_without_answer")
    (oracle,) = Documents(documents=2, file=path, setting="oracle").examples(None, count=1)
    assert oracle.notices == alone, "what is not in the prompt is not noticed"
    (closed,) = Documents(documents=2, file=path, setting="closed_book").examples(None, count=1)
    assert closed.notices == ()


def test_a_title_may_be_empty(tmp_path: Path) -> None:
    untitled = [{**entry, "title": ""} for entry in CONTEXTS[:2]]
    path = written(tmp_path / "qa.jsonl", [{**QUESTION, "ctxs": untitled}])
    (first, _) = Documents(file=path, documents=2).examples(None, count=1)
    assert "Document [1](Title: ) gold" in str(first.prompt)


def test_oracle_and_closed_book_need_less(tmp_path: Path) -> None:
    path = written(tmp_path / "oracle.jsonl", [{**QUESTION, "ctxs": CONTEXTS[:1]}])
    (oracle,) = Documents(file=path, setting="oracle").examples(None, count=1)
    assert "Document [1](Title: T) gold" in str(oracle.prompt)
    with pytest.raises(UsageError, match=r"line 1 has 1 documents; 2 were asked \(documents=1 takes all\)"):
        Documents(file=path, documents=2).examples(None, count=1)
    bare = written(tmp_path / "bare.jsonl", [{"question": "q", "answers": ["x"]}])
    (closed,) = Documents(file=bare, setting="closed_book").examples(None, count=1)
    assert closed.prompt == "Question: q\nAnswer:"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.jsonl.*No such file"):
        Documents(documents=2, file=str(tmp_path / "none.jsonl")).examples(None, count=1)
    with pytest.raises(UsageError, match="cannot read"):
        Documents(documents=2, file=str(tmp_path)).examples(None, count=1)
    whole = gzip.compress("".join(json.dumps(QUESTION) + "\n" for _ in range(500)).encode())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is a broken gzip file"):
        Documents(documents=2, file=str(cut)).examples(None, count=500)
    short = written(tmp_path / "short.jsonl", [QUESTION])
    with pytest.raises(UsageError, match="holds 1 examples; 2 asked"):
        Documents(documents=2, file=short).examples(None, count=2)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="line 1: "):
        Documents(documents=2, file=str(binary)).examples(None, count=1)
