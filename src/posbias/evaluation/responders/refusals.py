"""Refusals of a server: its own words out of whatever it sends, and their meaning for the run.

A status alone does not tell: 429 is "slower, please" and "no money left", 400 is a prompt that does not fit, one that a
content filter refuses, and a field that no prompt may have. So words decide where they are known, the status elsewhere;
a refusal that concerns every prompt shows itself by its share (`posbias.evaluation.evaluation`).
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

Meaning = Literal["passes", "too_long", "refused", "final"]
"""It may pass; this prompt does not fit; this prompt is refused; nothing that is requested will be answered."""

RETRIED = frozenset({408, 409, 425, 429})
"""Refusals that may pass; so may all of 500 and above."""
PASSING = RETRIED | {502, 503, 504, 529}
"""Of rates, times and loads: their general words of too much are not of a prompt's length."""
OF_THE_PROMPT = frozenset({400, 413, 422, 451})
"""Refusals of what was sent, not of who sent it or where."""
SAYING = (
    *("message", "msg", "detail", "error", "error_description", "errors", "code", "type", "raw"),
    *("reason", "reasons", "metadata"),
)
"""Fields in which servers say what is wrong, those of other servers behind them included."""
DEEPEST = 5
"""Levels of a document in which such fields are looked for."""

TOO_LONG = re.compile(
    r"context[\W_]*(?:length|window|size|limit|overflow)|exceed_context"
    r"|max(?:imum)?[\W_]*(?:allowed )?(?:context|model|prompt|input|seq\w*|single_sequence)[\W_]*(?:len|tok|size)"
    r"|max_position_embeddings|session_len|\bn_ctx\b"
    r"|request too large|tokens must be reduced"
    r"|reduce (?:the|your) (?:length|size|number|amount) of|reduce (?:the|your) (?:prompt|message|input)"
    r"|string too long|string_above_max_length|range of input length|maxlength: *\d+, *actual"
    r"|`inputs`? (?:tokens|must have less)|max_tokens must be at least 1, got -|超长|超过.{0,12}长度|长度.{0,8}超",
    re.IGNORECASE,
)
"""Phrases for a prompt that does not fit."""
EXCEEDS = re.compile(
    r"\b(?:prompts?|inputs?|messages?|requests?|conversation|sequence|body|payload|entity|tokens?)\b[^.;]{0,80}?"
    r"(?:\btoo (?:long|large|big)\b|\bexceed|\b(?:longer|greater|larger|more) than\b|\bover the (?:limit|maximum))"
    r"|\bexceed\w* (?:the |your )?(?:\w+ ){0,2}token limit|too many (?:input |prompt |total )?tokens",
    re.IGNORECASE,
)
"""The same in general words, unless they are of something else:"""
OTHER_LIMITS = re.compile(
    r"per (?:second|minute|hour|day|min)\b|\brate\b|\btp[md]\b|\brp[md]\b|quota|images?\b|log_?probs?|stop[ _]sequence"
    r"|temperature|took too long|\blonger than \d+ ?s|out of memory"
    r"|(?:completion|output|generated)[ _]tokens?|`?max_(?:completion_|new_)?tokens`? is too",
    re.IGNORECASE,
)
FILTERED = re.compile(
    r"content[\W_]*(?:filter|policy|management|moderation|safety|exists risk)|moderation|flagged|usage polic"
    r"|safety[\W_]*(?:system|setting|filter|check)|prohibited[\W_]*content|(?:inappropriate|harmful|unsafe) content"
    r"|data_?inspection|high risk|responsible[\W_]*ai|不安全|敏感|违规",
    re.IGNORECASE,
)
"""Phrases for a prompt that a filter refuses."""
OF_EVERY_PROMPT = re.compile(
    r"unsupported[\W_]*(?:parameter|value|field)"
    r"|un(?:known|recogni[sz]ed)[\W_]*(?:request )?(?:parameter|argument|field)"
    r"|extra (?:inputs|fields) (?:are )?not permitted|api[\W_]*key|model[\W_]*not[\W_]*found"
    r"|model\b[^.]{0,80}\b(?:does not exist|not found|is not available)",
    re.IGNORECASE,
)
"""Phrases for a wrong field, key or model that come with the status of a wrong prompt."""
EXHAUSTED = re.compile(
    r"insufficient[\W_]*(?:balance|credits?|funds)|exceeded your current quota|credit balance|out of credits?"
    r"|billing[\W_]*(?:hard[\W_]*limit|not[\W_]*active)|account[\W_]*(?:deactivated|suspended)|arrear|余额不足|欠费",
    re.IGNORECASE,
)
"""How servers say that nothing more is paid for;"""
LATER = re.compile(r"(?:retry|try again|wait)\b[^.]{0,20}\b(?:in|after|for)\b|per minute", re.IGNORECASE)
"""but some say so of a limit that passes."""


class SaidError(Exception):
    """A server's own error, whatever the status that it came with."""

    def __init__(self, status: int, words: str) -> None:
        """`words` may repeat a key."""
        super().__init__(words)
        self.status = status
        self.words = words


class RefusedError(Exception):
    """A request that the server refuses for good."""

    def __init__(self, status: int, message: str, meaning: Meaning) -> None:
        """`shown`: what may be repeated of it."""
        super().__init__(message)
        self.status = status
        self.meaning = meaning

    @property
    def alone(self) -> bool:
        """True if only this prompt is concerned, as far as one refusal can tell."""
        return self.meaning in ("too_long", "refused")


def meaning_of(status: int, words: str) -> Meaning:
    """Meaning of a refusal for the run, by the server's words, else by its status."""
    exceeds = status not in PASSING and bool(EXCEEDS.search(words)) and not OTHER_LIMITS.search(words)
    if status == 413 or (status not in (401, 403, 404) and (TOO_LONG.search(words) or exceeds)):
        return "too_long"
    if "insufficient_quota" in words or (EXHAUSTED.search(words) and not LATER.search(words)):
        return "final"
    if status in OF_THE_PROMPT and OF_EVERY_PROMPT.search(words) and not FILTERED.search(words):
        return "final"
    if status in OF_THE_PROMPT or (status not in {401, *RETRIED} and FILTERED.search(words)):
        return "refused"
    return "passes" if status in RETRIED or status >= 500 or 200 <= status < 300 else "final"


def words_of(content: bytes) -> str:
    """Message in a refusal's body: the texts of the fields that speak of errors, else the whole."""
    text = content.decode("utf-8", errors="replace")
    try:
        return said_in(json.loads(text)) or text
    except (ValueError, RecursionError):
        return text


def said_in(document: Any) -> str:
    """The texts in which a JSON value says what is wrong, each once, the outermost messages first."""
    return "; ".join(dict.fromkeys(text.strip() for text in _texts(document, DEEPEST) if text.strip()))


def _texts(value: Any, levels: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, list) and levels:
        for entry in value:
            yield from _texts(entry, levels - 1)
    elif isinstance(value, dict) and levels:
        for name in SAYING:
            yield from _texts(value.get(name), levels - 1)
