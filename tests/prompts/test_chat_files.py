"""Conversations from files: taken by length, counted, hashed; bad lines are named."""

import copy
import json

import pytest

from posbias import UsageError, load_prompts
from posbias.prompts.chat import chat_prompts
from posbias.prompts.prompts import PromptSource

SAID = [{"role": "user", "content": "What is it?"}]


@pytest.fixture
def chat_model(bos_model):
    tokenizer = copy.deepcopy(bos_model.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    return type(bos_model)(tokenizer)


def test_conversations_of_the_length_are_taken(chat_model, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join([json.dumps(SAID), "", json.dumps({"messages": SAID})]))
    known = chat_prompts(chat_model, [SAID])
    found = load_prompts(f"chat:{path}", chat_model, n_positions=known.n_positions, count=1)
    assert found.describe()["rendered_sha256"] == list(known.rendered_sha256)
    assert found.source == "chat:talk.jsonl"
    for source, length, count, words in (
        (f"chat:{path}", known.n_positions, 2, "only 1 distinct conversations"),
        (f"chat:{path}", known.n_positions + 1, 1, "there are"),
        (PromptSource(f"chat:{path}", shuffle=True), known.n_positions, 1, "whole conversations"),
        (PromptSource(f"chat:{path}", windows="starts"), known.n_positions, 1, "whole conversations"),
    ):
        with pytest.raises(UsageError, match=words):
            load_prompts(source, chat_model, n_positions=length, count=count)


def test_a_conversation_that_was_there_already_is_passed_over_and_counted(chat_model, tmp_path):
    path = tmp_path / "talk.jsonl"
    # Two letters that the tokenizer has never seen, and so equally long.
    one, two = ([{"role": "user", "content": f"Take {letter}"}] for letter in "жф")
    path.write_text("\n".join(json.dumps(talk) for talk in (one, {"messages": one}, SAID, one, two, one)))
    known = chat_prompts(chat_model, [one, two])
    length = known.n_positions
    found = load_prompts(f"chat:{path}", chat_model, n_positions=length, count=2).describe()
    assert found["rendered_sha256"] == list(known.rendered_sha256)
    assert found["sha256"] == known.sha256
    assert found["conversations"] == [0, 4]
    assert found["duplicates"] == 2
    assert load_prompts(f"chat:{path}", chat_model, n_positions=length, count=1).duplicates == 0


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        "[]",
        '{"text": "a"}',
        '[{"role": "user"}]',
        '[{"role": "user", "content": null}]',
        '[{"role": null, "content": "a"}]',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 3}]}',
    ],
)
def test_a_bad_line_is_named(chat_model, tmp_path, line):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps(SAID) + "\n" + line)
    with pytest.raises(UsageError, match=r"talk\.jsonl, line 2"):
        load_prompts(f"chat:{path}", chat_model, n_positions=8, count=1)
