"""One server, asked by the `openai` client: retries, `Retry-After`, time-outs and typed errors are that client's own.

Beside it stands what it lacks: one deadline from the connection to the last byte of an answer, an end within seconds
where no server was ever reached, and the status of a failure for an answer with status 200 that is an error, so that it
is tried again. The key is in the client alone, and is taken out of all that comes back.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx2
import openai

from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.server_answers import RefusedError, meaning_of, said_in
from posbias.evaluation.responders.server_options import SECRET, ServerOptions, is_local
from posbias.progress import report

CONNECTING = 10.0
"""Longest wait for a connection, and for its TLS (seconds); half the time-out where that is less."""
UNREACHED = 3.0
"""After so long no further attempt is begun to reach a server that was never reached (seconds)."""
LONGEST_WAIT = 40
"""Characters of a `Retry-After` that a message repeats."""
SHOWN = 200
"""Characters of a server's own message that ours repeats."""
MASKED = "***"
ATTEMPT, RETRY, RETRY_AFTER = "x-stainless-retry-count", "x-should-retry", ("retry-after", "retry-after-ms")
"""Headers by which the client counts its retries, and by which servers steer them."""
SAID, MEANING, LATER = "posbias.said", "posbias.meaning", "posbias.later"
"""What is kept with a response: the server's words, their meaning, and for how long it asks to wait."""


class Client:
    """A client of one server; it counts what it does."""

    def __init__(self, address: str, options: ServerOptions) -> None:
        self.address = address
        self.retried = 0
        self.reached = False
        """True once the server has answered anything."""
        self.options = options

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Requests are possible meanwhile, on connections that are kept until the end."""
        key, timeout = self.options.key(), self.options.timeout
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
        try:
            response = await self._openai.post(
                f"/{path}", cast_to=httpx2.Response, body=dict(body), options={"headers": self._headers}
            )
            return response.content
        except openai.APIStatusError as error:
            failed, said = error.response, error.response.extensions[SAID]
            if (meaning := failed.extensions[MEANING]) != "passes":
                raise RefusedError(failed.status_code, said, meaning) from None
            attempts, later = _attempts(failed.request), failed.extensions[LATER]
            if later:
                said += f"; it asks to wait (Retry-After {later})"
        except openai.APIConnectionError as error:
            attempts, said = _attempts(error.request), self._missed(error)
        raise RunError(f"server {self.address} failed {attempts} times: {said}")

    def _missed(self, error: openai.APIConnectionError) -> str:
        """Why no answer came."""
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
            verify=_trusted(),
            trust_env=not is_local(client.address),  # a proxy would see what need not leave this machine
        )

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        """The answer within the time allowed."""
        client = self._asking
        client.retried += _attempts(request) > 1
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
        """The response without the key, with the status that its answer should have had, and the server's words."""
        content = response.content
        if self._key is not None and len(self._key) >= SECRET:
            content = content.replace(self._key.encode(), MASKED.encode())
        status, said = said_in(response.status_code, content, response.headers.get("Location"))
        headers = {name: response.headers[name] for name in (RETRY, *RETRY_AFTER) if name in response.headers}
        meaning = meaning_of(status, said)
        if meaning != "passes":
            headers[RETRY] = "false"  # such as 429 for a quota that is used up
        later = line(response.headers.get("Retry-After", ""), self._key)[:LONGEST_WAIT]
        kept = {SAID: line(said, self._key), MEANING: meaning, LATER: later}
        return httpx2.Response(status, headers=headers, content=content, request=response.request, extensions=kept)


def key_in_clear(address: str, options: ServerOptions) -> bool:
    """True if a key (not a placeholder) is sent where others can read it."""
    return len(options.key() or "") >= SECRET and not is_local(address) and not address.startswith("https:")


def line(text: str, key: str | None) -> str:
    """The beginning of a message on one line, of printable characters, without the key."""
    hidden = text if key is None else text.replace(key, MASKED)
    return " ".join("".join(letter if letter.isprintable() else " " for letter in hidden).split())[:SHOWN]


def _attempts(request: httpx2.Request) -> int:
    return int(request.headers[ATTEMPT]) + 1


@cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are believed; reading them takes longer than many an answer."""
    return httpx2.create_ssl_context()
