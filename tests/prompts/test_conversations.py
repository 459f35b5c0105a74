"""Conversations are rendered by the tokenizer's template, or refused with reasons."""

import copy

import pytest

from conftest import refused
from posbias import load_prompts
from posbias.prompts.tokens import rendered

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('unknown role\\nalien') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(bos_model):
    tokenizer = copy.deepcopy(bos_model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_parts_are_handed_to_the_template(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    assert rendered([{"role": "user", "content": parts}], tokenizer).text == "What is it?"


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
def test_conversations_that_do_not_fit_are_refused(tokenizer, conversation, words):
    with refused(words):
        rendered(conversation, tokenizer)


def test_a_template_that_goes_on_for_ever_is_ended(tokenizer, monkeypatch):
    monkeypatch.setattr("posbias.prompts.tokens.TEMPLATE_SECONDS", 0.3)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
    with refused("conversation 0: the chat template refuses it (takes longer than 0.3 s)"):
        rendered([{"role": "user", "content": "x"}], tokenizer)


def test_conversations_are_no_source_of_prompts(bos_model):
    with refused("chat: left posbias after 0.1.0: put what apply_chat_template returns into"):
        load_prompts("chat:talk.jsonl", bos_model, n_positions=8, count=1)
