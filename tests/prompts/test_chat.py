"""Conversations: rendered as the tokenizer's template says, grouped by length, hashed, refused with reasons."""

import hashlib
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from posbias import UsageError
from posbias.prompts.chat import chat_prompts

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('unknown role\\nalien') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _say(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts, strict=False)]


@pytest.fixture
def chat_model(bos_model):
    import copy

    tokenizer = copy.deepcopy(bos_model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return type(bos_model)(tokenizer)


def test_the_rendered_text_is_what_is_tokenised_and_hashed(chat_model) -> None:
    conversation = _say("What is it?", "A whale.", "Why?")
    prompts = chat_prompts(chat_model, [conversation])
    text = "<user>What is it?\n<assistant>A whale.\n<user>Why?\n<assistant>"
    assert text == chat_model.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    expected = chat_model.tokenizer(text, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(prompts.token_ids, [expected])
    assert prompts.rendered_sha256 == (hashlib.sha256(text.encode()).hexdigest(),)
    assert prompts.describe()["rendered_sha256"] == list(prompts.rendered_sha256)
    assert prompts.describe()["source"] == "chat"
    open_ended = chat_prompts(chat_model, [conversation], generation_prompt=False)
    assert chat_model.tokenizer.decode(open_ended.token_ids[0]).endswith("Why?\n")


def test_parts_are_handed_to_the_template(chat_model) -> None:
    chat_model.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    prompts = chat_prompts(chat_model, [[{"role": "user", "content": parts}]])
    assert prompts.rendered_sha256 == (hashlib.sha256(b"What is it?").hexdigest(),)


def test_conversations_are_chosen_by_exact_length(chat_model) -> None:
    conversations = [_say("yes"), _say("a much longer question than the others"), _say("yes"), _say("yes", "no")]
    alone = [chat_prompts(chat_model, [conversation]) for conversation in conversations]
    lengths = sorted({prompts.n_positions for prompts in alone})
    chosen = [chat_prompts(chat_model, conversations, n_positions=length) for length in lengths]
    assert sum(prompts.count for prompts in chosen) == 4
    assert chosen[0].conversations == (0, 2)
    for prompts in chosen:
        expected = [alone[index].token_ids[0] for index in prompts.conversations]
        np.testing.assert_array_equal(prompts.token_ids, expected)


def test_fewer_prompts_keep_their_hashes(chat_model) -> None:
    from posbias import load_prompts

    prompts = chat_prompts(chat_model, [_say("yes"), _say("yes")])
    fewer = load_prompts(prompts, chat_model, n_positions=prompts.n_positions, count=1)
    assert fewer.describe()["rendered_sha256"] == [prompts.rendered_sha256[0]]


@pytest.mark.parametrize(
    ("conversations", "words"),
    [
        ([], "no conversation given"),
        ([[]], "conversation 0 must be a list of messages"),
        ([[{"role": "user"}]], "conversation 0: a message needs role and content"),
        (
            [_say("hello"), [{"role": None, "content": "x"}]],
            "conversation 1: the role of a message must be text such as",
        ),
        ([[{"role": "user", "content": None}]], "must be text or a list of parts, got None"),
        ([[{"role": "user", "content": ["x"]}]], "must be text or a list of parts, got ['x']"),
        ([[{"role": "user", "content": []}]], "must be text or a list of parts, got []"),
        ([[{"role": "alien", "content": "x"}]], "conversation 0: the chat template refuses it (unknown role alien)"),
        ([_say("a"), _say("a b c d e f g")], "conversations have different lengths"),
        ([_say("long " * 3000)], "the model takes at most 4096"),
    ],
)
def test_conversations_that_do_not_fit_are_refused(chat_model, conversations, words) -> None:
    with pytest.raises(UsageError) as caught:
        chat_prompts(chat_model, conversations)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_length_that_no_conversation_has_is_refused(chat_model) -> None:
    with pytest.raises(UsageError, match=r"no conversation has 3 tokens; there are \d+ tokens \(1\)"):
        chat_prompts(chat_model, [_say("hello")], n_positions=3)


def test_a_conversation_too_long_for_the_model_costs_only_those_who_ask_for_it(chat_model) -> None:
    spoken = [_say("hello"), _say("long " * 3000), _say("hello")]
    wanted = chat_prompts(chat_model, [_say("hello")]).n_positions
    assert chat_prompts(chat_model, spoken, n_positions=wanted).conversations == (0, 2)
    length = chat_prompts(replace(chat_model, max_positions=None), [spoken[1]]).n_positions
    with pytest.raises(UsageError, match=r"conversation 1 has .* the model takes at most 4096"):
        chat_prompts(chat_model, spoken, n_positions=length)


def test_a_model_without_a_template_is_refused_with_help(bos_model) -> None:
    with pytest.raises(UsageError, match=r"no chat template \(a base model\?\); write the prompts as text"):
        chat_prompts(bos_model, [_say("hello")])
    with pytest.raises(UsageError, match="no tokenizer"):
        chat_prompts(type(bos_model)(None), [_say("hello")])


def test_a_template_is_bounded_under_a_soft_limit_of_the_process_too(chat_model, monkeypatch) -> None:
    monkeypatch.setattr("posbias.prompts.templates.TEMPLATE_BYTES", 1 << 25)
    chat_model.tokenizer.chat_template = "{{ messages[0]['content'] * (1024 * 1024 * 64) }}"
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 42, before[1]))
    try:
        with ThreadPoolExecutor(4) as threads:
            outcomes = [threads.submit(chat_prompts, chat_model, [_say("hello")]).exception() for _ in range(4)]
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == 1 << 42
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert all("takes more than 33,554,432 bytes of memory" in str(error) for error in outcomes)
