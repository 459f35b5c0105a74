"""Servers that keep to a schema: what is asked, what is read, and what is refused in one line."""

import json
from dataclasses import replace
from typing import Any

import pytest

from conftest import refused
from evaluation.serving import Reply, chat, replied, stand_in
from posbias import EvaluateOptions, RunError, ServerResponder, UsageError, evaluate
from posbias.evaluation.responders import Request, ServerOptions
from posbias.tasks.language import LANGUAGE_TASKS, RULES

STRUCTURED = ServerOptions(retries=0, timeout=5.0, structured=True)
OPTIONS = EvaluateOptions(count=2, positions="all", score=False)


def test_a_server_is_asked_for_the_schema_of_the_rule() -> None:
    task, schema = LANGUAGE_TASKS.parse("pairwise(chat=True)"), {"type": "string", "enum": ["A", "B", "tie"]}
    right = {example.text: example.answers[0] for example in task.examples(None, count=2)}

    def reply(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        return chat(json.dumps({"answer": right[body["messages"][-1]["content"]]}, indent=1))

    with stand_in(reply) as server:
        result = evaluate(ServerResponder(server.address, "m", STRUCTURED), task, options=OPTIONS)
    assert (result.tables["correct"] == 1).all()
    assert not result.unjudged
    form = server.asked[0]["response_format"]
    assert (form["type"], form["json_schema"]["schema"]["properties"]) == ("json_schema", {"answer": schema})
    assert server.asked[0]["max_tokens"] == task.max_tokens + 32


@pytest.mark.parametrize(
    ("rule", "schema", "told", "read"),
    [
        ("choice(options=3)", {"type": "string", "enum": ["A", "B", "C"]}, "C", "C"),
        ("number", {"type": "number"}, -12.5, "-12.5"),
    ],
)
def test_letters_and_numbers_come_out_of_their_json(rule: str, schema: dict[str, Any], told: object, read: str) -> None:
    judge = RULES.parse(rule)
    assert judge.schema == schema
    (reply,) = replied(chat(json.dumps({"answer": told})), Request("Which?", schema=judge.schema), asked=STRUCTURED)
    assert reply.response.text == read
    assert judge.right(reply.response.text, [read]) == 1


def test_a_server_that_pays_no_heed_is_read_as_any() -> None:
    with stand_in(chat("It may be A or B.")) as server:
        found = evaluate(ServerResponder(server.address, "m", STRUCTURED), "pairwise()", options=OPTIONS)
    assert {row.reason for row in found.unjudged} == {"unread"}


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (
            400,
            "response_format of type json_schema is not supported",
            ("refuses 4 of 4 prompts ", "HTTP 400: response"),
        ),
        (401, "no key", ("HTTP 401: no key",)),
    ],
)
def test_what_cannot_be_structured_is_refused_in_one_line(status: int, message: str, words: tuple[str, ...]) -> None:
    with stand_in((status, {}, {"error": {"message": message}})) as server, refused(*words, error=RunError):
        evaluate(ServerResponder(server.address, "m", STRUCTURED), "pairwise()", options=OPTIONS)


def test_what_has_no_schema_is_refused_before_anything_is_asked() -> None:
    with stand_in(chat("A")) as server, refused("structured=True: the rule of this task has no schema"):
        evaluate(ServerResponder(server.address, "m", STRUCTURED), "key_value(pairs=3)", options=OPTIONS)
    assert server.asked == []
    for wrong in ({"kind": "text"}, {"body": {"response_format": {}}}, {"structured": 1}):
        with pytest.raises(UsageError, match="structured"):
            replace(STRUCTURED, **wrong)  # type: ignore[arg-type]
