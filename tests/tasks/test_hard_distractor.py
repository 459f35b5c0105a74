"""The distractor that moves: the gold document keeps its place, and the prompt is that of `documents`."""

import json
import re

import pytest

from posbias import UsageError
from posbias.tasks.language import LANGUAGE_TASKS, Documents, HardDistractor


def people_of(example):
    return re.findall(r"\(Title: ([^)]+)\)", example.text)


def test_a_namesake_moves_while_the_gold_document_stays():
    task = HardDistractor(documents=4)
    assert task.n_items == 3
    first, *others = list(task.examples(None, count=1, seed=3))
    (plain, *_) = Documents(documents=4).examples(None, count=1, seed=3)
    assert first.answers == plain.answers
    name = re.search(r"was (\w+ \w+) born", first.text)[1]
    golds = [text.index(f"{name} was born in {first.answers[0]}") for text in (first.text, *(e.text for e in others))]
    places = [[number for number, person in enumerate(people_of(e)) if person == name] for e in (first, *others)]
    assert all(len(place) == 2 for place in places)
    assert len({tuple(place) for place in places}) == 3
    assert len(golds) == 3
    for example in (first, *others):
        assert example.text.count(first.answers[0]) == 1, "the namesake was born elsewhere"
        assert len(set(people_of(example))) == 3
        assert example.passages == ()


def test_of_a_file_the_distractor_that_was_found_first_moves(tmp_path):
    documents = [{"text": text, "is_gold": text == "gold"} for text in ("hard", "gold", "easy", "other")]
    path = tmp_path / "passages.jsonl"
    path.write_text(json.dumps({"question": "who", "answers": ["gold"], "documents": documents}) + "\n")
    examples = list(HardDistractor(documents=4, file=str(path)).examples(None, count=1))
    listed = [re.findall(r"hard|gold|easy|other", example.text.partition("Document")[2]) for example in examples]
    assert len({texts.index("gold") for texts in listed}) == 1
    assert [[text for text in texts if text != "gold"] for texts in listed] == [
        ["hard", "easy", "other"],
        ["easy", "hard", "other"],
        ["easy", "other", "hard"],
    ]
    (without,) = HardDistractor(documents=4, file=str(path), without=True).examples(None, count=1)
    left = re.findall(r"hard|gold|easy|other", without.text.partition("Document")[2])
    assert left == [text for text in listed[-1] if text != "hard"], "as it stands with the distractor last"


def test_it_needs_a_distractor_and_a_gold_document():
    for spelling in ("hard_distractor(documents=1)", "hard_distractor(setting='oracle')"):
        with pytest.raises(UsageError, match="hard_distractor: "):
            LANGUAGE_TASKS.parse(spelling)
    assert [form.setting for form in HardDistractor().short_forms] == ["oracle", "closed_book"]
