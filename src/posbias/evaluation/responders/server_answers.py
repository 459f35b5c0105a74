"""Answers read out of a server's JSON: generated texts, scores of a repeated prompt, or an error in the server's words.

What is not named here is passed over; counts and alternatives that are odd cost no answer. What a text must be and is
not raises ValueError, with its place.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from posbias.evaluation.responders.base import CUT_OFF, STOPPED, AnswerScore
from posbias.tasks.language.calls import call_text

TEXT_PARTS, THOUGHT_PARTS = ("text", "output_text"), ("thinking", "reasoning")
"""Types of the parts in which some servers give a message's content."""
FILTERED_FINISHES = ("content_filter", "content-filter", "safety", "prohibited_content", "refusal")
"""Beginnings of the reason for an answer's end if a filter has ended it; small letters."""
UNKNOWN = "unknown"
"""The end of an answer for which a server gives no reason."""
CALLED_FINISHES = ("tool_calls", "function_call")
"""Reasons for the end of an answer that ended by itself, with calls of tools."""
CUT_OFF_FINISHES = ("length", "max_tokens", "max_output_tokens", "model_length")
"""Reasons for the end of an answer at the most tokens; small letters."""
OF_THE_PROMPT = (400, 403, 413, 422, 451)
"""Statuses that refuse what was sent; who sent it, or where, is refused by others."""
BAD_GATEWAY, BAD_REQUEST = 502, 400
"""Status that an answer gets which is none, or which a filter has ended."""
QUOTA, FILTER = "insufficient_quota", "content_filter"
"""Codes of an error: nothing more is paid for, this prompt is refused."""
TOO_LONG = ("context length", "context_length", "context size", "context_size", "context window")
"""How OpenAI, vLLM, SGLang, llama.cpp and LiteLLM name what a prompt does not fit into."""
MOST_TOKENS, LARGEST_LOGPROB, ROUNDING = 2**53, 1e9, 1e-2
"""Far more than any answer has, than any log-probability is below 0, and how far rounding may lift one above it."""

Meaning = Literal["passes", "too_long", "refused", "final"]
"""It may pass; this prompt does not fit; this prompt is refused; nothing that is requested will be answered."""


class RefusedError(Exception):
    """A request that the server refuses for good."""

    def __init__(self, status: int, message: str, meaning: Meaning) -> None:
        super().__init__(message)
        self.status = status
        self.meaning = meaning

    @property
    def alone(self) -> bool:
        """True if only this prompt is concerned, as far as one refusal can tell."""
        return self.meaning in ("too_long", "refused")


def meaning_of(status: int, words: str) -> Meaning:
    """Meaning of a refusal for the run, by its status and its code; a refusal of every prompt shows by its share."""
    of_the_length = any(name in words.lower() for name in TOO_LONG)
    if status == 413 or (of_the_length and (status in OF_THE_PROMPT or status >= 500)):
        return "too_long"
    if QUOTA in words:
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


def said_in(status: int, content: bytes, way: str | None) -> tuple[int, str]:
    """The status that an answer should have had, and what the server says instead of one: nothing where it is one.

    `way` is the address that it sends requests on to, if any.
    """
    try:
        document = from_json(content)
    except ValueError as error:
        document, place = content.decode(errors="replace"), str(error).rpartition(" at ")[2]
        fault: tuple[int, str] | None = (BAD_GATEWAY, f"malformed answer (no JSON from {place})")
    else:
        fault = fault_of(document)
    if 200 <= status < 300:
        return (status, "") if fault is None else (fault[0], f"HTTP {status} with an error: {fault[1]}")
    told = document.get("error") or document if isinstance(document, dict) else document
    words = words_of(told) if way is None else f"it sends requests on to {way}"
    return status, f"HTTP {status}: {words}" if words else f"HTTP {status}"


def fault_of(document: Any) -> tuple[int, str] | None:
    """Status and words of what is an error, or no answer at all; None of an answer."""
    whole = document if isinstance(document, dict) else {}
    choices = whole.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    error = whole.get("error") or (first or {}).get("error")
    if not error and "choices" not in whole and {"message", "detail"} & set(whole):
        error = whole
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else BAD_GATEWAY
        return status, words_of(error) or "no message"
    if first is None:
        return BAD_GATEWAY, "malformed answer (choices: no list that begins with an object)"
    finish = str(first.get("finish_reason")).lower()
    if finish.startswith(FILTERED_FINISHES):
        return BAD_REQUEST, f"the answer was ended by a content filter ({finish[:60]})"
    return (BAD_GATEWAY, "the answer was ended by an error") if finish == "error" else None


@dataclass(frozen=True)
class Generated:
    """A prompt's continuation, or an answer in a conversation."""

    text: str
    """The text; calls of tools stand in it, as text."""
    finish: str
    prompt_tokens: int | None
    tokens: int | None
    """Generated tokens, as the server counts them."""
    thoughts: str | None = None
    """Thoughts that the server told apart from the answer; None if it told none apart."""


@dataclass(frozen=True)
class Scored:
    """What a repeated prompt says of the answer at its end."""

    score: AnswerScore | None
    repeated: bool
    """False if the server repeats no log-probabilities."""
    prompt_tokens: int | None
    tokens: int | None


def read_text(document: Any) -> Generated:
    """The continuation of a text."""
    choice = document["choices"][0]
    if not isinstance(choice.get("text"), str):
        raise ValueError("choices.0.text: no text")
    return Generated(choice["text"], _finish(choice), *_usage(document))


def read_message(document: Any) -> Generated:
    """The answer in a conversation."""
    choice = document["choices"][0]
    message = choice.get("message")
    # Some servers leave an empty content out, such as of an answer that never came out of its thoughts.
    if not isinstance(message, dict) or not ("content" in message or choice.get("finish_reason")):
        raise ValueError("choices.0.message.content: Field required")
    text, parts = _content(message.get("content"))
    named = _as_text(message.get("reasoning_content")) or _as_text(message.get("reasoning")) or ""
    calls = _calls(message.get("tool_calls"))
    whole = "\n".join(part for part in (text, calls) if part) if calls else text
    return Generated(whole, _finish(choice), *_usage(document), thoughts=named + parts or None)


def read_score(document: Any, answer: str, n_listed: int) -> Scored:
    """The score of the answer at the end of a repeated prompt, before what was generated after it."""
    counts = _usage(document)
    logprobs = document["choices"][0].get("logprobs")
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not tokens:
        return Scored(None, False, *counts)
    values, listed = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or [None] * len(tokens)
    if not all(isinstance(part, list) and len(part) == len(tokens) for part in (tokens, values, listed)):
        raise ValueError("lists of log-probabilities have different lengths")
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("choices.0.logprobs.tokens: no texts")
    place = _place(tokens, answer, 1 if counts[1] is None else counts[1])
    found = [_logprob(value) for value in values[place]] if place else [None]
    if place is None or None in found:
        return Scored(None, True, *counts)
    given = [value for value in found if value is not None]
    ranks = tuple(_rank(value, others, n_listed) for value, others in zip(given, listed[place], strict=True))
    return Scored(AnswerScore(tuple(min(0.0, value) for value in given), ranks), True, *counts)


def _place(tokens: list[str], answer: str, n_generated: int) -> slice | None:
    """Where the answer's tokens are; None if it does not begin with a token of its own, so far as the pieces tell.

    A character of several tokens may be repeated whole at the last of them, behind empty pieces (vLLM); these are the
    answer's.
    """
    end = max(0, len(tokens) - n_generated)
    start = end
    while start > 0 and sum(len(token) for token in tokens[start:end]) < len(answer):
        start -= 1
    if "".join(tokens[start:end]) != answer:
        return None
    if start > 0 and not tokens[start - 1]:
        # Empty pieces in front are parts of the first one if that can have parts, and if pieces do not follow theirs.
        if tokens[start].isascii() or not tokens[end - 1]:
            return None
        while start > 0 and not tokens[start - 1]:
            start -= 1
    return slice(start, end) if start else None


def _rank(value: float, others: Any, n_listed: int) -> int | None:
    """1 + the listed tokens that are more probable; None if all of those requested are."""
    if others is None:
        return None
    better = sum(other is not None and other > value for other in map(_logprob, others.values()))
    return None if better >= n_listed else 1 + better


def _logprob(value: Any) -> float | None:
    """A log-probability; None if it is infinite, the least number that there is, or none at all."""
    if value is None or (isinstance(value, float) and not -LARGEST_LOGPROB <= value < math.inf):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value > ROUNDING:
        raise ValueError(f"choices.0.logprobs: {str(value)[:40]!r} is no log-probability")
    return float(value)


def _usage(document: Any) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the answer; None where a server gives something else than their number."""
    usage = document.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))


def _count(value: Any) -> int | None:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if type(whole) is int and 0 <= whole <= MOST_TOKENS else None


def _finish(choice: Mapping[str, Any]) -> str:
    """Why an answer ended."""
    reason = choice.get("finish_reason")
    if reason is None:
        return UNKNOWN
    if not isinstance(reason, str):
        raise ValueError("choices.0.finish_reason: no text")
    lowered = reason.lower()
    return CUT_OFF if lowered in CUT_OFF_FINISHES else STOPPED if lowered in CALLED_FINISHES else reason


def _content(content: Any) -> tuple[str, str]:
    """The text of a message, and the thoughts among its parts if it comes in parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise ValueError("choices.0.message.content: no text")
    texts, thoughts = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in THOUGHT_PARTS:
            thoughts.append(_as_text(part.get("thinking", part.get("text"))) or "")
        else:
            allowed = ", ".join(TEXT_PARTS + THOUGHT_PARTS)
            raise ValueError(f"choices.0.message.content: a part of type {str(kind)[:40]!r}; allowed: {allowed}")
    return "".join(texts), "".join(thoughts)


def _as_text(thoughts: Any) -> str | None:
    """Thoughts as a text, whatever a server makes of them."""
    if not thoughts or isinstance(thoughts, str):
        return thoughts or None
    texts = [part.get("text") for part in thoughts if isinstance(part, dict)] if isinstance(thoughts, list) else []
    joined = "".join(text for text in texts if isinstance(text, str))
    return joined or json.dumps(thoughts, ensure_ascii=False)


def _calls(calls: Any) -> str | None:
    """Calls of tools in the format of OpenAI's API, as text."""
    texts = []
    for call in calls or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("choices.0.message.tool_calls: a call needs 'function' with 'name'")
        texts.append(call_text(function["name"], function.get("arguments")))
    return "\n".join(texts) or None
