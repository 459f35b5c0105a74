"""One HTTP request after another until there is an answer: pace, retries with back-off and jitter, time-outs.

What may pass (no connection, a time-out, 408, 429, 5xx, an answer that is not what it should be) is tried again; a
refusal of the request itself (other 4xx) is not. Nothing here prints, and no message holds the key.
"""

import email.utils
import random
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from posbias.errors import RunError
from posbias.evaluation.responders.connection import Connection, FailedError, TooLargeError
from posbias.evaluation.responders.masking import Mask
from posbias.evaluation.responders.server_answers import Kind, read_answer
from posbias.evaluation.responders.server_options import ServerOptions

RETRIED = frozenset({408, 429})
"""Refusals that may pass; so may all of 500 and above."""
DOUBLINGS = 64
"""Of the delay between attempts at most: more would be no number any more."""
TOO_LONG = (
    *("context length", "context window", "context_length", "maximum context", "too long", "too many tokens"),
    *("context size", "context_size", "inputs` tokens"),
)
"""How servers say that a prompt does not fit; the second line: llama.cpp and TGI."""


class RefusedError(Exception):
    """A request that the server refuses for good."""

    def __init__(self, status: int, shown: str, message: str) -> None:
        """`shown`: what may be repeated of the server's message."""
        super().__init__(f"HTTP {status}: {shown}")
        self.status = status
        self.too_long = status in (400, 413, 422) and any(words in message.lower() for words in TOO_LONG)


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
        self.address = address
        self.retried = 0
        """Attempts that were repeated."""
        self.stop = threading.Event()
        """Set: waits end at once, and nothing is tried again."""
        self._options = options
        self._key = options.key()
        self.mask = Mask(self._key)
        """Takes the key out of texts."""
        self._connection = Connection(options, self.mask)
        self._pace = Pace(options.requests_per_minute)
        self._jitter = random.Random(options.jitter_seed)
        self._lock = threading.Lock()

    def connected(self) -> AbstractContextManager[None]:
        """Asking is possible meanwhile."""
        return self._connection.open(self._key)

    def ask(self, path: str, body: Mapping[str, Any], kind: type[Kind]) -> Kind:
        """Post a body below the address and read the answer.

        Args:
            path: Below the address.
            body: JSON.
            kind: What is read out of the answer.

        Raises:
            RefusedError: for good.
            RunError: still failing after the last retry, an answer that is too large, or a wait that is too long.
            StoppedError: `stop` was set meanwhile.
        """
        failure = _Failure("not asked")
        for attempt in range(self._options.retries + 1):
            self._wait(self._delay(attempt, failure) if attempt else 0.0)
            self._wait(self._pace.reserve())
            outcome = self._attempt(f"{self.address}/{path}", body, kind)
            if not isinstance(outcome, _Failure):
                return outcome
            failure = outcome
            if failure.retry_after is not None and failure.retry_after > self._options.longest_retry_after:
                raise RunError(f"server {self.address} asks to wait {failure.retry_after:g} s ({failure.reason})")
        raise RunError(f"server {self.address} failed {self._options.retries + 1} times: {failure.reason}")

    def _attempt(self, url: str, body: Mapping[str, Any], kind: type[Kind]) -> "Kind | _Failure":
        try:
            answer = self._connection.post(url, body)
            if answer.fulfilled:
                return read_answer(answer.body, kind, self.mask.answer)
        except FailedError as error:
            return _Failure(self.mask.line(str(error)))
        except TooLargeError:
            limit = self._options.max_answer_bytes
            raise RunError(
                f"server {self.address}: its answer is larger than {limit:,} bytes; max_answer_bytes=... of the "
                "server's options allows more"
            ) from None
        if answer.status in RETRIED or answer.status >= 500:
            return _Failure(f"HTTP {answer.status}", _retry_after(answer.retry_after))
        text = answer.body.decode("utf-8", errors="replace")
        raise RefusedError(answer.status, self.mask.line(text) or "no message", text)

    def _delay(self, attempt: int, failure: _Failure) -> float:
        """Seconds before an attempt (1 = the first retry): exponential with jitter, or what the server asks for."""
        with self._lock:
            self.retried += 1
            shortened = 1.0 - 0.5 * self._jitter.random()
        doubled = self._options.first_delay * 2.0 ** min(attempt - 1, DOUBLINGS)
        delay = min(self._options.longest_delay, doubled) * shortened
        if failure.retry_after is not None:
            self._pace.hold(failure.retry_after)
            delay = max(delay, failure.retry_after)
        return delay

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(min(seconds, threading.TIMEOUT_MAX)) if seconds > 0 else self.stop.is_set():
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
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
