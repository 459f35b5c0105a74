"""Settings of a model on a server, and its address: everything that a record may hold, so never a key."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Interval

from posbias.checks import KEY_NAME, Count, CountOrZero, OneOf, checked
from posbias.errors import UsageError
from posbias.prompts.templates import check_template_options

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
LONGEST = 86_400
"""No time is as long (seconds)."""
Seconds = Annotated[float, Interval(gt=0, lt=LONGEST)]
SECRET = 12
"""Characters from which a key is one: shorter ones are placeholders, such as `none`, that answers may well hold."""


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
    timeout: Seconds = 120.0
    """Longest wait for one answer, from the connection to its last byte (seconds, > 0); ten at most connect."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key (KEY, TOKEN or SECRET is a word of its name); unset: no key is sent."""
    cache: Path | None = None
    """Directory of answers, of any models and servers; None: in memory only."""
    reuse: bool = True
    """True to take answers that lay in the cache before; False to make every request once more."""
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
