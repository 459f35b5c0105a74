"""Servers that stall, break off and forget; what is asked once and kept, and what is read off a repeated prompt."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from conftest import refused
from evaluation.replies import generated, scored
from evaluation.serving import ONE_BY_ONE, Reply, chat, echo, evaluated, replied, stand_in
from posbias import EvaluateOptions, RunError, ServerResponder, UsageError, evaluate
from posbias.evaluation.responders import AnswerScore, Request, ServerOptions
from posbias.results.result import report_of
from posbias.tasks.language import Documents

FAST = ServerOptions(retries=3, timeout=5.0)
TEXT = replace(ONE_BY_ONE, kind="text")


def requests(count: int) -> list[Request]:
    return [Request(f"question {index}", answer="x", max_tokens=4, group="g") for index in range(count)]


def echo_back(_index: int, _path: str, body: dict[str, Any]) -> Reply:
    return chat(f"to {body['messages'][0]['content']}")


def test_answers_come_back_in_order_from_several_connections() -> None:
    def slow(index: int, path: str, body: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        return echo_back(index, path, body)

    with stand_in(slow) as server:
        responder = ServerResponder(server.address, "m", replace(FAST, concurrency=3))
        texts = [response.text for response in generated(responder, requests(9))]
    assert texts == [f"to question {index}" for index in range(9)]
    assert server.most_together == 3
    assert {body["temperature"] for body in server.asked} == {0}
    counts = responder.counts()
    assert (counts["requests"], counts["prompt_tokens"], counts["generated_tokens"]) == (9, 90, 18)


@pytest.mark.parametrize(
    ("reason", "tokens", "finish"),
    [
        ("length", 3, "length"),
        ("max_tokens", 3, "length"),
        ("MAX_TOKENS", 3, "length"),
        ("stop", 4, "length"),
        (None, 4, "length"),
        ("stop", 3, "stop"),
        (None, 3, "unknown"),
        ("eos", 4, "eos"),
    ],
)
def test_answers_that_end_at_the_most_tokens_were_cut_off(reason: str | None, tokens: int, finish: str) -> None:
    (reply,) = replied(chat("to all", reason, tokens=tokens), *requests(1))
    assert reply.response.finish == finish


def test_fields_that_a_reasoning_model_refuses_are_left_out_and_said() -> None:
    """As OpenAI's do; told once, the others are asked as it likes."""
    refusals = {
        "max_tokens": (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        ),
        "temperature": "Unsupported value: 'temperature' does not support 0 with this model. Only 1 is supported.",
    }

    def answer(index: int, path: str, body: dict[str, Any]) -> Reply:
        for name, message in refusals.items():
            if name in body:
                code = f"unsupported_{'parameter' if name == 'max_tokens' else 'value'}"
                error = {"message": message, "type": "invalid_request_error", "param": name, "code": code}
                return 400, {}, {"error": error}
        return chat(f"{body['max_completion_tokens']} tokens")

    asked = EvaluateOptions(count=2, positions=[0, 1], score=False)
    with stand_in(answer) as server:
        responder = ServerResponder(server.address, "o9", replace(FAST, concurrency=1))
        found = evaluate(responder, "key_value(pairs=2)", options=asked)
        assert len(server.asked) == 2 + 4
        own = ServerResponder(server.address, "o9", replace(FAST, body={"temperature": 0.5}))
        with pytest.raises(RunError, match="temperature"):  # one's own is not taken out without a word
            evaluate(own, "key_value(pairs=2)", options=asked)
    assert {row["text"] for row in found.outputs} == {f"{found.max_tokens} tokens"}
    assert found.record.resolved["responder"]["own_temperature"] is True
    said = "The model takes no temperature: its answers were drawn at the"
    assert report_of(found.record).notices[0].startswith(said)


def test_of_a_server_that_is_not_there_all_attempts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posbias.evaluation.responders.client.UNREACHED", 0.05)
    monkeypatch.setattr("openai._base_client.random", lambda: 0.5)  # both requests are tried again at the same moment
    made: list[str] = []

    async def refused(_transport: Any, request: httpx2.Request) -> None:
        made.append(request.url.host)
        raise httpx2.ConnectError("no one there", request=request)

    monkeypatch.setattr("httpx2.AsyncHTTPTransport.handle_async_request", refused)
    responder = ServerResponder("http://127.0.0.1:9", "m", replace(FAST, concurrency=2))
    with pytest.raises(RunError) as caught:
        evaluate(responder, "key_value(pairs=3)", options=EvaluateOptions(count=1))
    assert len(made) > 2
    assert f"failed {len(made)} times: cannot be reached (no one there)" in str(caught.value)


def test_a_rate_limit_is_waited_for_as_long_as_the_server_says() -> None:
    with stand_in(lambda i, p, b: (429, {"Retry-After": "0.4"}, {}) if i == 0 else echo_back(i, p, b)) as server:
        responder = ServerResponder(server.address, "m", FAST)
        begin = time.monotonic()
        generated(responder, requests(1))
    assert time.monotonic() - begin >= 0.4


def test_a_refusal_is_not_tried_again_and_finished_answers_are_kept(tmp_path: Path) -> None:
    def answer(index: int, path: str, body: dict[str, Any]) -> Reply:
        refused = body["messages"][0]["content"] == "question 3"
        return (401, {}, {"error": "no such key"}) if refused else echo_back(index, path, body)

    options = replace(FAST, concurrency=1, cache=tmp_path)
    with stand_in(answer) as server:
        responder = ServerResponder(server.address, "m", options)
        with pytest.raises(
            RunError, match=r"refuses: HTTP 401.*of 6 answers asked together 3 are finished and kept in the cache"
        ):
            generated(responder, requests(6))
        server.answer = echo_back
        assert len(generated(responder, requests(6))) == 6
    assert len(server.asked) == 3 + 1 + 3
    assert responder.counts()["reused"] == 3


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    with stand_in(echo_back) as server:
        for _ in range(2):
            responder = ServerResponder(server.address, "m", replace(FAST, cache=tmp_path))
            first = generated(responder, [*requests(3), *requests(3)])
        assert len(server.asked) == 3
        assert [response.text for response in first[:3]] == [response.text for response in first[3:]]
        assert len([*tmp_path.rglob("*.json")]) == 3
        other = ServerResponder(server.address, "another", replace(FAST, cache=tmp_path))
        generated(other, requests(1))
        assert len(server.asked) == 4
        with stand_in(chat("another server")) as elsewhere:
            moved = ServerResponder(elsewhere.address, "m", replace(FAST, cache=tmp_path))
            assert generated(moved, requests(1))[0].text == "another server"
        assert len(server.asked) == 4


def test_a_run_that_is_killed_asks_for_nothing_twice(tmp_path: Path) -> None:
    reached, killed = threading.Event(), threading.Event()

    def answer(index: int, path: str, body: dict[str, Any]) -> Reply:
        if index >= 6:
            reached.set()
            killed.wait(60)
        return chat("nothing")

    with stand_in(answer) as server:
        command = [str(Path(sys.executable).with_name("posbias")), "evaluate", "--server", server.address]
        command += ["--served-model", "m", "--task", "key_value(pairs=3)", "--count", "4", "--no-score"]
        command += ["--server-options", "concurrency=1", "--out", str(tmp_path / "run")]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert reached.wait(120)
        run.kill()
        run.wait()
        killed.set()
        subprocess.run([*command, "--resume"], check=True, capture_output=True)
    asked = [json.dumps(body) for body in server.asked]
    assert len(set(asked)) == 12
    assert len(asked) == 13, "only what was under way is asked again"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (200, "This model's maximum context length is 8 tokens"),
        (400, "the request exceeds the available context size"),
        (413, "context_length_exceeded"),
        (422, "prompt is too long: 5000 tokens > 4096 maximum"),
        (400, "The input token count exceeds the maximum number of tokens allowed"),
        (500, f"{'x' * 300} maximum context length"),
    ],
)
def test_a_prompt_beyond_the_context_is_skipped_whatever_the_status(status: int, message: str) -> None:
    with stand_in((status, {}, {"error": message})) as server:
        (response,) = generated(ServerResponder(server.address, "m", FAST), requests(1))
        assert len(server.asked) == 1
        text = replace(FAST, kind="text")
        (reply,) = ServerResponder(server.address, "m", text).respond(requests(1), generate=False, score=True)
    assert reply.score is None
    for found in (response, reply.response):
        assert found.finish == "skipped"
        assert f"HTTP {status}" in found.skipped


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, {"text": "x"}, 3])
def test_an_answer_in_parts_that_are_no_text_is_named(part: Any) -> None:
    words = ("choices.0.message.content: a part of type ", "allowed: text, output_text")
    with refused(*words, error=RunError):
        replied(chat([part]), *requests(1), asked=replace(FAST, retries=0))


def test_scores_are_read_off_a_repeated_prompt() -> None:
    six = {f"t{index}": -0.1 for index in range(5)}
    listed = [None, {" is": -1.0}, {" 4": -0.5, " 5": -0.7}, {**six, "2": -9.0}, {"!": -0.1}]
    with stand_in(echo(["2+2", " is", " 4", "2", "!"], [None, -1.0, -0.5, -9.0, -0.1], listed)) as server:
        responder = ServerResponder(server.address, "m", TEXT)
        (score,) = scored(responder, [Request("2+2 is", answer=" 42")])
        (straddling,) = scored(responder, [Request("2+2 i", answer="s 42")])
    assert score == AnswerScore((-0.5, -9.0), (1, None))
    assert (score.logprob, score.n_tokens) == (-9.5, 2)
    assert straddling is None
    assert (server.asked[0]["echo"], server.asked[0]["logprobs"]) == (True, 5)


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
    """However characters are spelled."""
    prompt = ["The", " cap", ":"]
    told = echo([*prompt, *pieces, "."], [None, -1, -2, *logprobs, -3])
    request = Request("".join([*prompt, *pieces]).removesuffix(answer), answer=answer)
    (reply,) = replied(told, request, asked=TEXT, generate=False, score=True)
    assert (None if reply.score is None else reply.score.logprobs) == expected


def test_answers_that_could_not_be_scored_are_counted_and_said() -> None:
    """Every second echo is spelled so that nothing shows where the answer begins."""

    def answer(index: int, _path: str, body: dict[str, Any]) -> Reply:
        head, _, last = body["prompt"].rpartition(" ")
        tokens = [head, f" {last}", "."] if index % 2 else [head, "", f" {last}", "."]
        return echo(tokens, [None, *([-1.0] * (len(tokens) - 1))])

    record = evaluated(answer, Documents(documents=2), TEXT, count=3, generate=False).record
    assert record.scalars["unscored"] == 3
    sentence = "3 of 6 right answers were not scored: the server's tokens do not tell where they begin"
    assert sentence in report_of(record).left_out


@pytest.mark.parametrize("reply", [(422, {}, {"detail": "echo"}), (200, {}, {"choices": [{"text": "x", "index": 0}]})])
def test_a_server_without_log_probabilities_is_asked_once(reply: Reply) -> None:
    with stand_in(reply) as server:
        responder = ServerResponder(server.address, "m", TEXT)
        assert scored(responder, requests(5)) == [None] * 5
    assert len(server.asked) == 1
    assert responder.scores is False
    assert responder.describe()["no_scores_because"]
    chatting = ServerResponder("http://localhost:1", "m", FAST)
    assert scored(chatting, requests(1)) == [None], "which repeats no prompts, and is not asked"
    assert chatting.describe()["scores"] is False


@pytest.mark.parametrize(
    "address", ["localhost:8000", "ftp://h/v1", "http://", "http://u:p@h/v1", "https://h/v1?key=k", "http://h:x"]
)
def test_addresses_that_are_none_or_could_hold_a_key_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="address") as caught:
        ServerResponder(address, "m")
    assert "u:p" not in str(caught.value)


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"kind": "voice"}, {"concurrency": 0}, {"retries": -1}, {"timeout": 0.0}, {"longest_delay": 9.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ServerOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout must be a number > 0 and < 86,400"):
        ServerOptions(timeout=1e300)
    responder = ServerResponder("http://localhost:1", "m", replace(FAST, kind="text"))
    with pytest.raises(UsageError, match="allowed kind: chat"):
        generated(responder, [Request([{"role": "user", "content": "hi"}])])
