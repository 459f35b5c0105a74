"""Batches and shared beginnings change nothing but the work: same tokens, same scores, in fewer tokens and passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from conftest import refused
from evaluation.replies import generated, scored
from posbias import LocalResponder, RunError, UsageError
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import Reply, Request, local
from posbias.evaluation.responders.encoding import EncodedRequest
from posbias.evaluation.responders.local import MOST_ROWS, Reading, passes_of
from tiny_families import CONFIGS, HYBRIDS, LONGROPE, READS_TOKENS, UNLISTED, VOCABULARY, shaken_model

ITEMS = [f"t{3 + index} t{20 + index} t{33 + index}" for index in range(6)]
STATES = ("falcon_h1", "mamba2", "nemotron_h", "nemotron_h-experts", "olmo_hybrid", "recurrent_gemma")
WITHOUT_STATES = [name for name in UNLISTED if name not in (*STATES, *HYBRIDS)]
EVERY_FAMILY = [*CONFIGS, *WITHOUT_STATES, *LONGROPE, *READS_TOKENS]


def words() -> PreTrainedTokenizerFast:
    """Words t0, t1 ... for the token ids of the tiny families."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def tiny(name: str, **wanted: Any) -> Any:
    model = shaken_model(name, **wanted)
    model.tokenizer = words()
    return model


def moved(gold: str = "t45 t46 t47", *, max_tokens: int = 5) -> list[Request]:
    """The gold item at every place among the same others."""
    prompts = [" ".join([*ITEMS[:place], gold, *ITEMS[place:], "t48"]) for place in range(len(ITEMS) + 1)]
    return [Request(prompt, answer=" t46 t47 t9", max_tokens=max_tokens, group="g") for prompt in prompts]


def mixed() -> list[Request]:
    """Prompts of 1 to 30 tokens, on both sides of the 24 at which LongRoPE turns otherwise; some begin alike."""
    several = [*moved(max_tokens=4)[::3], *moved("t45", max_tokens=3)[::4]]
    for end in (" t5", " t5 t6 t7 t8 t9 t10"):
        several.append(Request(several[0].prompt + end, answer=" t46 t9", max_tokens=4))
    alone = Request("t7 t8 t5 t6 t4 t9 " * 5, answer=" t9", max_tokens=3)
    return [*several, Request("t9", answer=" t9 t3", max_tokens=2), alone]


def check_against_network(model: Any, requests: Sequence[Request], replies: Sequence[Reply], tolerance: float) -> None:
    """Replies are what the network alone gives: one prompt at a time, whole each time, no cache, no code of ours."""

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model.network(torch.tensor([token_ids]), use_cache=False).logits[0]

    for request, reply in zip(requests, replies, strict=True):
        prompt, answer = (model.tokenizer(text)["input_ids"] for text in (request.prompt, request.answer))
        generated = list(prompt)
        for _ in range(request.max_tokens):
            generated.append(int(logits(generated)[-1].argmax()))
        forced = logits((prompt + answer)[:-1])[len(prompt) - 1 :]
        expected = [float(row[token]) for row, token in zip(forced.log_softmax(-1), answer, strict=True)]
        said = generated[len(prompt) : len(prompt) + (reply.response.tokens or 0)]
        assert reply.response.text == model.tokenizer.decode(said, skip_special_tokens=True)
        assert reply.score.logprobs == pytest.approx(expected, abs=tolerance)
        ranks = [int((row > row[token]).sum()) + 1 for row, token in zip(forced, answer, strict=True)]
        assert list(reply.score.ranks) == ranks


@pytest.mark.parametrize(
    ("name", "dtype", "together"),
    [
        # Factors on queries count padding as positions (Llama 4).
        *((name, torch.float32, "nothing" if name == "llama4_text" else "all lengths") for name in EVERY_FAMILY),
        # A state beside keys and values, or in place of them, cannot be cut back.
        *((name, torch.float32, "nothing") for name in (*HYBRIDS, *STATES)),
        # They take the softmax in float32, which has no room for the mask of float64.
        *((name, None, "nothing") for name in ("bloom", "gemma2", "mpt")),
    ],
)
def test_prompts_of_mixed_lengths_are_answered_together_or_one_by_one_as_each_alone(
    name: str, dtype: Any, together: str
) -> None:
    model = tiny(name, **({"dtype": dtype} if dtype else {}))
    requests = mixed()[::3] if name in (*HYBRIDS, *STATES) else mixed()
    if name in READS_TOKENS:
        model.compare_inputs()
    responder = LocalResponder(model)
    check_against_network(model, requests, responder.respond(requests, score=True), 1e-4 if dtype else 1e-9)
    assert responder.learnt()["together"] == together


def test_padding_that_overflows_after_the_trial_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("bloom")
    monkeypatch.setattr(LocalResponder, "tried", lambda *_: MOST_ROWS)
    check_against_network(model, mixed(), LocalResponder(model).respond(mixed(), score=True), 1e-9)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Numbers of tokens that the network reads meanwhile, padding among them."""
    tokens: list[int] = []
    hook = model.network.register_forward_pre_hook(
        lambda _module, _given, named: tokens.append(named["input_ids"].numel()), with_kwargs=True
    )
    with hook:
        yield tokens


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_beginnings_are_shared_in_passes_of_several_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    responder = LocalResponder(model)
    responder.respond(mixed()[:1])  # the trial
    with counted(model) as plain:
        responder.respond(mixed(), score=True)
    monkeypatch.setattr(local, "FIXED", 0)  # so that what is shared is never cheaper run again
    with counted(model) as sharing:
        replies = responder.respond(mixed(), score=True)
    check_against_network(model, mixed(), replies, 1e-9)
    assert sum(sharing) < sum(plain)


def test_every_distinct_beginning_is_run_once_and_answers_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny("llama"), moved()
    # Each prompt has 22 tokens; the gold at place k differs from the next prompt after 3 k of them.
    plain = 7 * 22
    floor = 22 + sum(22 - 3 * place for place in range(6))

    responder = LocalResponder(model)
    responder.respond(requests[:1])  # the trial

    def processed() -> int:
        with counted(model) as tokens:
            responder.respond(requests, generate=False, score=True)
        return sum(tokens)

    assert processed() == plain + 2 * len(requests), "a pass costs more than these tokens"
    monkeypatch.setattr(local, "FIXED", 0)
    assert processed() == floor + 2 * len(requests)
    monkeypatch.setattr(local, "FIXED", 8)
    assert floor + 2 * len(requests) < processed() < plain


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(0, 12),
    st.booleans(),
)
def test_every_sequence_is_run_once_and_goes_on_from_the_one_before(
    lists: list[list[int]], fixed: int, together: bool
) -> None:
    readings = sorted([reading(*pair) for pair in enumerate(lists)], key=lambda each: each.token_ids)
    planned = [*passes_of(readings, fixed=fixed, most=20 if together else 0)]
    assert sorted(each.index for group, _ in planned for each in group) == list(range(len(lists)))
    taken, before = 0, None
    for group, shared in planned:
        lengths = [len(each.token_ids) for each in group]
        assert len(group) == 1 or (together and not shared and len(group) * max(lengths) <= 20)
        assert max(lengths) - min(lengths) <= fixed
        if shared:
            assert lists[before.index][:shared] == lists[group[0].index][:shared]
            assert fixed < shared < lengths[0]
            assert shared <= min(before.alike, group[0].alike)
        before, taken = group[0], taken + fixed + len(group) * max(lengths) - shared
    assert taken <= sum(fixed + len(item) for item in lists)


def reading(index: int, prompt: list[int]) -> Reading:
    """A prompt alone, whose first few tokens read the same everywhere."""
    encoded = EncodedRequest(Request("t0"), np.array(prompt, dtype=np.int64), np.array([], dtype=np.int64))
    return Reading(index, encoded, min(5 + index % 3, len(prompt)))


@pytest.mark.parametrize("options", [LocalOptions(batch=1), LocalOptions(batch=3)])
def test_limits_change_nothing_but_the_batches(options: LocalOptions) -> None:
    model = tiny("gemma3_text")
    requests = [*moved(max_tokens=5), *moved("t45", max_tokens=6), Request("t5", max_tokens=2), Request("t5 t6")]
    requests += [Request("t5 t6 t7 " * 9, max_tokens=2)]  # the longest ends first
    expected, ours = (generated(LocalResponder(model, each), requests) for each in (None, options))
    assert ours == expected


def check_alike(replies: Sequence[Reply], others: Sequence[Reply], tolerance: float) -> None:
    assert [reply.response for reply in replies] == [reply.response for reply in others]
    for ours, theirs in zip(replies, others, strict=True):
        assert ours.score.logprobs == pytest.approx(theirs.score.logprobs, abs=tolerance)


def test_what_memory_does_not_hold_is_halved_and_one_prompt_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, room = tiny("llama"), 2
    responder = LocalResponder(model)
    expected = responder.respond(mixed(), score=True)
    run = model.logits

    def full(tokens: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if len(tokens) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(tokens, *rest, **named)

    monkeypatch.setattr(model, "logits", full)
    check_alike(responder.respond(mixed(), score=True), expected, 1e-9)
    room = 0
    with pytest.raises(RunError, match="does not hold one prompt; try fewer tokens"):
        responder.respond(mixed())


def test_a_cache_that_lies_is_not_used() -> None:
    model = tiny("llama")
    assert LocalResponder(model).tried(np.arange(3, 40, dtype=np.int64)) == MOST_ROWS
    plain = LocalResponder(model).respond(moved(), score=True)
    honest = model.network.forward

    def forgetful(**asked: Any) -> Any:
        return honest(**{**asked, "past_key_values": None, "use_cache": False})

    model.network.forward = forgetful  # takes a cache and ignores it
    responder = LocalResponder(model)
    replies = responder.respond(moved(), score=True)
    assert responder.learnt()["together"] == "nothing"
    check_alike(replies, plain, 1e-6)


def test_what_does_not_fit_is_skipped_never_truncated() -> None:
    responder = LocalResponder(tiny("llama"))
    long, short = Request(" ".join(["t5"] * 60), answer="t6", max_tokens=5), Request("t5", answer="t6", max_tokens=5)
    first, second = responder.respond([long, short], score=True)
    assert first.score is None
    assert first.response.skipped == "60 tokens and 5 of the answer; the model takes 64"
    assert second.score is not None
    assert scored(responder, [long])[0] is not None


def test_answers_that_would_form_other_tokens_with_their_prompts_are_counted() -> None:
    responder = LocalResponder(tiny("llama"))
    responder.respond([Request("t5 t6", answer="t7"), Request("t5 t6", answer=" t7")], generate=False, score=True)
    assert responder.describe()["answers_apart"] == 1, "the first is one unknown word with the prompt's last"


def test_generation_ends_at_an_end_token_and_at_a_stop_text() -> None:
    model = tiny("llama")
    (free,) = generated(LocalResponder(model), [Request("t5 t6 t7", max_tokens=6)])
    assert free.finish == "length"
    third = free.text.split()[2]
    (stopped,) = generated(LocalResponder(model), [Request("t5 t6 t7", max_tokens=6, stop=(third,))])
    assert stopped.finish == "stop"
    assert stopped.text == free.text[: free.text.index(third)]
    words = free.text.split()
    model.network.generation_config.eos_token_id = [model.tokenizer.convert_tokens_to_ids(words[1])]
    (ended,) = generated(LocalResponder(model), [Request("t5 t6 t7", max_tokens=6)])
    assert ended.text.split() == words[: words.index(words[1]) + 1]
    assert ended.finish == "stop"


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("word t5", "t6", "prompt 1: token id 50 is"),
        ("t5", "t6 word", "answer 1: token id 50 is"),
        ([{"role": "user", "content": "t5"}], "t6", "prompt 1: token id 51 is"),
    ],
)
def test_a_token_that_was_added_to_the_tokenizer_alone_is_refused(prompt: Any, answer: str, said: str) -> None:
    model = tiny("llama")
    model.tokenizer.add_tokens(["word"])
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    model.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} <end>{% endfor %}"
    requests = [Request("t5", answer="t6"), Request(prompt, answer=answer)]
    with refused(f"{said} outside the model's vocabulary 0 ... 49"):
        LocalResponder(model).respond(requests, score=True)
    for outside in (50, -1):
        with refused(f"token id {outside} is outside the model's vocabulary 0 ... 49"):
            model.token_tensor([[3, 49], [outside, 0]])


def test_requests_that_cannot_be_put_are_one_line() -> None:
    model = tiny("llama")
    responder = LocalResponder(model)
    with refused("no chat template"):
        generated(responder, [Request([{"role": "user", "content": "t5"}])])
    model.tokenizer.chat_template = "{% for message in messages %}t1 {{ message['content'] }}{% endfor %} t2"
    (chat,) = generated(LocalResponder(model), [Request([{"role": "user", "content": "t5"}], max_tokens=2)])
    (text,) = generated(LocalResponder(model), [Request("t1 t5 t2", max_tokens=2)])
    assert chat.text == text.text
    assert responder.respond([]) == []
    model.tokenizer = None
    with refused("no tokenizer"):
        LocalResponder(model)
    for wrong in ({"max_tokens": 0}, {"answer": ""}, {"stop": ("",)}, {"prompt": ""}):
        with pytest.raises(UsageError):
            Request(**{"prompt": "t5", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", ["x" * 5000, [[1]], 1e300, {"a": 1}, -1, True])
def test_a_model_whose_end_of_text_is_no_token(ids: Any) -> None:
    model = tiny("llama")
    model.network.generation_config.eos_token_id = ids
    with pytest.raises(UsageError, match="eos_token_id of the model must be a whole number") as refusal:
        LocalResponder(model, LocalOptions())
    assert len(str(refusal.value)) <= 500
