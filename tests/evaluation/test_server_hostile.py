"""Whatever a server answers: one line within the time allowed, in bounded memory, and the next answer is read."""

import random
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.hostile import HOSTILE, LATE, Hostile, answer, hostile_server, repeated, spoken
from evaluation.replies import generated
from evaluation.serving import chat, stand_in
from posbias import RunError, ServerResponder, UsageError
from posbias.evaluation.responders import Request, ServerOptions

OPTIONS = ServerOptions(retries=0, timeout=30.0, concurrency=1)
SHORT = 0.3
"""Time-out of what never ends (seconds)."""
PATIENCE = 10.0
"""Far beyond that time-out (seconds), for a busy machine."""
LONGEST_LINE = 500
MUTATED = 1000
"""Answers with random bytes changed, in the slow test."""


def outcome(responder: ServerResponder, *, kind: str) -> RunError | None:
    try:
        responder.respond([Request("q", answer=" x")], generate=kind == "chat", score=kind == "text")
    except RunError as error:
        line = str(error)
        assert line.isprintable()
        assert len(line) <= LONGEST_LINE
        assert "unexpected" not in line
        return error
    return None


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_answer_is_one_line_and_the_next_one_is_read(hostile: Hostile) -> None:
    late = hostile.expected == LATE
    before = threading.active_count()
    with hostile_server(hostile) as address:
        options = replace(OPTIONS, timeout=SHORT if late else OPTIONS.timeout, kind=hostile.kind)
        responder = ServerResponder(address, "m", options)
        begin = time.monotonic()
        error = outcome(responder, kind=hostile.kind)
        assert not late or time.monotonic() - begin < PATIENCE
        assert bool(error) == bool(hostile.expected), error
        assert error is None or re.search(hostile.expected, str(error)), error
        if hostile.kind == "chat" and not hostile.tls:  # several times: the time-out is short for a busy machine
            assert any(outcome(responder, kind="chat") is None for _ in range(5))
    assert threading.active_count() <= before


def test_a_connection_that_is_never_accepted_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as filling:
        for _ in range(4):  # the queue is full then, and the system answers no further attempt
            waiting = filling.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        responder = ServerResponder(address, "m", replace(OPTIONS, timeout=SHORT))
        assert "no connection within 0.15 s" in str(outcome(responder, kind="chat"))


def test_an_interruption_cuts_off_what_is_under_way() -> None:
    before = threading.active_count()
    silent = Hostile("", lambda: iter(()), "", stays=True)
    with hostile_server(silent) as address:
        responder = ServerResponder(address, "m", replace(OPTIONS, timeout=600.0))
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            generated(responder, [Request("q")])
    assert time.monotonic() - begin < PATIENCE
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[" * 10_000,
        b"\xff",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 1}}]}',
        b'{"choices": [{"message": {"content": "\\ud800"}}]}',
    ],
)
def test_a_damaged_cached_answer_is_asked_again(damage: bytes, tmp_path: Path) -> None:
    with stand_in(chat("fresh")) as server:
        for asked in (1, 2):
            responder = ServerResponder(server.address, "m", replace(OPTIONS, cache=tmp_path))
            assert generated(responder, [Request("q")])[0].text == "fresh"
            assert len(server.asked) == asked
            (kept,) = tmp_path.rglob("*.json")
            kept.write_bytes(damage)


@pytest.mark.parametrize("wrong", [{"seed": float("nan")}, {"x": {1, 2}}, {"x": b"x"}])
def test_a_body_that_json_cannot_say_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="values that JSON can express"):
        ServerOptions(body=wrong)


@pytest.mark.parametrize("proxy", ["h:x", "socks9://user:word@h:1", "socks5://h:1"])
def test_a_proxy_that_is_none_is_one_line(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UsageError, match="a proxy that the environment names") as caught:
        generated(ServerResponder("http://h", "m", OPTIONS), [Request("q")])
    assert "word" not in str(caught.value)


@pytest.mark.slow
def test_mutated_answers_are_read_or_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(0)
    read = 0
    for index in range(MUTATED):
        body, kind = ((spoken(), "chat"), (repeated(), "text"))[index % 2]
        wholes = [
            answer(mutated(body, generator)),
            mutated(answer(body, "X: y"), generator),
        ]  # the length right, or not
        with hostile_server(Hostile("", wholes[index // 2 % 2], "", kind=kind)) as address:
            read += outcome(ServerResponder(address, "m", replace(OPTIONS, kind=kind)), kind=kind) is None
    assert 0 < read < MUTATED
    with capsys.disabled():
        print(f"\n{MUTATED} mutated answers of a server: {read} read, {MUTATED - read} refused in one line")


def mutated(text: bytes, generator: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(generator.choice((1, 1, 2, 8))):
        at = generator.randrange(len(changed))
        changed[at : at + generator.choice((0, 1, 1, 9))] = generator.randbytes(generator.choice((0, 1, 1, 4)))
    return bytes(changed)
