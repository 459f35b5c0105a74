"""Requests know where their passages stand, and keep knowing it when these change places."""

import pytest

from posbias import EvaluateOptions, UsageError
from posbias.evaluation.responders import Request
from posbias.evaluation.samples import requests_of, samples_of
from posbias.tasks.language import LANGUAGE_TASKS


def requested(spelling: str) -> list[Request]:
    """One sample, at all positions."""
    task, options = LANGUAGE_TASKS.parse(spelling), EvaluateOptions(count=1)
    return requests_of(list(samples_of(task, None, options)), task, options)


def passages_of(request: Request) -> list[str]:
    return [request.text[begin:end] for begin, end in request.passages]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", ["key_value(pairs=4", "documents(documents=4"])
def test_moving_the_first_passage_back_gives_the_prompt_of_the_last_position(task: str, chat: bool) -> None:
    first, *_, last = requested(f"{task}, chat={chat})")
    moved = first.rearranged([1, 2, 3, 0])
    assert moved == last
    assert passages_of(moved) == [*passages_of(first)[1:], passages_of(first)[0]]
    assert moved.rearranged([3, 0, 1, 2]) == first


def test_only_the_last_message_is_reworded() -> None:
    turns = ({"role": "system", "content": "ab"}, {"role": "user", "content": "a b"})
    swapped = Request(turns, passages=((0, 1), (2, 3))).rearranged([1, 0])
    assert swapped.prompt == (turns[0], {"role": "user", "content": "b a"})


def test_an_order_that_the_answer_depends_on_is_kept() -> None:
    (request, *_) = requested("pairwise()")
    assert len(request.passages) == 2
    with pytest.raises(UsageError, match="depends on the order of these passages"):
        request.rearranged([1, 0])


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 2]])
def test_orders_that_lose_a_passage_are_refused(order: list[int]) -> None:
    with pytest.raises(UsageError, match="must name each of 2 passages once"):
        Request("a b", passages=((0, 1), (2, 3))).rearranged(order)
