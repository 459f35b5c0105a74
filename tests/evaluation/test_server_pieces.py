"""Pieces of a repeated prompt: every token of the answer is scored, or none is, however characters are spelled."""

from typing import Any

import pytest

from evaluation.serving import Reply, stand_in
from posbias import EvaluateOptions, ServerResponder, evaluate
from posbias.evaluation.responders import Request, ServerOptions
from posbias.results.result import report_of
from posbias.tasks.language import Documents

PROMPT = ["The", " cap", ":"]
OF_PROMPT: list[float | None] = [None, -1, -2]


def scored(pieces: list[str], logprobs: list[float], answer: str) -> tuple[float, ...] | None:
    """What is read of a repeated prompt with these pieces behind it, one more token generated."""
    tokens = [*PROMPT, *pieces, "."]
    choice = {
        "text": "".join(tokens),
        "logprobs": {"tokens": tokens, "token_logprobs": [*OF_PROMPT, *logprobs, -3], "top_logprobs": None},
    }
    usage = {"prompt_tokens": len(tokens) - 1, "completion_tokens": 1}
    prompt = "".join([*PROMPT, *pieces]).removesuffix(answer)
    with stand_in(lambda *_: (200, {}, {"choices": [choice], "usage": usage})) as server:
        responder = ServerResponder(server.address, "m", ServerOptions(kind="text", retries=0))
        (reply,) = responder.respond([Request(prompt, answer=answer)], generate=False, score=True)
    return None if reply.score is None else reply.score.logprobs


@pytest.mark.parametrize(
    ("pieces", "logprobs", "answer", "expected"),
    [
        ([" Par", "is"], [-0.5, -0.25], " Paris", (-0.5, -0.25)),
        # A character of several tokens, whole at its last one.
        (["", "", "😀"], [-7, -5, -0.01], "😀", (-7, -5, -0.01)),
        (["", "", " 北"], [-7, -5, -0.01], " 北", (-7, -5, -0.01)),
        (["", " 北", "", "", "京"], [-7, -1, -4, -2, -0.02], " 北京", (-7, -1, -4, -2, -0.02)),
        ([" Par", "", "é"], [-1, -2, -3], " Paré", (-1, -2, -3)),
        (["", "：", "", "北"], [-9, -8, -7, -1], "北", (-7, -1)),  # the first two are the prompt's
        # What an empty piece is a part of is not known.
        (["", " Par", "is"], [-7, -1, -2], " Paris", None),
        (["", "北", ""], [-7, -1, -2], "北", None),
        # Characters that are not spelled out.
        ([" ", "\ufffd", "\ufffd"], [-1, -2, -3], " 😀", None),
        (["bytes:\\xf0\\x9f\\x98", "bytes:\\x80"], [-1, -2], "😀", None),
        (["▁Par", "is"], [-1, -2], " Paris", None),
    ],
)
def test_every_token_of_the_answer_is_scored_or_none(
    pieces: list[str], logprobs: list[float], answer: str, expected: tuple[float, ...] | None
) -> None:
    assert scored(pieces, logprobs, answer) == expected


def test_answers_that_could_not_be_scored_are_counted_and_said() -> None:
    """Every second echo is spelled so that nothing shows where the answer begins."""

    def answer(index: int, _path: str, body: dict[str, Any]) -> Reply:
        head, _, last = body["prompt"].rpartition(" ")
        tokens = [head, f" {last}", "."] if index % 2 else [head, "", f" {last}", "."]
        logprobs = {"tokens": tokens, "token_logprobs": [None, *([-1.0] * (len(tokens) - 1))], "top_logprobs": None}
        return 200, {}, {"choices": [{"text": "", "logprobs": logprobs}], "usage": {"completion_tokens": 1}}

    with stand_in(answer) as server:
        options = ServerOptions(kind="text", retries=0, concurrency=1)
        responder = ServerResponder(server.address, "m", options)
        asked = EvaluateOptions(count=3, generate=False)
        found = evaluate(responder, Documents(documents=2), options=asked)
    record = found.record
    assert record.scalars["unscored"] == 3
    sentence = "3 of 6 right answers were not scored: the server's tokens do not tell where they begin"
    assert sentence in report_of(record).left_out
