"""Conversations from files: rendered by the tokenizer's template, taken by length, counted, refused with reasons."""

import copy
import json

import numpy as np
import pytest

from posbias import UsageError, load_prompts
from posbias.prompts.prompts import PromptSource
from posbias.prompts.tokens import render_conversation

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('unknown role\\nalien') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _say(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts, strict=False)]


@pytest.fixture
def chat_model(bos_model):
    tokenizer = copy.deepcopy(bos_model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return type(bos_model)(tokenizer)


@pytest.fixture
def taken(chat_model, tmp_path):
    """Prompts from a file of lines, and the tokens of a conversation."""
    path = tmp_path / "talk.jsonl"

    def take(lines, n_positions, count=1, model=chat_model, **settings):
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return load_prompts(PromptSource(f"chat:{path}", **settings), model, n_positions=n_positions, count=count)

    return take


def tokens(model, conversation):
    text = model.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_rendered_text_is_what_is_tokenised(chat_model, taken):
    conversation = _say("What is it?", "A whale.", "Why?")
    expected = tokens(chat_model, conversation)
    prompts = taken([conversation, "", {"messages": _say("yes")}], len(expected))
    np.testing.assert_array_equal(prompts.token_ids, [expected])
    assert chat_model.tokenizer.decode(expected) == "<user>What is it?\n<assistant>A whale.\n<user>Why?\n<assistant>"
    assert (prompts.source, prompts.describe()["conversations"]) == ("chat:talk.jsonl", [0])


def test_parts_are_handed_to_the_template(chat_model):
    chat_model.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    assert render_conversation(chat_model.tokenizer, [{"role": "user", "content": parts}]).text == "What is it?"


def test_conversations_of_the_length_are_taken_once_each_and_counted(chat_model, taken):
    # Two letters that the tokenizer has never seen, and so equally long.
    one, two = (_say(f"Take {letter}") for letter in "жф")
    length = len(tokens(chat_model, one))
    lines = [one, {"messages": one}, _say("long " * 3000), one, two, one]
    prompts = taken(lines, length, count=2)
    np.testing.assert_array_equal(prompts.token_ids, [tokens(chat_model, one), tokens(chat_model, two)])
    assert prompts.describe()["conversations"] == [0, 4]
    assert load_prompts(prompts, chat_model, n_positions=length, count=1).describe()["conversations"] == [0]
    for wanted, count, settings, words in (
        (length, 3, {}, "only 2 distinct conversations"),
        (3, 1, {}, r"no conversation has 3 tokens; there are \d+ tokens \(5\)"),
        (length, 1, {"shuffle": True}, "whole conversations"),
    ):
        with pytest.raises(UsageError, match=words):
            taken(lines, wanted, count, **settings)


@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        ([], "conversation 0 must be a list of messages"),
        ([{"role": "user"}], "conversation 0: a message needs role and content"),
        ([{"role": None, "content": "x"}], "conversation 0: the role of a message must be text such as"),
        ([{"role": "user", "content": None}], "must be text or a list of parts, got None"),
        ([{"role": "user", "content": ["x"]}], "must be text or a list of parts, got ['x']"),
        ([{"role": "user", "content": []}], "must be text or a list of parts, got []"),
        ([{"role": "alien", "content": "x"}], "conversation 0: the chat template refuses it (unknown role alien)"),
    ],
)
def test_conversations_that_do_not_fit_are_refused(chat_model, conversation, words):
    with pytest.raises(UsageError) as caught:
        render_conversation(chat_model.tokenizer, conversation)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_is_refused_with_help(bos_model, taken):
    with pytest.raises(UsageError, match=r"no chat template \(a base model\?\); write the prompts as text"):
        taken([_say("hello")], 8, model=bos_model)
    with pytest.raises(UsageError, match="no tokenizer"):
        taken([_say("hello")], 8, model=type(bos_model)(None))


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
def test_a_bad_line_is_named(taken, line):
    with pytest.raises(UsageError, match=r"talk\.jsonl, line 2"):
        taken([_say("What is it?"), line], 8)
