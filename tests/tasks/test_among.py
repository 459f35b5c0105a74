"""A task among fillers: it alone moves and is asked for, what stands around is as said, and wrong files are refused."""

from pathlib import Path
from typing import Any

import pytest

from conftest import json_lines, refused
from posbias.tasks.language import LANGUAGE_TASKS


def texts(spelling: str, count: int = 3, **how: Any) -> list[Any]:
    return list(LANGUAGE_TASKS.parse(spelling).examples(None, count=count, **how))


@pytest.mark.parametrize("fillers", ["solved", "unsolved", "plain"])
@pytest.mark.parametrize("copy", [False, True])
def test_only_the_task_moves_and_stands_among_fillers_as_asked(fillers: str, copy: bool) -> None:
    for example in texts(f"task_among(tasks=4, fillers={fillers!r}, copy={copy})"):
        prompt = str(example.prompt)
        task = prompt[slice(*example.gold)]
        name = task.split(":")[0].removeprefix("Task ")
        _, *entries, closing = prompt.split("\n\n")
        assert closing == f"Answer task {name}.\nAnswer:"
        assert entries[example.gold_position] == task
        assert [at for at, entry in enumerate(entries) if entry == task] == [example.gold_position, *[4] * copy]
        others = [entry for entry in entries if entry != task]
        assert len(others) == 3
        assert all(("\nAnswer: " in entry) == (fillers == "solved") for entry in others)
        assert all(entry.startswith("Task ") != (fillers == "plain") for entry in others)
        assert example.answers[0] not in task
    same = {tuple(sorted(str(each.prompt).split("\n\n"))) for each in texts("task_among(tasks=4)", 1)}
    assert len(same) == 1, "the same parts at every position"


def test_tasks_of_a_file_are_asked_in_order_among_others_of_it(tmp_path: Path) -> None:
    lines = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(10, 16)]
    path = json_lines(tmp_path / "own.jsonl", *lines)
    examples = texts(f"task_among(tasks=4, file={path!r}, rule='number')", positions=[1])
    assert [example.answers for example in examples] == [("20",), ("22",), ("24",)]
    assert all(str(example.prompt).count("What is") == 4 for example in examples)
    with refused("holds 6 tasks; 8 are needed"):
        texts(f"task_among(tasks=8, file={path!r})")
    json_lines(tmp_path / "own.jsonl", {"question": "What?", "answer": "much"})
    with refused("own.jsonl, line 1, field 'answer': the answer must be a number, got 'much'"):
        texts(f"task_among(tasks=2, fillers='plain', file={path!r}, rule='number')", 1)
