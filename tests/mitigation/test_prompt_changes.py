"""Methods around a model: nothing changes at strength 0, passages change places, votes and mixtures are exact."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posbias import EvaluateOptions, UsageError
from posbias.evaluation.responders import AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.samples import requests_of, samples_of
from posbias.mitigation.methods.applying import answering_under, resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation
from posbias.mitigation.methods.repeat_prompt import before_cue
from posbias.mitigation.methods.self_consistency import mean_score
from posbias.tasks.language import LANGUAGE_TASKS

TASK = LANGUAGE_TASKS.parse("key_value(pairs=5)")


class Biased(Responder):
    """Uses one slot alone: repeats what stands there, and scores the answer by whether it does."""

    def __init__(self, slot: int = 0) -> None:
        self.slot, self.asked = slot, []  # type: ignore[var-annotated]

    def respond(self, requests: Any, *, generate: bool = True, score: bool = False) -> list[Reply]:
        self.asked += requests
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        text = request.text[slice(*request.passages[self.slot])]
        right = request.answer is not None and request.answer.strip() in text
        return Reply(Response(text, "stop"), AnswerScore((math.log(0.8 if right else 0.1), -1.0), (1, 1)))

    def describe(self) -> dict[str, Any]:
        return {"kind": "biased", "model": {"source": "biased"}}


def requested(count: int = 1) -> list[Request]:
    options = EvaluateOptions(count=count)
    return requests_of(list(samples_of(TASK, None, options)), TASK, options)


def passages_of(request: Request) -> list[str]:
    return [request.text[begin:end] for begin, end in request.passages]


def of(group: str, requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.group == group]


AROUND = [name for name in MITIGATIONS if issubclass(MITIGATIONS[name], PromptMitigation)]


@pytest.mark.parametrize("name", AROUND)
def test_strength_is_the_share_of_groups_that_are_changed(name: str) -> None:
    requests = requested(40)
    changed = {}
    for strength in (0.0, 0.5, 1.0):
        method, inner = resolve_method(name, None, strength=strength), Biased()
        replies = answering_under(method, inner).respond(requests)
        assert len(replies) == len(requests)
        groups = {request.group for request in requests}
        changed[strength] = {group for group in groups if of(group, inner.asked) != of(group, requests)}
        assert MITIGATIONS.parse(str(method)) == method
        if strength == 0:
            assert inner.asked == requests
    assert not changed[0.0]
    assert 8 <= len(changed[0.5]) <= 32
    assert changed[0.5] < changed[1.0]


def test_a_repeated_prompt_keeps_the_passages_of_its_last_copy() -> None:
    inner = Biased()
    (request, *_) = requested()
    answering_under(resolve_method("repeat_prompt", None), inner).respond([request])
    (asked,) = inner.asked
    assert passages_of(asked) == passages_of(request)
    cue = "\nCorresponding value:"
    copy = request.text.removesuffix(cue)
    assert request.text == copy + cue
    assert asked.text == "\n\n".join([copy, request.text]), "the cue stands before the answer alone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question: who?\nAnswer:", "Question: who?"),
        ("Question: who? Answer: ", "Question: who?"),
        ("Word: pear\nLabel: brown\n\nWord: grape\nLabel:\n", "Word: pear\nLabel: brown\n\nWord: grape"),
        ("Corresponding value:", ""),
        ("Question: who wrote it, Answer:", "Question: who wrote it, Answer:"),
        ("Who was it?", "Who was it?"),
        ("", ""),
    ],
)
def test_the_cue_of_an_answer_is_what_ends_in_a_colon(text: str, expected: str) -> None:
    assert before_cue(text) == expected


def test_the_question_comes_first_and_passages_stay_as_they_are() -> None:
    inner = Biased()
    (request, *_) = requested()
    around = answering_under(resolve_method("question_first", None), inner)
    around.respond([replace(request, fixed_order=True)])
    (asked,) = inner.asked
    question = request.text[request.passages[-1][1] :].lstrip("}").strip()
    assert question.startswith("Key: ")
    assert asked.text == f"{question.removesuffix('Corresponding value:').rstrip()}\n\n{request.text}"
    assert passages_of(asked) == passages_of(request)
    with pytest.raises(UsageError, match="the question behind the last passage, and here none is"):
        around.respond([Request("a b)", passages=((0, 1), (2, 3)))])
    with pytest.raises(UsageError, match="here none is"):
        around.respond([Request("(a b)\n\nCorresponding value:", passages=((1, 2), (3, 4)))])


def test_the_vote_does_not_depend_on_the_order_given() -> None:
    inner = Biased()
    around = answering_under(resolve_method("self_consistency(draws=7)", None), inner)
    found = around.respond(requested(), score=True)
    assert len(inner.asked) == 5 * 7
    assert len({request.text for request in inner.asked[:7]}) > 1
    assert inner.asked[:7] == inner.asked[-7:], "the same shuffles whatever the order given"
    assert len({reply.response.text for reply in found if reply.response}) == 1
    votes = [passages_of(request)[0] for request in inner.asked[:7]]
    assert found[0].response is not None
    assert votes.count(found[0].response.text) == max(votes.count(text) for text in votes)
    right = sum(requested()[0].answer.strip() in text for text in votes)  # type: ignore[union-attr]
    assert found[0].score is not None
    expected = math.log((0.8 * right + 0.1 * (7 - right)) / 7) - 1
    assert found[0].score.logprob == pytest.approx(expected, abs=1e-12)
    assert found[0].score.ranks[0] is None


def test_mean_scores_are_those_of_the_mixture() -> None:
    scores = [AnswerScore((math.log(p), math.log(q)), (1, 1)) for p, q in ((0.5, 0.2), (0.1, 0.9))]
    first = (0.5 + 0.1) / 2
    whole = (0.5 * 0.2 + 0.1 * 0.9) / 2
    np.testing.assert_allclose(mean_score(scores).logprobs, [math.log(first), math.log(whole / first)], rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in AROUND if MITIGATIONS[name].needs_passages])
def test_prompts_without_passages_are_refused(name: str) -> None:
    around = answering_under(resolve_method(name, None), Biased())
    with pytest.raises(UsageError, match=f"{name} needs prompts that list passages"):
        around.respond([Request("a b")])


def test_shuffles_are_refused_where_the_right_answer_depends_on_the_order() -> None:
    around = answering_under(resolve_method("self_consistency", None), Biased())
    with pytest.raises(UsageError, match="the right answer depends on the order of these passages"):
        around.respond([Request("a b", passages=((0, 1), (2, 3)), fixed_order=True)])
