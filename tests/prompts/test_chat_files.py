"""Conversations from files: taken by length, counted, hashed; bad lines are named."""

import copy
import json

import pytest

from posbias.errors import UsageError
from posbias.prompts import PromptSource, load_prompts
from posbias.prompts.chat import chat_prompts

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
    found = load_prompts(f"chat:{path}", chat_model, n_positions=known.n_positions, count=2)
    assert found.describe()["rendered_sha256"] == list(known.rendered_sha256) * 2
    assert found.source == "chat:talk.jsonl"
    for source, length, count, words in (
        (f"chat:{path}", known.n_positions, 3, "only 2 conversations"),
        (f"chat:{path}", known.n_positions + 1, 1, "there are"),
        (PromptSource(f"chat:{path}", shuffle=True), known.n_positions, 1, "whole conversations"),
        (PromptSource(f"chat:{path}", windows="starts"), known.n_positions, 1, "whole conversations"),
    ):
        with pytest.raises(UsageError, match=words):
            load_prompts(source, chat_model, n_positions=length, count=count)


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
