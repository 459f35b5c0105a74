"""One HTTP request after another until there is an answer: pace, retries with back-off and jitter, time-outs.

What may pass (no connection, a time-out, 408, 429, 5xx, an answer that is not what it should be) is tried again; a
refusal of the request itself (other 4xx) is not. Nothing here prints, and no message holds the key.
"""

import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from posbias.errors import RunError
from posbias.evaluation.responders.server_options import ServerOptions

RETRIED = frozenset({408, 429})
"""Refusals that may pass; so may all of 500 and above."""
TOO_LONG = (
    *("context length", "context window", "context_length", "maximum context", "too long", "too many tokens"),
    *("context size", "context_size", "inputs` tokens"),
)
"""How servers say that a prompt does not fit; the second line: llama.cpp and TGI."""
SHOWN = 200
"""Characters of a server's own message that ours repeats."""
SECRET = 12
"""Characters from which a key is one: shorter ones are placeholders, such as `none`, that texts may well hold."""
CONNECTING = 10.0
"""Longest wait for a connection (seconds)."""

Answer = TypeVar("Answer")


class RefusedError(Exception):
    """A request that the server refuses for good."""

    def __init__(self, status: int, shown: str, message: str) -> None:
        """`shown`: what may be repeated of the server's message."""
        super().__init__(f"HTTP {status}: {shown}")
        self.status = status
        self.too_long = status in (400, 413, 422) and any(words in message.lower() for words in TOO_LONG)


class MalformedError(Exception):
    """An answer that is not what the interface promises."""


class StoppedError(Exception):
    """Another request has failed for good, so this one is not tried further."""


@dataclass(frozen=True)
class _Failure:
    """One attempt that may be repeated."""

    reason: str
    retry_after: float | None = None


class Pace:
    """When the next attempt may begin: evenly spaced, and not before a wait that the server has asked for."""

    def __init__(self, requests_per_minute: float | None) -> None:
        self._spacing = 0.0 if requests_per_minute is None else 60.0 / requests_per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def reserve(self) -> float:
        """Seconds to wait before the attempt that takes this turn."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._spacing
            return turn - now

    def hold(self, seconds: float) -> None:
        """No attempt begins sooner than this."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class Asker:
    """A client of one server, for several threads at once."""

    def __init__(self, address: str, options: ServerOptions) -> None:
        import httpx2

        self.address = address
        self.retried = 0
        """Attempts that were repeated."""
        self.stop = threading.Event()
        """Set: waits end at once, and nothing is tried again."""
        self._options = options
        self._key = options.key()
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        timeout = httpx2.Timeout(options.timeout, connect=min(CONNECTING, options.timeout))
        self._client = httpx2.Client(headers=headers, timeout=timeout)
        self._pace = Pace(options.requests_per_minute)
        self._jitter = random.Random(options.jitter_seed)
        self._lock = threading.Lock()

    def ask(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """Post a body below the address and read the answer.

        Args:
            path: Below the address.
            body: JSON.
            read: Takes what is needed out of the answer's JSON; raises `MalformedError`.

        Raises:
            RefusedError: for good.
            RunError: still failing after the last retry.
            StoppedError: `stop` was set meanwhile.
        """
        failure = _Failure("not asked")
        for attempt in range(self._options.retries + 1):
            self._wait(self._delay(attempt, failure) if attempt else 0.0)
            self._wait(self._pace.reserve())
            outcome = self._attempt(f"{self.address}/{path}", body, read)
            if not isinstance(outcome, _Failure):
                return outcome
            failure = outcome
            if failure.retry_after is not None and failure.retry_after > self._options.longest_retry_after:
                raise RunError(f"server {self.address} asks to wait {failure.retry_after:.0f} s ({failure.reason})")
        raise RunError(f"server {self.address} failed {self._options.retries + 1} times: {failure.reason}")

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def hidden(self, text: str) -> str:
        """A text on one line, without the key and not too long."""
        line = " ".join(text.split())
        return (line if self._key is None else line.replace(self._key, "***"))[:SHOWN]

    def _attempt(self, url: str, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> "Answer | _Failure":
        import httpx2

        try:
            status, wait, text = self._post(url, body)
        except (httpx2.TimeoutException, TimeoutError):
            return _Failure(f"no answer within {self._options.timeout:g} s")
        except httpx2.RequestError as error:
            return _Failure(f"cannot be reached ({self.hidden(str(error) or type(error).__name__)})")
        if status in RETRIED or status >= 500:
            return _Failure(f"HTTP {status}", _retry_after(wait))
        if not 200 <= status < 300:
            raise RefusedError(status, self.hidden(text) or "no message", text)
        try:
            return read(json.loads(self._without_key(text)))
        except (ValueError, MalformedError) as error:
            return _Failure(f"malformed answer ({self.hidden(str(error))})")

    def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, str | None, str]:
        """Status, Retry-After and text of one answer, given up where it has not come whole in time.

        Raises:
            TimeoutError: it trickles in: the client's own limit is on each piece of it.
        """
        deadline = time.monotonic() + self._options.timeout
        pieces = []
        with self._client.stream("POST", url, json=dict(body)) as response:
            for piece in response.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return response.status_code, response.headers.get("Retry-After"), text

    def _without_key(self, text: str) -> str:
        """An answer as it may be kept: a server that repeats the key does not bring it into a record."""
        return text if self._key is None or len(self._key) < SECRET else text.replace(self._key, "***")

    def _delay(self, attempt: int, failure: _Failure) -> float:
        """Seconds before an attempt (1 = the first retry): exponential with jitter, or what the server asks for."""
        with self._lock:
            self.retried += 1
            shortened = 1.0 - 0.5 * self._jitter.random()
        delay = min(self._options.longest_delay, self._options.first_delay * 2.0 ** (attempt - 1)) * shortened
        if failure.retry_after is not None:
            self._pace.hold(failure.retry_after)
            delay = max(delay, failure.retry_after)
        return delay

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(seconds) if seconds > 0 else self.stop.is_set():
            raise StoppedError


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date; None where it says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
