"""Similar requests in a conversation: generated ones, the columns of openai/mrcr, and the published grade."""

import json
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.replies import Says
from posbias import EvaluateOptions, UsageError, evaluate
from posbias.tasks.language import LANGUAGE_TASKS

PAIRS = [
    ("write a poem about tapirs", "One."),
    ("write a song about rocks", "Rock."),
    ("write a poem about tapirs", "Two!"),
]
PROMPT = [{"role": "user", "content": "Some examples."}]
PROMPT += [
    {"role": role, "content": text} for pair in PAIRS for role, text in zip(("user", "assistant"), pair, strict=True)
]
ASKED = "Prepend aYooSG8CQg to the 2nd (1 indexed) poem about tapirs. Do not include any other text in your response."
LINE = {
    "prompt": json.dumps([*PROMPT, {"role": "user", "content": ASKED}]),
    "answer": "aYooSG8CQgTwo!",
    "random_string_to_prepend": "aYooSG8CQg",
    "n_needles": 2,
    "desired_msg_index": 5,
    "total_messages": 8,
    "n_chars": 200,
}


def written(path: Path, **changed: Any) -> str:
    path.write_text(json.dumps(LINE | changed))
    return f"mrcr(needles=2, file={str(path)!r})"


def test_a_published_line_is_asked_as_it_stands_and_for_every_reply_to_its_request(tmp_path: Path) -> None:
    first, second = LANGUAGE_TASKS.parse(written(tmp_path / "m.jsonl")).examples(None, count=1)
    assert list(second.prompt) == json.loads(LINE["prompt"])  # type: ignore[call-overload]
    assert (first.answers, second.answers) == (("aYooSG8CQgOne.",), ("aYooSG8CQgTwo!",))
    assert first.prompt[:-1] == second.prompt[:-1]
    assert first.prompt[-1]["content"] == ASKED.replace("2nd", "1st")  # type: ignore[index]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answer": "Two!"}, "m.jsonl, line 1: 'answer' must be 'random_string_to_prepend' and the message behind"),
        ({"desired_msg_index": 1}, "for whose number the last message asks, got 'aYooSG8CQgTwo!'"),
        ({"desired_msg_index": 90}, "'answer' must be"),
        ({"random_string_to_prepend": "aYoo"}, "field 'random_string_to_prepend': .* at least 10 "),
        ({"prompt": "{"}, "field 'prompt': Invalid JSON"),
        ({"prompt": "[1, 2, 3]"}, "message 0: need an object with a 'role'"),
        ({"prompt": json.dumps([*PROMPT, *PROMPT[1:3], {"role": "user", "content": ASKED}])}, "needles=3 are there"),
    ],
)
def test_a_line_that_does_not_hold_together_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        list(LANGUAGE_TASKS.parse(written(tmp_path / "m.jsonl", **changed)).examples(None, count=1))
    assert "\n" not in str(refused.value)


def test_generated_conversations_ask_for_each_of_the_same_requests_in_turn() -> None:
    task = LANGUAGE_TASKS.parse("mrcr(needles=3, others=6)")
    examples = list(task.examples(None, count=2, seed=1))
    assert examples == list(task.examples(None, count=2, seed=1))
    for number, example in zip(("1st", "2nd", "3rd") * 2, examples, strict=True):
        requests = [message["content"] for message in example.prompt if message["role"] == "user"]  # type: ignore[index]
        wanted = requests[-1].partition(f" to the {number} (1 indexed) ")[2].partition(".")[0]
        places = [2 * place + 1 for place, said in enumerate(requests) if said.endswith(wanted)]
        replies = [example.prompt[place]["content"] for place in places]  # type: ignore[index]
        assert len({*replies}) == 3
        assert example.answers[0][10:] == replies[int(number[0]) - 1]
        assert len(requests) == 10


def test_shares_are_graded_as_published_and_judged_by_position() -> None:
    """A model that gives the last reply, without its first word, whichever is asked for."""

    def last_reply(request: Any) -> str:
        asked = request.text.split(" (1 indexed) ")[1].partition(".")[0]
        contents = [message["content"] for message in request.prompt]
        said = [reply for told, reply in pairwise(contents) if told.endswith(asked)]
        return request.text.split()[1] + said[-1].partition(" ")[2]

    found = evaluate(Says(last_reply), "mrcr(needles=3)", options=EvaluateOptions(count=20))
    scores = found.tables["correct"]
    assert ((scores > 0) & (scores < 1)).all()
    assert scores[:, 2].mean() > 0.95 > scores[:, :2].mean()
    row = found.outputs[0]
    text, (answer,) = row["text"], row["answers"]
    assert scores[0, 0] == SequenceMatcher(None, text[10:], answer[10:]).ratio()
    mean = found.curves["accuracy"].means[0]
    assert 0 <= mean.low < mean.value == np.mean(scores[:, 0]) < mean.high <= 1
    assert found.curves["accuracy"].shape.label == "rising"


def test_a_text_without_the_random_beginning_is_wrong() -> None:
    rule = LANGUAGE_TASKS.parse("mrcr").answer_rule
    assert rule.right("abcdefghijOne.", ["abcdefghijOne."]) == 1
    assert rule.right("One.", ["abcdefghijOne."]) == 0
    assert rule.settled("abx", ["abcdefghijOne."])
    assert not rule.settled("abc", ["abcdefghijOne."])
