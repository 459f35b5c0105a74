"""Under every method prompts of mixed lengths are answered together as each alone, each with places of its own."""

import pytest

from evaluation.test_responders_local import ITEMS, tiny
from mitigation.test_methods import ALONE, RAGGED, spelled
from posbias import LocalResponder, UsageError
from posbias.evaluation.responders import Request, local
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS


def asked(*passages, question="t48 t40"):
    """A prompt of passages, each its own, and a question."""
    text, spans = "t2", []
    for passage in passages:
        spans.append((len(text) + 1, len(text) + 1 + len(passage)))
        text += f" {passage}"
    return Request(f"{text} {question}", answer=" t46 t9", max_tokens=3, passages=tuple(spans))


REQUESTS = [
    asked(*ITEMS[:2]),
    asked(*ITEMS[:3], question="t48"),
    asked("t9 t8", *ITEMS[:2]),
    asked(ITEMS[0], "t21 t22 t23 t24", ITEMS[2]),
]
"""Of several lengths, with the question at several places; some begin alike."""


WINDOWED = [name for name in RAGGED if name in ALONE] + RAGGED[::2]
"""Methods that are tried in a network with sliding windows, too."""


@pytest.fixture(scope="module")
def model(request):
    return tiny(getattr(request, "param", "llama"))


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", name) for name in RAGGED] + [("gemma3_text", name) for name in dict.fromkeys(WINDOWED)],
    indirect=["model"],
)
def test_mixed_lengths_together_are_as_each_alone(model, name, monkeypatch):
    method = resolve_method(spelled(name, model), model)
    together = answering_under(method, LocalResponder(model))
    monkeypatch.setattr(local, "FIXED", 0)  # so that beginnings are shared where keys allow it
    replies = together.respond(REQUESTS, score=True)
    assert together.learnt()["together"] == ("nothing" if method.name in ALONE else "all lengths")
    for request, reply in zip(REQUESTS, replies, strict=True):
        (alone,) = answering_under(method, LocalResponder(model)).respond([request], score=True)
        assert reply.response == alone.response
        assert reply.score.logprobs == pytest.approx(alone.score.logprobs, abs=1e-5)


def test_a_prompt_without_passages_is_refused_among_others(model):
    method = MITIGATIONS.parse("positional_channel(channel=5, from_question=True)")
    responder = answering_under(method, LocalResponder(model))
    with pytest.raises(UsageError, match="needs the passages"):
        responder.respond([*REQUESTS, Request("t3 t4")])
    assert responder.respond([]) == []
