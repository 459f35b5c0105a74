"""Servers that keep to a schema: what is asked, what is read, and what is refused in one line."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from evaluation.serving import Reply, chat, stand_in
from posbias import EvaluateOptions, RunError, ServerResponder, UsageError, evaluate
from posbias.evaluation.responders import Request, ServerOptions
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.tasks.language.rules import RULES

STRUCTURED = ServerOptions(retries=0, timeout=5.0, structured=True)
OPTIONS = EvaluateOptions(count=2, positions="all", score=False)


def answered(task: str) -> tuple[Any, list[dict[str, Any]]]:
    """An evaluation whose every answer is the right one, as JSON; and what was asked."""
    examples = LANGUAGE_TASKS.parse(task).examples(None, count=2)
    right = {example.text: example.answers[0] for example in examples}

    def reply(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        return chat(json.dumps({"answer": right[body["messages"][-1]["content"]]}, indent=1))

    with stand_in(reply) as server:
        return evaluate(ServerResponder(server.address, "m", STRUCTURED), task, options=OPTIONS), server.asked


def test_a_server_is_asked_for_the_schema_of_the_rule() -> None:
    task, schema = "pairwise(chat=True)", {"type": "string", "enum": ["A", "B", "tie"]}
    result, asked = answered(task)
    assert (result.tables["correct"] == 1).all()
    assert not result.unjudged
    form = asked[0]["response_format"]
    assert (form["type"], form["json_schema"]["schema"]["properties"]) == ("json_schema", {"answer": schema})
    assert asked[0]["max_tokens"] == LANGUAGE_TASKS.parse(task).max_tokens + 32


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
    with stand_in(lambda index, path, body: chat(json.dumps({"answer": told}))) as server:
        request = Request("Which?", schema=judge.schema)
        [reply] = ServerResponder(server.address, "m", STRUCTURED).respond([request])
    assert reply.response is not None
    assert reply.response.text == read
    assert judge.right(reply.response.text, [read]) == 1


def test_a_server_that_pays_no_heed_is_read_as_any() -> None:
    with stand_in(lambda index, path, body: chat("It may be A or B.")) as server:
        found = evaluate(ServerResponder(server.address, "m", STRUCTURED), "pairwise()", options=OPTIONS)
    assert {row.reason for row in found.unjudged} == {"unread"}


def test_what_cannot_be_structured_is_refused_in_one_line() -> None:
    refusal = {"error": {"message": "response_format of type json_schema is not supported"}}
    with stand_in(lambda index, path, body: (400, {}, refusal)) as server:
        responder = ServerResponder(server.address, "m", STRUCTURED)
        with pytest.raises(RunError, match=r"refuses 4 of 4 prompts .*HTTP 400: response_format of type") as caught:
            evaluate(responder, "pairwise()", options=OPTIONS)
        assert "\n" not in str(caught.value)
    with (
        stand_in(lambda index, path, body: chat("A")) as server,
        pytest.raises(UsageError, match="structured=True: the rule of this task has no schema"),
    ):
        evaluate(ServerResponder(server.address, "m", STRUCTURED), "key_value(pairs=3)", options=OPTIONS)
    assert server.asked == []
    with (
        stand_in(lambda index, path, body: (401, {}, {"error": {"message": "no key"}})) as server,
        pytest.raises(RunError),
    ):
        evaluate(ServerResponder(server.address, "m", STRUCTURED), "pairwise()", options=OPTIONS)
    for wrong in ({"kind": "text"}, {"body": {"response_format": {}}}, {"structured": 1}):
        with pytest.raises(UsageError, match=re.escape("structured")):
            replace(STRUCTURED, **wrong)
