"""How requests go to a server: its kind, pace, patience, prices, and the name of the variable that holds the key."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posbias.checks import check_whole
from posbias.errors import UsageError

KINDS = {"chat": "chat/completions", "text": "completions"}
"""Kinds of server, and where below the base address requests go."""
OPTIONAL = ("requests_per_minute", "price_in", "price_out")
"""Numbers that may be None."""


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a `ServerResponder`; all of them may stand in a record."""

    kind: str = "chat"
    """"chat" (a text becomes a user's message) or "text" (the prompt is continued as it is)."""
    concurrency: int = 4
    """Requests under way at once (>= 1)."""
    retries: int = 6
    """Attempts after the first, for what may pass: no connection, a time-out, 408, 429, 5xx, a malformed answer."""
    first_delay: float = 1.0
    """Before the first retry (seconds, > 0); doubled for each further one, each shortened by up to half at random."""
    longest_delay: float = 60.0
    """No wait of our own choice is longer (seconds)."""
    longest_retry_after: float = 600.0
    """A server that asks for a longer wait is given up (seconds)."""
    requests_per_minute: float | None = None
    """Attempts begun per minute at most, evenly spaced; None: unlimited."""
    timeout: float = 120.0
    """For one answer, from the connection to its last byte (seconds, > 0); ten at most go to the connection."""
    max_answer_bytes: int = 2**24
    """A larger answer, as it comes or decompressed, ends the run (bytes, >= 1)."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; unset: no key is sent."""
    cache: Path | None = None
    """Directory of answers, of any models and servers; None: in memory only."""
    reuse: bool = True
    """Whether answers that lay in the cache before are taken; False: every request is made once more."""
    price_in: float | None = None
    """Per million tokens of prompts, any currency."""
    price_out: float | None = None
    """Per million generated tokens."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields put into every request's body, such as `{"seed": 0}`; None takes a field out."""
    jitter_seed: int = 0
    """Of the random part of the delays (>= 0)."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise UsageError(f"server kind {self.kind!r} is unknown; allowed: {', '.join(KINDS)}")
        if not isinstance(self.key_variable, str) or not self.key_variable.isidentifier():
            # Not repeated: it may be a key, put here by mistake.
            raise UsageError("server: key_variable must be the name of an environment variable, such as OPENAI_API_KEY")
        self._check_body()
        if not isinstance(self.reuse, bool):
            raise UsageError(f"server: reuse must be True or False, got {self.reuse!r}")
        for name, least in (("concurrency", 1), ("retries", 0), ("jitter_seed", 0), ("max_answer_bytes", 1)):
            check_whole(f"server: {name}", getattr(self, name), least=least)
        for name in ("first_delay", "longest_delay", "longest_retry_after", "timeout", *OPTIONAL):
            value, above = getattr(self, name), name not in ("price_in", "price_out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            wrong = not number or not 0 <= float(str(value)) < float("inf") or (above and value == 0)
            if wrong and not (value is None and name in OPTIONAL):
                bound = "above" if above else "at least"
                raise UsageError(f"server: {name} must be {bound} 0 and finite, got {value!r}")

    def _check_body(self) -> None:
        if not isinstance(self.body, Mapping) or not all(isinstance(name, str) for name in self.body):
            raise UsageError(f"server: body must be a dictionary of fields, got {type(self.body).__name__}")
        try:
            json.dumps(dict(self.body), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"server: body must be what JSON can say: {error}") from None

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
    """The address below which requests go; `/v1` is added where there is no path.

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
