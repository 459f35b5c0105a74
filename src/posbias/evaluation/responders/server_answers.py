"""Answers read out of a server's JSON: generated texts or log-probabilities of a repeated prompt; and their cache.

The models below are all that is believed of an answer: types, ranges and lengths are checked, what is not named is left
out, and no text keeps the key. What the cache holds is read by the same models: so nothing is requested and paid twice,
and a killed run continues where it stopped. One JSON file per answer, named by the hash of the request's body (the
model's name is part of it) and the address, written atomically. It holds the answer and its token counts: no address,
no key.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from posbias.errors import RunError
from posbias.evaluation.responders.base import CUT_OFF, STOPPED, AnswerScore
from posbias.evaluation.responders.refusals import SaidError, said_in
from posbias.files import write_atomically
from posbias.tasks.language.calls import call_text

SAID = "said_error"
"""Type of the validation error of an answer that is an error in the server's words."""
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
LARGEST_ERROR = 2**16
"""Bytes of an answer without choices that is looked through for a server's words."""
FULFILLED = 200
"""The status of an answer."""
MOST_LISTED = 1000
"""Far more tokens than are requested at one place."""
MOST_TOKENS, LARGEST_LOGPROB = 2**53, 1e9
"""Far more than any answer has, and than any token's log-probability is below 0."""
ANSWER_FORMAT: Literal[3] = 3
"""Goes up when what a file of the cache holds changes its meaning."""

Hide = Callable[[str], str]
"""Takes the key out of a text."""


class FailedError(Exception):
    """No answer, or none that can be used; it may pass. The reason may repeat the server's words, a key included."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""


class LateError(FailedError):
    """No answer in time."""


class MalformedError(FailedError):
    """An answer that is not what the interface promises."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"malformed answer ({reason})")


def _few(listed: object) -> object:
    """Refuses before the entries are looked at, for each could be an error of its own."""
    if isinstance(listed, dict) and len(listed) > MOST_LISTED:
        raise ValueError(f"{len(listed)} tokens listed at one place; allowed: {MOST_LISTED}")
    return listed


def _no_error(value: Any) -> None:
    """Refuses an error, with its words, and with the status that it names, if any."""
    if value:
        raise PydanticCustomError(SAID, "{words}", {"words": said_in(value) or "no message", "status": _status(value)})


def _status(error: object) -> int:
    """The status that an error names, else that of the answer that holds it."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else FULFILLED


def _finished(reason: object) -> object:
    """Why an answer ended; what a filter or a failure ended, whether or not there is some text, is none."""
    lowered = reason.lower() if isinstance(reason, str) else ""
    if lowered == "error" or lowered.startswith(FILTERED_FINISHES):
        by = "an error" if lowered == "error" else f"a content filter ({lowered[:60]})"
        raise PydanticCustomError(SAID, "{words}", {"words": f"the answer was ended by {by}", "status": FULFILLED})
    if lowered in CUT_OFF_FINISHES:
        return CUT_OFF
    return UNKNOWN if reason is None else STOPPED if lowered in CALLED_FINISHES else reason


def _calls(calls: object) -> object:
    """Calls of tools in the format of OpenAI's API as text, or as the cache holds them."""
    if not isinstance(calls, list):
        return calls
    texts = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call needs 'function' with 'name'")
        texts.append(call_text(function["name"], function.get("arguments")))
    return "\n".join(texts) or None


def _whole(content: object) -> object:
    """The text of a message that comes in parts; parts that are marked as thinking are no part of the answer."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind not in THOUGHT_PARTS:
            raise ValueError(f"a part of type {str(kind)[:40]!r}; allowed: {', '.join(TEXT_PARTS + THOUGHT_PARTS)}")
    return "".join(texts)


def _thoughts(content: object) -> list[str] | None:
    """The thoughts in a message that comes in parts, or as the cache holds them; None of a message in one piece."""
    if not isinstance(content, list):
        return None
    thoughts = []
    for part in content:
        if isinstance(part, dict):
            content_of_part = part.get("thinking", part.get("text"))
            part = _as_text(content_of_part) if part.get("type") in THOUGHT_PARTS else None
        if isinstance(part, str):
            thoughts.append(part)
    return thoughts


def _as_text(thoughts: object) -> str | None:
    """Thoughts as a text, whatever a server makes of them."""
    if not thoughts:
        return None
    if isinstance(thoughts, str):
        return thoughts
    texts = [part.get("text") for part in thoughts if isinstance(part, dict)] if isinstance(thoughts, list) else []
    joined = "".join(text for text in texts if isinstance(text, str))
    return joined or json.dumps(thoughts, ensure_ascii=False)


def _count(value: object) -> int | None:
    """A number of tokens, if that is what a server gives; some are negative or fractions."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if type(whole) is int and 0 <= whole <= MOST_TOKENS else None


def _finite(value: object) -> object:
    """A log-probability; None if it is infinite, the least number that there is, or none at all."""
    odd = isinstance(value, int | float) and not -LARGEST_LOGPROB <= value < math.inf
    return None if odd else value


def _hidden(text: str, hide: Hide | None) -> str:
    return text if hide is None else hide(text)


def _not_split(tokens: list[str], hide: Hide | None) -> list[str]:
    """Refuses tokens over which the key is spread."""
    joined = "".join(tokens)
    if _hidden(joined, hide) != joined:
        raise ValueError("the repeated prompt holds the key")
    return tokens


# pydantic's context is what takes the key out; its type cannot be checked while tests run, so it is not annotated.
Text = Annotated[str, AfterValidator(lambda text, info: _hidden(text, info.context))]
Tokens = Annotated[
    list[Text], Field(fail_fast=True), AfterValidator(lambda tokens, info: _not_split(tokens, info.context))
]
TextOrNone = Annotated[Text, BeforeValidator(lambda value: "" if value is None else value)]
"""Servers say null for an empty message."""
Finish = Annotated[Text, BeforeValidator(_finished)]
Thought = Annotated[Text | None, BeforeValidator(_as_text)]
NoError = Annotated[None, BeforeValidator(lambda value: _no_error(value))]
"""Some servers put an error where the answer would be, with the status of an answer."""
Count = Annotated[int | None, BeforeValidator(_count)]
"""Tokens; None if a server gives something else than their number."""
LogProbability = Annotated[Annotated[float, Field(le=1e-2)] | None, BeforeValidator(_finite)]
"""Natural; rounding may lift it above 0 (it is taken for 0 then), nothing else does. None: of what is impossible."""
Listed = Annotated[dict[Text, LogProbability], BeforeValidator(_few)]
"""The most probable tokens at one place."""

FIRST = ("choices", 0)
PROMPT_TOKENS = AliasPath("usage", "prompt_tokens")
GENERATED_TOKENS = AliasPath("usage", "completion_tokens")


class ServerAnswer(BaseModel):
    """An answer as it is kept. Fields have aliases for where a server puts them, and names for the cache."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    error: NoError = Field(None, exclude=True)
    error_of_choice: NoError = Field(None, validation_alias=AliasPath(*FIRST, "error"), exclude=True)
    prompt_tokens: Count = Field(None, validation_alias=PROMPT_TOKENS)

    @property
    def generated(self) -> int | None:
        """Generated tokens, as the server counts them."""
        count: int | None = getattr(self, "tokens_generated" if isinstance(self, Echo) else "tokens")
        return count


class Generated(ServerAnswer):
    """A prompt's continuation."""

    text: Text = Field(validation_alias=AliasPath(*FIRST, "text"))
    finish: Finish = Field(UNKNOWN, validation_alias=AliasPath(*FIRST, "finish_reason"))
    tokens: Count = Field(None, validation_alias=GENERATED_TOKENS)

    @property
    def whole(self) -> str:
        """The text with what the server tells apart as calls of tools."""
        calls = getattr(self, "calls", None)
        return "\n".join(part for part in (self.text, calls) if part) if calls else self.text


class Message(Generated):
    """An answer in a conversation; its thoughts, where the server tells them from it, under either name."""

    reasoning_content: Thought = Field(None, validation_alias=AliasPath(*FIRST, "message", "reasoning_content"))
    reasoning: Thought = Field(None, validation_alias=AliasPath(*FIRST, "message", "reasoning"))
    calls: Annotated[Text | None, BeforeValidator(_calls)] = Field(
        None, validation_alias=AliasPath(*FIRST, "message", "tool_calls")
    )
    """Calls of tools, as text (`call_text`)."""
    thought_parts: Annotated[list[Text] | None, BeforeValidator(_thoughts)] = Field(
        None, validation_alias=AliasPath(*FIRST, "message", "content")
    )
    text: Annotated[TextOrNone, BeforeValidator(_whole)] = Field(
        validation_alias=AliasPath(*FIRST, "message", "content")
    )

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, answer: Any) -> Any:
        """Some servers leave an empty content out, such as of an answer that never came out of its thoughts."""
        try:
            first, *further = answer["choices"]
            if first["finish_reason"] and "content" not in first["message"]:
                whole = {**first, "message": {**first["message"], "content": None}}
                return {**answer, "choices": [whole, *further]}
        except (KeyError, TypeError, ValueError):
            pass  # the fields say what is wrong
        return answer

    @property
    def thoughts(self) -> str | None:
        """Thoughts that the server told apart from the answer; None if it told none apart."""
        named = self.reasoning_content or self.reasoning
        return "".join([named or "", *(self.thought_parts or [])]) or None


class Echo(ServerAnswer):
    """Tokens of a repeated prompt with their log-probabilities; `tokens` is None if the server gives none."""

    finish: Finish = Field(UNKNOWN, validation_alias=AliasPath(*FIRST, "finish_reason"), exclude=True)
    text: TextOrNone = Field(validation_alias=AliasPath(*FIRST, "text"))
    tokens_generated: Count = Field(None, validation_alias=GENERATED_TOKENS)
    tokens: Tokens | None = Field(None, validation_alias=AliasPath(*FIRST, "logprobs", "tokens"))
    logprobs: Annotated[list[LogProbability], Field(fail_fast=True)] | None = Field(
        None, validation_alias=AliasPath(*FIRST, "logprobs", "token_logprobs")
    )
    listed: Annotated[list[Listed | None], Field(fail_fast=True)] | None = Field(
        None, validation_alias=AliasPath(*FIRST, "logprobs", "top_logprobs")
    )

    @model_validator(mode="after")
    def _same_length(self) -> "Echo":
        parts = (self.logprobs or [], self.listed or self.tokens or [])
        if self.tokens and any(len(part) != len(self.tokens) for part in parts):
            raise ValueError("lists of log-probabilities have different lengths")
        return self


Kind = TypeVar("Kind", bound=ServerAnswer)


def read_answer(body: bytes, kind: type[Kind], hide: Hide) -> Kind:
    """An answer from a server's JSON.

    Raises:
        MalformedError: it is no JSON, or not of this kind; the message says where, not what stands there.
        SaidError: it is an error in the server's own words.
    """
    try:
        return kind.model_validate_json(body, context=hide)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        for context in (fault["ctx"] for fault in errors if fault["type"] == SAID):
            raise SaidError(context["status"], context["words"]) from None
        if "choices" not in (document := _small_object(body)) and (words := said_in(document)):
            raise SaidError(_status(document), words) from None
        first = errors[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "json_invalid":
            raise MalformedError(f"no JSON from {first['msg'].rpartition(' at ')[2]}") from None
        raise MalformedError(f"{where or 'it'}: {first['msg'].removeprefix('Value error, ')}") from None


def _small_object(body: bytes) -> dict[str, Any]:
    """A JSON object of the size of an error; empty if there is none."""
    try:
        document = json.loads(body) if len(body) <= LARGEST_ERROR else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def score_of(echo: Echo, answer: str, n_listed: int) -> AnswerScore | None:
    """The score of the answer at the end of a repeated prompt, before what was generated after it.

    A character of several tokens may be repeated whole at the last of them, behind empty pieces (vLLM); these are the
    answer's.

    Returns:
        None if the answer does not begin with a token of its own, so far as the pieces tell, or a log-probability is
        missing.
    """
    tokens, logprobs = echo.tokens or [], echo.logprobs or []
    end = max(0, len(tokens) - (1 if echo.tokens_generated is None else echo.tokens_generated))
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
    if start == 0:
        return None
    values = [value for value in logprobs[start:end] if value is not None]
    if len(values) < end - start:
        return None
    listed = echo.listed[start:end] if echo.listed else [None] * len(values)
    ranks = tuple(_rank(value, alternatives, n_listed) for value, alternatives in zip(values, listed, strict=True))
    return AnswerScore(tuple(min(0.0, value) for value in values), ranks)


def _rank(value: float, alternatives: dict[str, float | None] | None, n_listed: int) -> int | None:
    """1 + the listed tokens that are more probable; None if all of those requested are."""
    if alternatives is None:
        return None
    better = sum(alternative is not None and alternative > value for alternative in alternatives.values())
    return None if better >= n_listed else 1 + better


class _Kept(BaseModel, Generic[Kind]):
    """Content of a file of the cache."""

    format: Literal[3]
    key: str
    answer: Kind


class AnswerCache:
    """Answers by key; without a directory they are kept in memory, for as long as the responder lives.

    Answers that lie there already count if `reuse` is set; otherwise only those that this cache has kept.
    """

    def __init__(self, directory: Path | None, *, reuse: bool, hide: Hide) -> None:
        self._directory = None if directory is None else Path(directory)
        self._hide = hide
        self._memory: dict[str, ServerAnswer] | None = {} if directory is None or not reuse else None

    def find(self, key: str, kind: type[Kind]) -> Kind | None:
        """The answer under a key; None if there is none, or a damaged one."""
        if self._memory is not None or self._directory is None:
            remembered = (self._memory or {}).get(key)
            return remembered if isinstance(remembered, kind) else None
        try:
            stored = self._path(self._directory, key).read_bytes()
            entry = _Kept[kind].model_validate_json(stored, by_alias=False, by_name=True, context=self._hide)  # type: ignore[valid-type]
        except (OSError, ValidationError):
            return None
        return entry.answer if entry.key == key else None

    def keep(self, key: str, answer: ServerAnswer) -> None:
        """Store an answer, whole or not at all (RunError: the disk is full)."""
        if self._memory is not None:
            self._memory[key] = answer
        if self._directory is None:
            return
        document = _Kept(format=ANSWER_FORMAT, key=key, answer=answer).model_dump(serialize_as_any=True)
        path = self._path(self._directory, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(document, sort_keys=True).encode())
        except OSError as error:
            raise RunError(f"cannot write to {str(self._directory)!r}: {error.strerror or error}") from None

    @staticmethod
    def _path(directory: Path, key: str) -> Path:
        return directory / key[:2] / f"{key}.json"
