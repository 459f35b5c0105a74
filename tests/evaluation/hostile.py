"""Answers no server should give: one table of what is sent and of the line that a user then reads."""

import contextlib
import gzip
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MALFORMED = r"malformed answer \("
NO_HTTP = r"no whole answer arrived \("
LATE = r"no answer within 0\.3 s|no connection within 0\.15 s"
ANSWERED = ""
"""Odd, but an answer all the same."""


@dataclass(frozen=True)
class Hostile:
    """What is sent after the request has come."""

    name: str
    sent: bytes | Callable[[], Iterable[bytes]]
    """Bytes, or pieces that may never end."""
    expected: str
    """The error must match; empty: there must be none."""
    kind: str = "chat"
    """"text": a repeated prompt is asked for, and scored."""
    tls: bool = False
    stays: bool = False
    """The connection is left open after the last piece."""


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def raw(*lines: str) -> bytes:
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def spoken(
    content: str = '"to all"', usage: str = '{"prompt_tokens": 9, "completion_tokens": 1}', extra: str = ""
) -> bytes:
    """A chat answer with parts given as JSON, so that they may be none."""
    text = f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": "stop"{extra}}}], "usage": {usage}}}'
    return text.encode()


def repeated(tokens: Any = '["q", " x"]', values: Any = "[null, -0.5]", listed: str = "[null, null]") -> bytes:
    inner = f'{{"tokens": {tokens}, "token_logprobs": {values}, "top_logprobs": {listed}}}'
    text = f'{{"choices": [{{"text": "q x", "logprobs": {inner}}}], "usage": {{"completion_tokens": 0}}}}'
    return text.encode()


def endless(head: bytes, piece: bytes, seconds: float = 0.0) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield head
        for _ in itertools.count():
            yield piece
            if seconds:
                time.sleep(seconds)

    return pieces


def chunk(piece: bytes) -> bytes:
    return f"{len(piece):x}\r\n".encode() + piece + b"\r\n"


GOOD = answer(spoken())
ZIPPED_CHUNKS = raw("HTTP/1.1 200 OK", "Content-Encoding: gzip", "Transfer-Encoding: chunked")
EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
"""Of deflate: stored, not the last, no bytes."""
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
DIGITS = "1" + "0" * 400

BROKEN = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "30,000 headers": raw("HTTP/1.1 200 OK", *["a: b"] * 30_000),
    "a length of 400 digits": raw("HTTP/1.1 200 OK", f"Content-Length: {DIGITS}"),
    "a body that breaks off": raw("HTTP/1.1 200 OK", "Content-Length: 1000") + spoken(),
}
DOCUMENTS = {
    "an empty body": b"",
    "a page": b"<html>",
    "NaN": b"NaN",
    "a number of 10,000 digits": b"1" * 10_000,
    "a stream of events": b"data: " + spoken() + b"\n\ndata: [DONE]\n\n",
    "choices empty": b'{"choices": []}',
    "a choice that is null": b'{"choices": [null]}',
    "a message that is a text": b'{"choices": [{"message": "x"}]}',
    "a message without content or end": b'{"choices": [{"message": {}}]}',
    "content a number": spoken("1"),
    "content a list": spoken('["x"]'),
    "half a surrogate pair": spoken('"\\ud83d"'),
    "bytes that are no UTF-8": spoken('"\xff"').decode("utf-8").encode("latin-1"),
    "UTF-16": spoken().decode().encode("utf-16"),
    "NUL between": spoken().replace(b",", b"\x00,"),
    "100,000 lists in each other": b"[" * 100_000 + b"]" * 100_000,
    "deep in a field of no interest": spoken(extra=', "x": ' + "[" * 50_000 + "]" * 50_000),
    "a finish that is a number": spoken(extra=', "finish_reason": 3'),
    "a count of 10,000 digits": spoken(usage=f'{{"prompt_tokens": {"1" * 10_000}}}'),
}
COUNTS = {
    "a count of 400 digits": spoken(usage=f'{{"prompt_tokens": {DIGITS}}}'),
    "a count that is NaN": spoken(usage='{"prompt_tokens": NaN}'),
    "a count of 1e400": spoken(usage='{"completion_tokens": 1e400}'),
}
REPEATED = {
    "fewer values than tokens": repeated(values="[null]"),
    "tokens that are numbers": repeated(tokens="[1, 2]"),
    "half a pair in a token": repeated(tokens='["q", "\\ud800"]'),
    "values that are texts": repeated(values='[null, "-0.5"]'),
    "a probability above 1": repeated(values="[null, 5.0]"),
    "a list that is a number": repeated(listed="[null, 3]"),
    "no choices": b"{}",
}
LATE_ANSWERS = {
    "silence": lambda: iter(()),
    "header lines without end": endless(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n", 0.01),
    "a flood of 100": endless(b"", raw("HTTP/1.1 100 Continue") * 100),
    "a dripped body": endless(raw("HTTP/1.1 200 OK", "Content-Length: 100000"), b" ", 0.02),
    "gzip that decodes to nothing, dripped": endless(ZIPPED_CHUNKS + chunk(GZIP_HEAD), chunk(EMPTY_BLOCK), 0.02),
    "a dripped refusal": endless(raw("HTTP/1.1 400 Bad Request", "Content-Length: 100000"), b"x", 0.02),
}
STATUSES = {
    "an error with status 200": (answer(b'{"error": {"message": "no"}}'), "HTTP 200 with an error: no"),
    "101": (raw("HTTP/1.1 101 Switching Protocols", "Upgrade: x", "Connection: Upgrade"), NO_HTTP),
    "204": (raw("HTTP/1.1 204 No Content"), MALFORMED),
    "a way elsewhere": (answer(b"", "Location: http://127.0.0.1:1/", status="302 Found"), "refuses: HTTP 302"),
    "a way to nowhere": (answer(b"", "Location: http://[::1:\xff/", status="307 Found"), "refuses: HTTP 307"),
    "a refusal that draws": (
        answer(b"\x1b[2J\x07no\xff\x00", status="401 No"),
        r"refuses: HTTP 401: [^\x1b\x07\x00]*no",
    ),
    "a refusal in broken gzip": (answer(b"no", "Content-Encoding: gzip", status="401 No"), NO_HTTP),
    "gzip that breaks off": (answer(gzip.compress(spoken())[:-12], "Content-Encoding: gzip"), MALFORMED),
    "brotli": (answer(b"\x0b\x02\x80hello\x03", "Content-Encoding: br"), MALFORMED),
    "an encoding nobody knows": (answer(spoken(), "Content-Encoding: \x1b[31m"), ANSWERED),
    "fields nobody knows": (answer(spoken(extra=', "x": [NaN, {"y": null}]')), ANSWERED),
    "wait 1e300 s": (answer(b"", "Retry-After: 1e300", status="503 Slow"), r"asks to wait \(Retry-After 1e300\)"),
}

HOSTILE = [
    *(Hostile(name, sent, NO_HTTP) for name, sent in BROKEN.items()),
    *(Hostile(name, answer(body), MALFORMED) for name, body in DOCUMENTS.items()),
    *(Hostile(name, answer(body), ANSWERED) for name, body in COUNTS.items()),
    *(Hostile(name, answer(body), MALFORMED, kind="text") for name, body in REPEATED.items()),
    *(Hostile(name, sent, LATE, stays=True) for name, sent in LATE_ANSWERS.items()),
    Hostile("no handshake", lambda: iter(()), LATE, tls=True, stays=True),
    Hostile("a handshake that is none", b"HTTP/1.1 400 plain\r\n\r\n", "cannot be reached", tls=True),
    *(Hostile(name, sent, expected) for name, (sent, expected) in STATUSES.items()),
]


def asked(connection: socket.socket) -> bool:
    """Waits for one whole request; False where there is no more."""
    request = b""
    while b"\r\n\r\n" not in request or len(request.partition(b"\r\n\r\n")[2]) < length_of(request):
        received = connection.recv(65536)
        if not received:
            return False
        request += received
    return True


def length_of(request: bytes) -> int:
    found = re.search(rb"content-length: (\d+)", request, re.IGNORECASE)
    return int(found[1]) if found else 0


@contextmanager
def hostile_server(first: Hostile) -> Iterator[str]:
    """The address of a server that gives the hostile answer to the first request and a good one to all others."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    connections: list[threading.Thread] = []
    waiting = [first]

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not ended.is_set():
                if not first.tls and not asked(connection):
                    return
                if not waiting:
                    connection.sendall(GOOD)
                    continue
                hostile = waiting.pop()
                for piece in [hostile.sent] if isinstance(hostile.sent, bytes) else hostile.sent():
                    connection.sendall(piece)
                    if ended.is_set():
                        return
                if hostile.stays:
                    ended.wait(10)
                return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connections.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                connections[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http{'s' if first.tls else ''}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in [accepting, *connections]:
            thread.join()
