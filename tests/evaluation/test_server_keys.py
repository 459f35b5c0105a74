"""A server repeats the key in every field and header; it reaches no file, log, message or traceback."""

import json
import logging
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.hostile import Hostile, answer, hostile_server, repeated, spoken
from evaluation.replies import generated
from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions, RunError, ServerResponder, UsageError, evaluate
from posbias.evaluation.responders import Request, ServerOptions
from posbias.evaluation.responders.client import key_in_clear

KEY = "sk-very/secret+key_1234567890"
OPTIONS = ServerOptions(retries=0, timeout=5.0, concurrency=1, key_variable="TEST_KEY")


def listed(variant: str) -> bytes:
    return repeated(f'["{variant}", " x"]', listed=f'[null, {{"{variant}": -1.0}}]')


PLACES = {
    "content": lambda v, h: Hostile("", answer(spoken(f'"it is {v} to all"')), ""),
    "finish": lambda v, h: Hostile("", answer(spoken().replace(b'"stop"', f'"{v}"'.encode())), ""),
    "token": lambda v, h: Hostile("", answer(listed(v)), "", kind="text"),
    "refusal": lambda v, h: Hostile("", answer(f'{{"error": "wrong {v}"}}'.encode(), status="401 No"), "401"),
    "too long": lambda v, h: Hostile("", answer(f"context length {v}".encode(), status="400 No"), "400"),
    "wrong type": lambda v, h: Hostile("", answer(spoken(f'["{v}"]')), "malformed"),
    "name of a wrong field": lambda v, h: Hostile(
        "", answer(repeated(listed=f'[null, {{"{v}": "a"}}]')), "malformed", kind="text"
    ),
    "headers": lambda v, h: Hostile(
        "", answer(spoken(), f"Set-Cookie: a={h}", f"X-{h}: {h}", f"Location: {h}", status=f"200 {h}"), ""
    ),
    "way elsewhere": lambda v, h: Hostile("", answer(b"", f"Location: http://h/{h}", status=f"302 {h}"), "302"),
    "status line": lambda v, h: Hostile("", f"HTTP/1.1 {h}\r\n\r\n".encode(), "no whole"),
    "wrong header": lambda v, h: Hostile("", f"HTTP/1.1 200 OK\r\n{h}\r\n\r\n".encode(), "no whole"),
    "encoding": lambda v, h: Hostile("", answer(spoken(), f"Content-Encoding: {h}"), "malformed"),
}
"""Where the key is put; in headers without what no header may hold."""
IN_HEADERS = {"headers", "way elsewhere", "status line", "wrong header", "encoding"}


@pytest.mark.parametrize("place", PLACES)
def test_a_repeated_key_is_masked(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    if place not in IN_HEADERS:  # what a server's own headers say stands in the transport's log, if that is asked for
        caplog.set_level(logging.DEBUG)
    hostile = PLACES[place](KEY, KEY.replace("/", "%2F") if place == "headers" else KEY)
    with hostile_server(hostile) as address:
        responder = ServerResponder(address, "m", replace(OPTIONS, kind=hostile.kind, cache=tmp_path))
        shown = [outcome(responder, hostile), json.dumps(responder.describe()), repr(responder), repr(vars(responder))]
    shown += [path.read_text() for path in tmp_path.rglob("*.json")]
    assert KEY not in "\n".join([*shown, caplog.text]), shown
    assert place != "refusal" or "wrong ***; TEST_KEY holds the key that was sent" in shown[0]


def outcome(responder: ServerResponder, hostile: Hostile) -> str:
    try:
        return repr(responder.respond([Request("q", answer=" x")], generate=hostile.kind == "chat", score=True))
    except RunError as error:
        return "".join(traceback.format_exception(error))


def test_nothing_else_that_the_environment_holds_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    with stand_in(chat("x")) as server:
        generated(ServerResponder(server.address, "m", OPTIONS), [Request("q")])
    assert KEY not in str(server.headers)
    assert server.authorizations == [None]


def test_the_key_is_sent_in_the_header_and_a_placeholder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, said, read in ((KEY, f"your key is {KEY}", "your key is ***"), ("a", "banana", "banana")):
        monkeypatch.setenv("TEST_KEY", key)
        with stand_in(chat(said)) as server:
            assert generated(ServerResponder(server.address, "m", OPTIONS), [Request("q")])[0].text == read
        assert server.authorizations == [f"Bearer {key}"]
    monkeypatch.setenv("TEST_KEY", "two\nlines-of-key")
    with pytest.raises(UsageError, match="TEST_KEY") as usage:
        ServerResponder("http://localhost:1", "m", OPTIONS)
    assert "lines-of-key" not in str(usage.value)


def test_a_key_is_refused_where_it_would_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    for address, model, body in (
        (f"http://h/{KEY}/v1", "m", {}),
        ("http://h", KEY, {}),
        ("http://h", "m", {"auth": {"key": KEY}}),
    ):
        with pytest.raises(UsageError, match="TEST_KEY") as caught:
            ServerResponder(address, model, replace(OPTIONS, body=body))
        assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["HOME", "PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "SSH_AUTH_SOCK", "MONKEY", "sk_live_0123", KEY, "", "A B"],
)
def test_only_a_name_that_holds_keys_is_taken_and_none_is_repeated(name: str) -> None:
    with pytest.raises(UsageError, match=r"name of an environment variable .*KEY, TOKEN or SECRET is a word") as caught:
        ServerOptions(key_variable=name)
    assert not name or name not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "my_key", "KEY", "HF_TOKEN", "APIKEY", "GROQ_APIKEY", "KEY_2", "CLIENT_SECRET", "TOKEN"]
)
def test_names_that_hold_keys_are_taken(name: str) -> None:
    assert ServerOptions(key_variable=name).key_variable == name


@pytest.mark.parametrize("name", ["model", "messages", "prompt", "echo", "logprobs", "n", "stream"])
@pytest.mark.parametrize("value", ["other", None])
def test_the_body_cannot_replace_what_is_asked_of_whom(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"body must not hold {name}"):
        ServerOptions(body={"seed": 0, name: value})


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *((f"http://{host}:8000/v1", True) for host in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]", "0.0.0.0")),
        *((f"http://{host}/v1", False) for host in ("192.168.0.2", "10.0.0.1", "gpu-box", "localhost.example.org")),
        *((f"http://{host}/v1", False) for host in ("127.0.0.1.example.org", "[2001:db8::1]", "api.example.org")),
    ],
)
def test_a_key_over_plain_http_leaves_the_machine_unless_the_host_is_its_own(
    address: str, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, secret in ((KEY, True), ("EMPTY", False), ("", False)):
        monkeypatch.setenv("TEST_KEY", key)
        assert key_in_clear(address, OPTIONS) == (secret and not local)
        assert not key_in_clear(address.replace("http:", "https:"), OPTIONS)


def test_a_key_in_clear_is_warned_of_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody there: what is local goes past it
    with stand_in(chat("x")) as server:
        generated(ServerResponder(server.address, "m", OPTIONS), [Request("q")])
        assert capsys.readouterr().err == ""
        monkeypatch.delenv("HTTP_PROXY")
        monkeypatch.setattr("posbias.evaluation.responders.client.is_local", lambda _: False)
        evaluate(ServerResponder(server.address, "m", OPTIONS), "key_value(pairs=2)", options=EvaluateOptions(count=1))
    said = capsys.readouterr().err
    assert said == (
        f"warning: the key in TEST_KEY is sent unencrypted to {server.address}/v1, where others can read it; "
        "https:// hides it\n"
    )
