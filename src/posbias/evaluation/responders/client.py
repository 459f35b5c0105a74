"""One HTTP request after another until there is an answer: pace, retries with back-off and jitter, one deadline.

What may pass (no connection, a time-out, 408, 429, 5xx, an answer that is not what it should be) is tried again; a
refusal of the request itself is not (`refusals.py`), and a server that was never reached is given up within seconds. No
message holds the key.

The HTTP client is asynchronous, because only then one deadline covers everything: name, connection, TLS, hints, headers
and body are all cancelled at once. Its event loop runs in a thread of its own while the connection is open.
"""

import email.utils
import ipaddress
import json
import os
import random
import ssl
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posbias.checks import check_choice, check_size, check_whole, checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.masking import SECRET, Mask
from posbias.evaluation.responders.refusals import RefusedError, SaidError, meaning_of, words_of
from posbias.evaluation.responders.server_answers import FailedError, Kind, LateError, MalformedError, read_answer
from posbias.limits import AT_ONCE, REPEATS
from posbias.progress import announce, report
from posbias.prompts.templates import check_template_options
from posbias.runs.engines.engine import KEY_NAME

KINDS = {"chat": "chat/completions", "text": "completions"}
"""Kinds of server, and where below the base address requests go."""
TEMPLATE_FIELD = "chat_template_kwargs"
"""Field of a request's body that holds the options of a chat template."""
SCHEMA_FIELD = "response_format"
"""Field that holds the schema of an answer."""
WRAPPING = 32
"""Tokens that an answer may have more if it stands in JSON."""
OUR_FIELDS = frozenset({"model", "messages", "tools", "prompt", "echo", "logprobs", "n", "stream"})
"""Fields of a request's body that are set here: what is asked of whom, and the form of the answer."""
OPTIONAL = ("requests_per_minute", "price_in", "price_out")
"""Numbers that may be None."""
SLOWEST = 0.1
"""Requests per minute at least: whoever waits longer for each waits for a slip of the keyboard."""
LONGEST = 86_400
"""Largest allowed time (seconds)."""
IN_TIME = 10
"""Answers in time, for each request that may be under way, before one more may be."""


@checked
@dataclass(frozen=True)
class ServerOptions:
    """Settings of a `ServerResponder`; all of them may stand in a record."""

    kind: str = "chat"
    """"chat" (a text becomes a user's message) or "text" (the prompt is continued as it is)."""
    concurrency: int = 4
    """Requests under way at once (>= 1); fewer for a while after one that came too late."""
    retries: int = 6
    """Attempts after the first, for what may pass: no connection, a time-out, 408, 429, 5xx, a malformed answer."""
    first_delay: float = 1.0
    """Delay before the first retry (seconds, > 0); doubled for each further one, each shortened by up to half at
    random. Like all times at most LONGEST."""
    longest_delay: float = 60.0
    """No wait of our own choice is longer (seconds)."""
    longest_retry_after: float = 600.0
    """A server that asks for a longer wait is given up (seconds)."""
    requests_per_minute: float | None = None
    """Attempts begun per minute at most, evenly spaced (>= SLOWEST); None: unlimited."""
    timeout: float = 120.0
    """Longest wait for one answer, from the connection to its last byte (seconds, > 0); ten at most connect."""
    max_answer_bytes: int = 2**24
    """A larger answer, as it comes or decompressed, ends the run (bytes, >= 1)."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key (KEY, TOKEN or SECRET is a word of its name); unset: no key is sent."""
    cache: Path | None = None
    """Directory of answers, of any models and servers; None: in memory only."""
    reuse: bool = True
    """True to take answers that lay in the cache before; False to make every request once more."""
    price_in: float | None = None
    """Price per million tokens of prompts, in any currency."""
    price_out: float | None = None
    """Price per million generated tokens."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields put into every request's body, such as `{"seed": 0}`; None takes a field out. None of OUR_FIELDS."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a chat server's template, such as `{"enable_thinking": False}`, in the field `chat_template_kwargs`
    of vLLM, SGLang, llama.cpp and `transformers serve`; others refuse the field or pass it over."""
    structured: bool = False
    """True to have a chat server keep answers to the JSON schema of the task's rule, in the field `response_format`."""
    jitter_seed: int = 0
    """Seed of the random part of the delays (>= 0)."""

    def __post_init__(self) -> None:
        check_choice("server: kind", self.kind, tuple(KINDS))
        if not isinstance(self.key_variable, str) or not KEY_NAME.fullmatch(self.key_variable):
            # Not repeated: it may be a key, put here by mistake.
            raise UsageError(
                "server: key_variable must be the name of an environment variable that holds a key, such as "
                "OPENAI_API_KEY: KEY, TOKEN or SECRET is a word of it"
            )
        if not isinstance(self.body, Mapping) or not all(isinstance(name, str) for name in self.body):
            raise UsageError(f"server: body must be a dictionary of fields, got {type(self.body).__name__}")
        if ours := sorted(OUR_FIELDS & set(self.body)):
            raise UsageError(f"server: body must not hold {', '.join(ours)}: the request itself says that")
        try:
            json.dumps(dict(self.body), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"server: body must hold values that JSON can express: {error}") from None
        check_template_options(self.template_options)
        if self.template_options and (self.kind != "chat" or TEMPLATE_FIELD in self.body):
            raise UsageError(f"server: template_options need kind 'chat', and no {TEMPLATE_FIELD} in the body")
        if self.structured and (self.kind != "chat" or SCHEMA_FIELD in self.body):
            raise UsageError(f"server: structured needs kind 'chat', and no {SCHEMA_FIELD} in the body")
        for name in ("reuse", "structured"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"server: {name} must be True or False, got {getattr(self, name)!r}")
        check_size("server: concurrency", self.concurrency, AT_ONCE)
        check_size("server: retries", self.retries, REPEATS, least=0)
        for name, least in (("jitter_seed", 0), ("max_answer_bytes", 1)):
            check_whole(f"server: {name}", getattr(self, name), least=least)
        for name in ("first_delay", "longest_delay", "longest_retry_after", "timeout", *OPTIONAL):
            value, above = getattr(self, name), name not in ("price_in", "price_out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None and name in OPTIONAL:
                continue
            if not number or not 0 <= float(str(value)) < float("inf") or (above and value == 0):
                bound = "above" if above else "at least"
                raise UsageError(f"server: {name} must be {bound} 0 and finite, got {value!r}")
            if name == "requests_per_minute" and value < SLOWEST:
                raise UsageError(f"server: {name} must be at least {SLOWEST}, one in ten minutes, got {value!r}")
            if name not in OPTIONAL and value > LONGEST:
                raise UsageError(f"server: {name} must be at most {LONGEST:,} seconds, one day, got {value!r}")

    def key(self) -> str | None:
        """The key, from the environment; it is kept nowhere else than in the client's header.

        Raises:
            UsageError: it is not printable ASCII; the message names the variable, not the value.
        """
        value = os.environ.get(self.key_variable, "").strip()
        if not all("!" <= character <= "~" for character in value):
            raise UsageError(f"the key in the environment variable {self.key_variable} is not printable ASCII")
        return value or None


def check_address(base_url: str) -> str:
    """The address below which requests go; `/v1` is added if there is no path.

    Raises:
        UsageError: not http(s), or with a user, password, query or fragment, which could hide a key in a record.
    """
    try:
        parts = urlsplit(base_url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise UsageError("a server is named by its address; allowed: http://HOST:PORT/v1 or https://...")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "a server's address must have no user, password, query or fragment; keys go into the environment"
        )
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_local(address: str) -> bool:
    """True if an address is this machine's own, so that what is sent there does not leave it."""
    host = (urlsplit(address).hostname or "").rstrip(".")
    try:
        place = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return place.is_loopback or place.is_unspecified


DOUBLINGS = 64
"""Most doublings of the delay between attempts: more would overflow."""
CONNECTING = 10.0
"""Longest wait for a connection, and for its TLS (seconds); half the time-out where that is less.

These two have limits of their own because the client leaves a socket open that is cancelled in the middle of TLS.
"""
UNREACHED = 5.0
"""After so long no further attempt is begun to reach a server that was never reached (seconds)."""
REFUSAL = 2**16
"""Bytes that are read of a refusal; its message stands at the beginning."""
_GZIP = 31
"""What zlib calls the gzip format with its largest window."""


class Pace:
    """How many requests may be under way at once: half as many after one that came too late, slowly more again.

    A server without a queue of its own goes on with what nobody waits for any longer, so that asking it again at the
    same pace would make every answer later still.
    """

    def __init__(self, most: int) -> None:
        self._most = self.allowed = most
        self._under_way = self._in_time = 0
        self._halved = 0.0
        """When: requests begun before say nothing of the pace that holds since."""
        self._changed = threading.Condition()

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self.allowed)
            self._under_way += 1
        begun = time.monotonic()
        try:
            yield
        except LateError:
            self._allow_fewer(begun)
            raise
        else:
            self._allow_more()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _allow_fewer(self, begun: float) -> None:
        with self._changed:
            if begun >= self._halved and self.allowed > 1:
                self.allowed, self._in_time, self._halved = self.allowed // 2, 0, time.monotonic()
                plural = "s" if self.allowed > 1 else ""
                report(f"no answer in time: at most {self.allowed} request{plural} at once for a while")

    def _allow_more(self) -> None:
        with self._changed:
            self._in_time += 1
            if self._in_time >= IN_TIME * self.allowed:
                self.allowed, self._in_time = min(self._most, self.allowed + 1), 0


class StoppedError(Exception):
    """Another request has failed for good, so this one is not tried further."""


class Client:
    """A client of one server, for several threads at once."""

    def __init__(self, address: str, options: ServerOptions) -> None:
        self.address = address
        self.retried = 0
        self.stop = threading.Event()
        """Set: waits end at once, and nothing is tried again."""
        self._reached: bool | None = None
        """Connected at the last attempt; None before the first."""
        self._options = options
        self._key = options.key()
        self.mask = Mask(self._key)
        self._local = is_local(address)
        secret = self._key is not None and len(self._key) >= SECRET
        self.key_in_clear = secret and not self._local and urlsplit(address).scheme != "https"
        """True if a key (not a placeholder) is sent where others can read it."""
        per_minute = options.requests_per_minute
        self._spacing = 0.0 if per_minute is None else 60.0 / per_minute
        self._connecting = min(CONNECTING, options.timeout / 2)
        self._next = 0.0
        """When the next attempt may begin: evenly spaced, and not before a wait that the server has asked for."""
        self._jitter = random.Random(options.jitter_seed)
        self._lock = threading.Lock()
        self._pace = Pace(options.concurrency)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Requests are possible meanwhile, on connections that are kept until the end; what is still under way then is
        cancelled if an error ends it.
        """
        import httpx2
        from anyio.from_thread import start_blocking_portal

        if self.key_in_clear and self._reached is None:
            report(
                f"warning: the key in {self._options.key_variable} is sent unencrypted to {self.address}, where others "
                "can read it; https:// hides it"
            )
        headers = {"Accept-Encoding": "gzip", "Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            client = httpx2.AsyncClient(
                headers=headers,
                timeout=httpx2.Timeout(None, connect=self._connecting),
                limits=httpx2.Limits(max_connections=self._options.concurrency),
                verify=_trusted(),
                trust_env=not self._local,  # a proxy would see what need not leave this machine
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise UsageError(f"a proxy that the environment names cannot be used: {error}") from None
        with (
            self.mask.in_logs(),
            start_blocking_portal("asyncio") as self._portal,
            self._portal.wrap_async_context_manager(client) as self._client,
        ):
            yield

    def request(self, path: str, body: Mapping[str, Any], kind: type[Kind]) -> Kind:
        """Post JSON to a path below the address, and read the answer of that kind.

        Raises:
            RefusedError: for good.
            RunError: still failing after the last retry, an answer that is too large, or a wait that is too long.
            StoppedError: `stop` was set meanwhile.
        """
        begin, reason = 0.0, ""
        for attempt in range(self._options.retries + 1):
            self._wait(self._turn())
            begin = begin or time.monotonic()
            try:
                with self._pace.place():
                    self._wait(0)
                    return self._attempt(path, body, kind)
            except FailedError as error:
                reason, retry_after = self.mask.line(str(error)), error.retry_after
            if retry_after is not None and retry_after > self._options.longest_retry_after:
                raise RunError(f"server {self.address} asks to wait {retry_after:g} s ({reason})")
            delay = self._delay(attempt + 1, retry_after)
            if self._reached is None and time.monotonic() - begin + delay > UNREACHED:
                break  # more likely a wrong address than one that is about to answer
            if attempt < self._options.retries:
                self._wait(delay)
        raise RunError(f"server {self.address} failed {attempt + 1} times: {reason}")

    def _attempt(self, path: str, body: Mapping[str, Any], kind: type[Kind]) -> Kind:
        """One request's answer (FailedError: it may pass; RefusedError: for good)."""
        status, headers, content = self._post(f"{self.address}/{path}", body)
        try:
            if _fulfilled(status):
                return read_answer(content, kind, self.mask.answer)
            way = headers.get("Location")
            raise SaidError(status, words_of(content) if way is None else f"it sends requests on to {way}")
        except SaidError as said:
            meaning, words = meaning_of(said.status, said.words), self.mask.line(said.words)
            message = f"HTTP {status}{' with an error' if _fulfilled(status) else ''}{': ' if words else ''}{words}"
            if meaning == "passes":
                raise FailedError(message, _retry_after(headers.get("Retry-After"))) from None
            raise RefusedError(said.status, message, meaning) from None

    def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and decoded content of an answer; of a refusal the beginning.

        Raises:
            FailedError: there is no connection, what comes is no HTTP or not encoded as it says, or it comes too late.
            RunError: a fulfilled request's answer is larger than allowed, as it comes or decoded.
        """
        import httpx2

        try:
            status, headers, raw = self._portal.call(self._exchange, url, json.dumps(body).encode())
            self._reached = True
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            late = isinstance(error, httpx2.ConnectTimeout)
            raise self._missed(f"no connection within {self._connecting:g} s" if late else str(error)) from None
        except (TimeoutError, httpx2.TimeoutException):
            self._reached = True
            raise LateError(f"no answer within {self._options.timeout:g} s (timeout=... allows more)") from None
        except Exception as error:  # whatever the client's parsers make of hostile headers and cookies
            self._reached = True
            raise FailedError(f"no whole answer arrived ({str(error) or type(error).__name__})") from None
        try:
            content = self._decoded(raw, headers.get("Content-Encoding", ""))
        except MalformedError:
            if _fulfilled(status):
                raise
            content = b""
        if _fulfilled(status) and max(len(raw), len(content)) > self._options.max_answer_bytes:
            raise RunError(
                f"server {self.address}: its answer is larger than {self._options.max_answer_bytes:,} bytes; "
                "max_answer_bytes=... of the server's options allows more"
            )
        return status, headers, content

    def _missed(self, reason: str) -> FailedError:
        """There is no connection; said at once of a server that was there before, since retries take a while."""
        with self._lock:
            lost = bool(self._reached)
            self._reached = False if lost else self._reached
        if lost and self._options.retries:
            announce(f"server {self.address} cannot be reached ({self.mask.line(reason)}); it is tried again")
        return FailedError(f"cannot be reached ({reason})")

    async def _exchange(self, url: str, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and bytes of one answer, one more than allowed at most but for the last piece."""
        import anyio

        raw = bytearray()
        with anyio.fail_after(self._options.timeout):
            async with self._client.stream("POST", url, content=content) as response:
                limit = self._options.max_answer_bytes if _fulfilled(response.status_code) else REFUSAL
                async for piece in response.aiter_raw():
                    raw += piece
                    if len(raw) > limit:
                        break
        return response.status_code, response.headers, bytes(raw)

    def _decoded(self, raw: bytes, coding: str) -> bytes:
        """The content of a body, one byte more than allowed at most."""
        if coding.strip().lower() in ("", "identity"):
            return raw
        if coding.strip().lower() != "gzip":
            raise MalformedError(f"its encoding is {coding!r}; allowed: gzip, identity")
        unpacker = zlib.decompressobj(_GZIP)
        try:
            content = unpacker.decompress(raw, self._options.max_answer_bytes + 1)
        except zlib.error as error:
            raise MalformedError(f"its gzip is damaged: {error}") from None
        if not unpacker.eof and max(len(raw), len(content)) <= self._options.max_answer_bytes:
            raise MalformedError("its gzip breaks off")
        return content

    def _turn(self) -> float:
        """Seconds to wait before the attempt that takes this turn."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._spacing
            return turn - now

    def _delay(self, attempt: int, retry_after: float | None) -> float:
        """Seconds before an attempt (1 = the first retry): exponential with jitter, or what the server asks for."""
        with self._lock:
            self.retried += 1
            shortened = 1.0 - 0.5 * self._jitter.random()
        doubled = self._options.first_delay * 2.0 ** min(attempt - 1, DOUBLINGS)
        delay = min(self._options.longest_delay, doubled) * shortened
        if retry_after is not None:
            with self._lock:
                self._next = max(self._next, time.monotonic() + retry_after)
            delay = max(delay, retry_after)
        return delay

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(min(seconds, threading.TIMEOUT_MAX)) if seconds > 0 else self.stop.is_set():
            raise StoppedError


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date; None if it says nothing."""
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


@cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are believed; reading them takes longer than many an answer."""
    import httpx2

    return httpx2.create_ssl_context()


def _fulfilled(status: int) -> bool:
    return 200 <= status < 300
