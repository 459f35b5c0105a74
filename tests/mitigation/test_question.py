"""Methods that act from the question on, told by which text questions begin: each prompt has its own place."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from posbias import UsageError, mitigated
from posbias.mitigation.methods.question import NOWHERE, Question
from posbias.models.loading import load_tokenizer
from posbias.tasks.language import LANGUAGE_TASKS, locate
from tiny_families import shaken_model

SCALES = [[2.0, 0.5, 1.0, 0.1]] * 3
METHODS = [
    f"context_bias(values={[[2.0, -1.0, 1.0, -3.0]] * 3}, scales={SCALES})",
    f"key_bias(biases='gamma_key(alpha=3.0)', from_question=True, scales={SCALES})",
    "positional_channel(channel=5, from_question=True)",
]
QUESTION, OTHER = [11, 12, 13], [7, 4]
PROMPTS = [[5, 6, 7, 8, *QUESTION, 9, 4, 6], [8, *QUESTION, 9, *QUESTION, 3, 4], [5, 4, 6, 9, 3, 8]]
"""Questions at 4 and, the last of two, at 5; and none. No two prompts are of one length."""
BEGINS = [4, 5, None]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""The network takes cosines of padded positions in float32."""


class Letters:
    """A tokenizer whose tokens are single letters."""

    def __call__(self, text):
        return [ord(letter) - ord("A") for letter in text]

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(chr(ord("A") + token) for token in ids)


def asked(method, network):
    return mitigated(network, method, question=Letters().decode(QUESTION, False), tokenizer=Letters())


def padded(side):
    longest = max(map(len, PROMPTS))
    gaps = [[0] * (longest - len(prompt)) for prompt in PROMPTS]
    if side == "left":
        rows = [([*gap, *prompt], [*gap, *[1] * len(prompt)]) for gap, prompt in zip(gaps, PROMPTS, strict=True)]
    else:
        rows = [([*prompt, *gap], [*[1] * len(prompt), *gap]) for gap, prompt in zip(gaps, PROMPTS, strict=True)]
    ids, shown = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(shown)


def alone(model, method, ids, begin):
    """Of one prompt, with its place as a span, or without the method."""
    ids = torch.tensor([ids])
    if begin is None:
        return model.network(ids).logits[0]
    with mitigated(model, method, passages=[(0, begin)]):
        return model.network(ids).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "qwen3", "gemma3_text", "mistral"])
def test_every_prompt_of_a_batch_has_its_own_place(family, method, side):
    model = shaken_model(family)
    ids, shown = padded(side)
    with asked(method, model.network):
        named = model.network(ids, attention_mask=shown).logits
        in_order = model.network(ids, shown).logits if family != "gemma3_text" else named
    torch.testing.assert_close(in_order, named)
    for row, prompt, begin, kept in zip(named, PROMPTS, BEGINS, shown.bool(), strict=True):
        wanted = alone(model, method, prompt, begin)
        torch.testing.assert_close(row[kept], wanted, **CLOSE)
        if begin is not None:
            assert not torch.allclose(wanted, alone(model, method, prompt, None), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_installed_serves_one_batch_after_another(method, beams):
    model = shaken_model("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams}
    ids, shown = padded("left")
    installed = asked(method, model.network).install()
    try:
        together = model.network.generate(ids, attention_mask=shown, **options)[:, ids.shape[1] :]
        separate = [
            model.network.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
            for prompt in PROMPTS
        ]
    finally:
        installed.remove()
    for row, prompt, found, begin in zip(together, PROMPTS, separate, BEGINS, strict=True):
        assert torch.equal(row, found[0, len(prompt) :])
        told = mitigated(model, method, strength=int(begin is not None), passages=[(0, begin or 1)])
        with told:
            wanted = model.network.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options
            )
        assert torch.equal(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_goes_on_from_its_cache_with_a_later_question(method):
    model, (first, second) = shaken_model("llama"), PROMPTS[:2]
    begins = [BEGINS[0]] * 4 + [len(first) + len(QUESTION) + BEGINS[1]]  # what comes token by token moves nothing

    def logits(told):
        cache, found = None, []
        for turn, begin in zip([first, *([token] for token in QUESTION), second], begins, strict=True):
            with told(begin):
                found.append(model.network(torch.tensor([turn]), past_key_values=cache, use_cache=True))
            cache = found[-1].past_key_values
        return torch.cat([each.logits for each in found], 1), cache

    with asked(method, model.network):
        found, cache = logits(lambda _: nullcontext())
    wanted, _ = logits(lambda begin: mitigated(model, method, passages=[(0, begin)]))
    torch.testing.assert_close(found, wanted)
    if "positional_channel" not in method:
        with (
            asked(method, model.network),
            pytest.raises(UsageError, match="without question=; use a cache that was filled under it"),
        ):
            model.network(torch.tensor([second]), past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_prompts_that_take_turns_keep_their_own_places(method):
    """One goes on from its cache while another is read, in another thread too; a copy of the network is under it."""
    model, (first, second) = shaken_model("llama"), PROMPTS[:2]

    def going_on(told, other):
        with told:
            read = model.network(torch.tensor([first]), use_cache=True)
            if other:
                model.network(torch.tensor([second]), use_cache=True)
            return model.network(torch.tensor([[5]]), past_key_values=read.past_key_values).logits

    wanted = going_on(mitigated(model, method, passages=[(0, BEGINS[0])]), other=False)
    torch.testing.assert_close(going_on(asked(method, model.network), other=True), wanted)

    installed = asked(method, model.network).install()
    ids = [torch.tensor([prompt]) for prompt in PROMPTS[:2]]
    alone = [model.network(each).logits for each in ids]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda turn: model.network(ids[turn % 2]).logits, range(60)))
    assert all(torch.equal(each, alone[turn % 2]) for turn, each in enumerate(found))
    copied = copy.deepcopy(model.network)
    installed.remove()
    if "positional_channel" not in method:
        assert torch.equal(copied(ids[0]).logits, alone[0])


@torch.no_grad()
def test_rejected_drafts_take_their_question_with_them():
    model, (first, second) = shaken_model("llama"), PROMPTS[:2]
    with asked(METHODS[0], model.network):
        cache = model.network(torch.tensor([first]), use_cache=True).past_key_values
        model.network(torch.tensor([second]), past_key_values=cache)
        cache.crop(-len(second))
        found = model.network(torch.tensor([[5]]), past_key_values=cache).logits
        ids = torch.tensor([first])
        cache = model.network(ids, use_cache=True).past_key_values
        ids.fill_(3)  # a buffer that is used again
        model.network(torch.tensor([second]), past_key_values=cache)
        cache.crop(-len(second))
        again = model.network(torch.tensor([[5]]), past_key_values=cache).logits
        with pytest.raises(UsageError, match="the whole network is called, not a part of it"):
            model.network.model(torch.tensor([first]))
    with mitigated(model, METHODS[0], passages=[(0, BEGINS[0])]):
        wanted = model.network(torch.tensor([[*first, 5]])).logits[:, -1:]
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(again, found)


def test_bytes_of_characters_that_were_cut_hide_no_question():
    """As in sentencepiece with byte fallback, where bytes from within a character take what follows with them."""

    class Bytes(Letters):
        def decode(self, ids, clean_up_tokenization_spaces):
            text = bytes(ids).decode(errors="replace")
            return "\ufffd" * len(ids) if text.startswith("\ufffd") else text

    for passage in ("one 我", "我我 two 我我我", "three"):
        ids = list(f"{passage}\nAsked: who?".encode())
        assert Question("\nAsked:", Bytes())._begin(ids) == len(passage.encode())


@pytest.fixture(scope="module", params=["demo", "bytes"])
def tokenizer(request, long_llama):
    return load_tokenizer("demo" if request.param == "demo" else str(long_llama))


@pytest.mark.parametrize(
    ("task", "question"),
    [
        ("key_value(pairs=4)", '}\n\nKey: "'),
        ("key_value(pairs=4, query='both')", '}\n\nKey: "'),
        ("documents(documents=3)", "\n\nQuestion:"),
    ],
)
def test_the_place_is_behind_the_last_passage(tokenizer, task, question):
    looked_for = Question(question, tokenizer)
    for example in LANGUAGE_TASKS.parse(task).examples(tokenizer, count=4, positions=(0, 2), seed=1):
        spans, _ = locate(example.prompt, example.passages, tokenizer)
        ids = tokenizer(example.prompt).input_ids
        assert looked_for._begin(ids) == spans[-1][1]
        assert looked_for._begin([*ids, *tokenizer(" 我 é" * 40).input_ids]) == spans[-1][1]
        before = looked_for._begin(ids[: spans[-1][1]])
        assert before == NOWHERE or question in tokenizer.decode(ids[before : spans[-1][1]])


def test_what_cannot_be_looked_for_is_refused_in_one_line():
    model = shaken_model("llama")
    for method, told, message in (
        (METHODS[0], {"question": "LMN"}, "question= needs tokenizer="),
        (METHODS[0], {"question": " ", "tokenizer": Letters()}, "must be the text with which questions begin, got ' '"),
        (METHODS[0], {"question": "L", "tokenizer": Letters(), "passages": [(0, 3)]}, "passages= or question=, not"),
        (
            "key_bias(biases='gamma_key(alpha=3.0)')",
            {"question": "L", "tokenizer": Letters()},
            "key_bias: question= is",
        ),
        ("ms_poe", {"question": "L", "tokenizer": Letters()}, "ms_poe: question= is for methods"),
    ):
        with pytest.raises(UsageError, match=message):
            mitigated(model.network, method, **told)
    with asked(METHODS[0], model.network), pytest.raises(UsageError, match="got embeddings: give passages="):
        model.network(inputs_embeds=model.embed(torch.tensor([PROMPTS[0]])))


@torch.no_grad()
def test_a_question_that_the_first_prompt_does_not_hold_is_warned_of_once():
    model = shaken_model("llama")
    ids = torch.tensor([PROMPTS[2]])
    plain = model.network(ids).logits
    with asked(METHODS[0], model.network):
        with pytest.warns(UserWarning, match="question='LMN' stands nowhere in the first prompt"):
            torch.testing.assert_close(model.network(ids).logits, plain, **CLOSE)
        model.network(ids)  # said once; a warning would be an error here
    with asked(METHODS[0], model.network):
        model.network(torch.tensor([PROMPTS[0]]))
        model.network(ids)  # ordinary text after a prompt that holds it is what `question` is for
