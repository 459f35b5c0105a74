"""One POST to a server, whole within its time and its size, whatever arrives.

The client is asynchronous, because only then one deadline covers everything: name, connection, TLS, hints, headers and
body are all cancelled at once. Its event loop runs in a thread of its own while the connection is open.
"""

import json
import ssl
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation.responders.masking import Mask
from posbias.evaluation.responders.server_options import ServerOptions

CONNECTING = 10.0
"""Longest wait for a connection, and for its TLS (seconds); half the time-out where that is less.

These two have limits of their own because the client leaves a socket open that is cancelled in the middle of TLS.
"""
REFUSAL = 2**16
"""Bytes that are read of a refusal; its message stands at the beginning."""
_GZIP = 31
"""What zlib calls the gzip format with its largest window."""


class FailedError(Exception):
    """No answer, or none that can be used; it may pass. The reason may repeat the server's words, a key included."""


class MalformedError(FailedError):
    """An answer that is not what the interface promises."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"malformed answer ({reason})")


class TooLargeError(Exception):
    """An answer beyond the limit."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    retry_after: str | None
    """The header of that name."""
    body: bytes
    """Decoded; of a refusal the beginning."""

    @property
    def fulfilled(self) -> bool:
        """Whether the server did what it was asked to."""
        return _fulfilled(self.status)


class Connection:
    """Posts JSON to one server; used by several threads at once while it is open."""

    def __init__(self, options: ServerOptions, mask: Mask) -> None:
        self._options = options
        self._mask = mask

    @contextmanager
    def open(self, key: str | None) -> Iterator[None]:
        """Connections are kept until the end; what is still under way then is cancelled if an error ends it.

        Raises:
            UsageError: a proxy in the environment is none.
        """
        import httpx2
        from anyio.from_thread import start_blocking_portal

        headers = {"Accept-Encoding": "gzip", "Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            client = httpx2.AsyncClient(
                headers=headers,
                timeout=httpx2.Timeout(None, connect=min(CONNECTING, self._options.timeout / 2)),
                limits=httpx2.Limits(max_connections=self._options.concurrency),
                verify=_trusted(),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise UsageError(f"a proxy that the environment names cannot be used: {error}") from None
        with (
            self._mask.in_logs(),
            start_blocking_portal("asyncio") as self._portal,
            self._portal.wrap_async_context_manager(client) as self._client,
        ):
            yield

    def post(self, url: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a body, sent as JSON.

        Raises:
            FailedError: there is no connection, what comes is no HTTP or not encoded as it says, or it comes too late.
            TooLargeError: a fulfilled request's answer is larger than allowed, as it comes or decoded.
        """
        import httpx2

        try:
            status, headers, raw = self._portal.call(self._exchange, url, json.dumps(body).encode())
        except (TimeoutError, httpx2.TimeoutException):
            raise FailedError(f"no answer within {self._options.timeout:g} s") from None
        except httpx2.ConnectError as error:
            raise FailedError(f"cannot be reached ({error})") from None
        except Exception as error:  # whatever the client's parsers make of hostile headers and cookies
            raise FailedError(f"no whole answer arrived ({str(error) or type(error).__name__})") from None
        try:
            content = self._decoded(raw, headers.get("Content-Encoding", ""))
        except MalformedError:
            if _fulfilled(status):
                raise
            content = b""
        if _fulfilled(status) and max(len(raw), len(content)) > self._options.max_answer_bytes:
            raise TooLargeError
        return Answer(status, headers.get("Retry-After"), content)

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


@cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are believed; reading them takes longer than many an answer."""
    import httpx2

    return httpx2.create_ssl_context()


def _fulfilled(status: int) -> bool:
    return 200 <= status < 300
