"""One server, asked by the `openai` client: retries, `Retry-After`, time-outs and typed errors are that client's own.

Beside it stands what it lacks: one deadline from the connection to the last byte of an answer, an end within seconds
where no server was ever reached, and the status of a failure for an answer with status 200 that is an error, so that it
is tried again. The key is in the client alone, and is taken out of all that comes back.

It is asyncio and not threads that asks: a thread within a read cannot be ended from outside, and a read's own time-out
starts anew with every byte that a slow server drips. A task is cancelled at its deadline or at Ctrl-C, wherever it is.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx2
from annotated_types import Interval
from pydantic_core import from_json

from posbias.checks import KEY_NAME, Count, CountOrZero, OneOf, checked
from posbias.errors import RunError, UsageError
from posbias.progress import report
from posbias.prompts.tokens import check_template_options

if TYPE_CHECKING:
    import openai

KINDS = {"chat": "chat/completions", "text": "completions"}
"""Kinds of server, and where below the base address requests go."""
TEMPLATE_FIELD = "chat_template_kwargs"
"""Field of a request's body that holds the options of a chat template."""
SCHEMA_FIELD = "response_format"
"""Field that holds the schema of an answer."""
OUR_FIELDS = frozenset({"model", "messages", "tools", "prompt", "echo", "logprobs", "n", "stream"})
"""Fields of a request's body that are set here: what is asked of whom, and the form of the answer."""
SECRET = 12
"""Characters from which a key is one: shorter ones are placeholders, such as `none`, that answers may well hold."""
CONNECTING = 10.0
"""Longest wait for a connection, and for its TLS (seconds); half the time-out where that is less."""
UNREACHED = 3.0
"""After so long no further attempt is begun to reach a server that was never reached (seconds)."""
FILTERED_FINISHES = ("content_filter", "content-filter", "safety", "prohibited_content", "refusal")
"""Beginnings of the reason for an answer's end if a filter has ended it; small letters."""
OF_THE_PROMPT = (400, 403, 413, 422, 451)
"""Statuses that refuse what was sent; who sent it, or where, is refused by others."""
TOO_LONG = (
    *("context length", "context_length", "context size", "context_size", "context window"),
    *("prompt is too long", "input is too long", "maximum length", "number of tokens allowed", "reduce the length"),
)
"""How OpenAI, vLLM, SGLang, llama.cpp, LiteLLM, Anthropic, Google and TGI name what a prompt does not fit into."""
MASKED = "***"
ATTEMPT, STEERING = "x-stainless-retry-count", ("x-should-retry", "retry-after", "retry-after-ms")
"""Headers by which the client counts its attempts, and by which servers steer them."""
SAID = "posbias.said"
"""What is kept with a response: the server's words."""
FILTER = "content_filter"
"""Code of an error: this prompt is refused."""
Meaning = Literal["passes", "too_long", "refused", "final"]
"""It may pass; this prompt does not fit; this prompt is refused; nothing that is requested will be answered."""


@checked
@dataclass(frozen=True)
class ServerOptions:
    """Settings of a `ServerResponder`; all of them may stand in a record."""

    kind: Annotated[str, OneOf(*KINDS)] = "chat"
    """"chat" (a text becomes a user's message) or "text" (the prompt is continued as it is)."""
    concurrency: Count = 4
    """Requests under way at once (>= 1)."""
    retries: CountOrZero = 6
    """Attempts after the first, for what may pass: no connection, a time-out, 408, 429, 5xx, a malformed answer. They
    are further apart each time, or as far as the server's `Retry-After` says, up to two minutes."""
    timeout: Annotated[float, Interval(gt=0, lt=86_400)] = 120.0
    """Longest wait for one answer, from the connection to its last byte (seconds, > 0); ten at most connect."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key (KEY, TOKEN or SECRET is a word of its name); unset: no key is sent."""
    cache: Path | None = None
    """Directory of answers, of any models and servers: none that lies there is asked again; None: in memory only."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields put into every request's body, such as `{"seed": 0}`; None takes a field out. None of OUR_FIELDS."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a chat server's template, such as `{"enable_thinking": False}`, in the field `chat_template_kwargs`
    of vLLM, SGLang, llama.cpp and `transformers serve`; others refuse the field or pass it over."""
    structured: bool = False
    """True to have a chat server keep answers to the JSON schema of the task's rule, in the field `response_format`."""

    def __post_init__(self) -> None:
        if not isinstance(self.key_variable, str) or not KEY_NAME.fullmatch(self.key_variable):
            # Not repeated: it may be a key, put here by mistake.
            raise UsageError(
                "server: key_variable must be the name of an environment variable that holds a key, such as "
                "OPENAI_API_KEY: KEY, TOKEN or SECRET is a word of it"
            )
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

    def key(self) -> str | None:
        """The key, from the environment; it is kept nowhere else than in the client, while requests are made.

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
    return urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class RefusedError(Exception):
    """A request that the server refuses: this prompt ("too_long", "refused"), or whatever is asked ("final")."""

    def __init__(self, status: int, message: str, meaning: Meaning, words: str = "") -> None:
        super().__init__(message)
        self.status, self.meaning, self.words = status, meaning, words


class Client:
    """A client of one server; it counts what it does."""

    def __init__(self, address: str, options: ServerOptions) -> None:
        self.address = address
        self.retried = 0
        self.sent = 0
        """Attempts of all requests."""
        self.reached = False
        """True once the server has answered anything."""
        self.given_up = False
        """True once a request has failed after its last retry: nothing more is sent."""
        self.options = options

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Requests are possible meanwhile, on connections that are kept until the end."""
        import openai  # takes a second, which only those spend who ask a server

        key, timeout, self.given_up = self.options.key(), self.options.timeout, False
        if key_in_clear(self.address, self.options) and not self.reached:
            report(
                f"warning: the key in {self.options.key_variable} is sent unencrypted to {self.address}, where others "
                "can read it; https:// hides it"
            )
        try:
            transport = _Transport(self, key)
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise UsageError(f"a proxy that the environment names cannot be used: {error}") from None
        # The client would send an administrator's key, an organization and a project that the environment names.
        self._headers = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.omit)
        if key is None:
            self._headers["Authorization"] = openai.omit
        self._openai = openai.AsyncOpenAI(
            api_key=key or "",
            admin_api_key="",
            base_url=self.address,
            max_retries=self.options.retries,
            timeout=openai.Timeout(None, connect=min(CONNECTING, timeout / 2)),
            http_client=transport,
        )
        try:
            async with self._openai:
                yield
        finally:
            del self._openai  # and the key with it

    async def request(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Post JSON to a path below the address; the JSON that comes back, without the key.

        Raises:
            RefusedError: for good.
            RunError: still failing after the last retry, or a wait that is too long.
        """
        import openai

        try:
            response = await self._openai.post(
                f"/{path}", cast_to=httpx2.Response, body=dict(body), options={"headers": self._headers}
            )
            return response.content
        except openai.APIStatusError as error:
            said, request = error.response.extensions[SAID], error.response.request
        except openai.APIConnectionError as error:
            said, request = self._missed(error), error.request
        self.given_up = True
        # Of a server that never answered all attempts count, whichever request they were for.
        attempts = int(request.headers[ATTEMPT]) + 1 if self.reached else self.sent
        raise RunError(f"server {self.address} failed {attempts} times: {said}")

    def _missed(self, error: "openai.APIConnectionError") -> str:
        """Why no answer came."""
        import openai

        cause, connecting = error.__cause__, min(CONNECTING, self.options.timeout / 2)
        if isinstance(cause, httpx2.ConnectTimeout):
            return f"cannot be reached (no connection within {connecting:g} s)"
        if isinstance(cause, httpx2.ConnectError):
            return f"cannot be reached ({line(str(cause), None)})"
        if isinstance(error, openai.APITimeoutError):
            return f"no answer within {self.options.timeout:g} s (timeout=... allows more)"
        return f"no whole answer arrived ({line(str(cause), None) or type(cause).__name__})"


class _Transport(httpx2.AsyncClient):
    """Requests of the client as they go out, and their answers as they come."""

    def __init__(self, client: Client, key: str | None) -> None:
        self._asking, self._key, self._begun = client, key, time.monotonic()
        super().__init__(
            limits=httpx2.Limits(max_connections=client.options.concurrency),
            verify=client.address.startswith("https:"),  # reading certificates takes longer than many an answer
            trust_env=not is_local(client.address),  # a proxy would see what need not leave this machine
        )

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        """The answer within the time allowed."""
        import openai

        client = self._asking
        if client.given_up:  # this task wakes in the same turn of the loop, before the group of tasks can cancel it
            raise asyncio.CancelledError
        client.sent, client.retried = client.sent + 1, client.retried + (request.headers[ATTEMPT] != "0")
        try:
            async with asyncio.timeout(client.options.timeout):
                response = await super().send(request, **settings)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            if not client.reached and time.monotonic() - self._begun > UNREACHED:
                # More likely a wrong address than one that is about to answer; this error the client passes on.
                raise openai.APIConnectionError(request=request) from error
            raise
        except TimeoutError:
            client.reached = True
            raise httpx2.ReadTimeout("", request=request) from None
        except Exception as error:  # whatever parsers make of hostile headers and cookies
            client.reached = True
            raise httpx2.ReadError(line(str(error), self._key), request=request) from error
        client.reached = True
        return self._judged(response)

    def _judged(self, response: httpx2.Response) -> httpx2.Response:
        """The response without the key, with the status that its answer should have had, and the server's words.

        Raises:
            RefusedError: trying again changes nothing, such as 429 for a quota that is used up.
        """
        content = response.content
        if self._key is not None and len(self._key) >= SECRET:
            content = content.replace(self._key.encode(), MASKED.encode())
        status, words = judged(response.status_code, content, response.headers.get("Location"))
        said = line(words, self._key)
        if status == 401:
            key = "is not set, so no key was sent" if self._key is None else "holds the key that was sent"
            said += f"; {self._asking.options.key_variable} {key}"
        if words and (meaning := meaning_of(status, words)) != "passes":
            raise RefusedError(status, said, meaning, words)
        if later := line(response.headers.get("Retry-After", ""), self._key)[:40]:
            said += f"; it asks to wait (Retry-After {later})"
        headers = {name: response.headers[name] for name in STEERING if name in response.headers}
        return httpx2.Response(
            status, headers=headers, content=content, request=response.request, extensions={SAID: said}
        )


def key_in_clear(address: str, options: ServerOptions) -> bool:
    """True if a key (not a placeholder) is sent where others can read it."""
    return len(options.key() or "") >= SECRET and not is_local(address) and not address.startswith("https:")


def line(text: str, key: str | None) -> str:
    """The first 200 characters of a message on one line, printable ones, without the key."""
    hidden = text if key is None else text.replace(key, MASKED)
    return " ".join("".join(letter if letter.isprintable() else " " for letter in hidden).split())[:200]


def meaning_of(status: int, words: str) -> Meaning:
    """Meaning of a refusal for the run, by its status and its code; a refusal of every prompt shows by its share."""
    # Beyond 500 it may be time that was too long.
    known = TOO_LONG if status in OF_THE_PROMPT else TOO_LONG[:5] if status >= 500 else ()
    if status == 413 or any(name in words.lower() for name in known):
        return "too_long"
    if "insufficient_quota" in words:
        return "final"
    if status in OF_THE_PROMPT or FILTER in words:
        return "refused"
    return "passes" if status in (408, 409, 429) or status >= 500 else "final"


def words_of(error: Any) -> str:
    """All texts and numbers of an error, each once, its message first."""
    return "; ".join(dict.fromkeys(text.strip() for text in _leaves(error) if text.strip()))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [value[name] for name in sorted(value, key=lambda name: name not in ("message", "msg", "detail"))]
    if isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def judged(status: int, content: bytes, way: str | None) -> tuple[int, str]:
    """The status that an answer should have had, and the server's words in place of an answer; "" of one.

    `way` is the address that it sends requests on to, if any.
    """
    try:
        document, place = from_json(content), ""
    except ValueError as unread:
        document, place = content.decode(errors="replace"), str(unread).rpartition(" at ")[2]
    whole = document if isinstance(document, dict) else {}
    if not 200 <= status < 300:
        words = words_of(whole.get("error") or document) if way is None else f"it sends requests on to {way}"
        return status, f"HTTP {status}: {words}" if words else f"HTTP {status}"
    choices = whole.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    error, finish, ought = whole.get("error") or first.get("error"), str(first.get("finish_reason")).lower(), 502
    if not error and "choices" not in whole and {"message", "detail"} & set(whole):
        error = whole
    if error:
        code, words = error.get("code") if isinstance(error, dict) else None, words_of(error) or "no message"
        ought = code if isinstance(code, int) and 400 <= code < 600 else 502
    elif not first:
        why = f"no JSON from {place}" if place else "choices: no list that begins with an object"
        words = f"malformed answer ({why})"
    elif finish.startswith(FILTERED_FINISHES):
        ought, words = 400, f"the answer was ended by a content filter ({finish[:60]})"
    elif finish == "error":
        words = "the answer was ended by an error"
    else:
        return status, ""
    return ought, f"HTTP {status} with an error: {words}"
