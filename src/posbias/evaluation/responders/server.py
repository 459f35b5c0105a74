"""`ServerResponder`: a model behind any OpenAI-compatible server, text or chat.

Texts are generated at temperature 0. Answers are scored where a text server repeats the prompt with log-probabilities
(`echo` and `logprobs`, as vLLM's /v1/completions does); elsewhere there is no score, and the record says so. Every
finished answer is kept at once, as the server gave it, one file an answer: a run that breaks off is continued with
`--resume`, and asks nothing twice. A record may hold all settings, so none is a key.

What is not named here in a server's JSON is passed over; counts and alternatives that are odd cost no answer. What a
text must be and is not raises ValueError, with its place.
"""

import asyncio
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal
from pydantic_core import from_json

from posbias.checks import checked
from posbias.errors import RunError, UsageError, printable
from posbias.evaluation.responders.base import (
    CUT_OFF,
    MARKED,
    REFUSED,
    SKIPPED,
    STOPPED,
    UNFINISHED,
    AnswerScore,
    Messages,
    Reply,
    Request,
    Responder,
    Response,
    opens_thoughts,
    told_apart,
)
from posbias.evaluation.responders.client import (
    FILTER,
    KINDS,
    SCHEMA_FIELD,
    SECRET,
    TEMPLATE_FIELD,
    Client,
    RefusedError,
    ServerOptions,
    check_address,
)
from posbias.files import write_file
from posbias.prompts.tokens import described_tools, rendered, with_template_options
from posbias.tasks.language.calls import call_text

TEXT_PARTS, THOUGHT_PARTS = ("text", "output_text"), ("thinking", "reasoning")
"""Types of the parts in which some servers give a message's content."""
UNKNOWN = "unknown"
"""The end of an answer for which a server gives no reason."""
CALLED_FINISHES = ("tool_calls", "function_call")
"""Reasons for the end of an answer that ended by itself, with calls of tools."""
CUT_OFF_FINISHES = ("length", "max_tokens", "max_output_tokens", "model_length")
"""Reasons for the end of an answer at the most tokens; small letters."""
MOST_TOKENS, LARGEST_LOGPROB, ROUNDING = 2**53, 1e9, 1e-2
"""Far more than any answer has, than any log-probability is below 0, and how far rounding may lift one above it."""
WORK = ("requests", "reused", "prompt_tokens", "cached_tokens", "generated_tokens", "uncounted")
"""What is counted: answers that the server gave, answers from the cache, tokens (of prompts also those that the server
says it had kept from earlier ones), answers whose tokens the server did not count."""
INSTEAD = {"max_tokens": "max_completion_tokens", "temperature": ""}
"""Fields that OpenAI's reasoning models refuse, and what they take instead; nothing: the value is the server's own."""
LISTED = 5
"""More probable tokens that are requested at each place; a rank beyond them is not known."""

Read = TypeVar("Read")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading an answer that is not what the interface promises."""


def read_text(document: Any) -> Response:
    """The continuation of a text."""
    choice = document["choices"][0]
    if not isinstance(choice.get("text"), str):
        raise ValueError("choices.0.text: no text")
    return Response(choice["text"], _finish(choice), *_usage(document), continues=True)


def read_message(document: Any) -> Response:
    """The answer in a conversation, calls of tools among it as text, and the thoughts that the server told apart."""
    choice = document["choices"][0]
    message = choice.get("message")
    # Some servers leave an empty content out, such as of an answer that never came out of its thoughts.
    if not isinstance(message, dict) or not ("content" in message or choice.get("finish_reason")):
        raise ValueError("choices.0.message.content: Field required")
    text, parts = _content(message.get("content"))
    named = _as_text(message.get("reasoning_content")) or _as_text(message.get("reasoning")) or ""
    calls = _calls(message.get("tool_calls"))
    whole = "\n".join(part for part in (text, calls) if part) if calls else text
    return Response(whole, _finish(choice), *_usage(document), thoughts=named + parts or None)


def read_score(document: Any, answer: str) -> tuple[bool, AnswerScore | None]:
    """Whether a server repeats log-probabilities of the prompt; and the score of the answer at its end, before what was
    generated after it."""
    logprobs = document["choices"][0].get("logprobs")
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not tokens:
        return False, None
    values, listed = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or [None] * len(tokens)
    if not all(isinstance(part, list) and len(part) == len(tokens) for part in (tokens, values, listed)):
        raise ValueError("lists of log-probabilities have different lengths")
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("choices.0.logprobs.tokens: no texts")
    _, generated = _usage(document)
    place = _place(tokens, answer, 1 if generated is None else generated)
    found = [_logprob(value) for value in values[place]] if place else [None]
    if place is None or None in found:
        return True, None
    given = [value for value in found if value is not None]
    ranks = tuple(_rank(value, others) for value, others in zip(given, listed[place], strict=True))
    return True, AnswerScore(tuple(min(0.0, value) for value in given), ranks)


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


def _rank(value: float, others: Any) -> int | None:
    """1 + the listed tokens that are more probable; None if all of those requested are."""
    if others is None:
        return None
    better = sum(other is not None and other > value for other in map(_logprob, others.values()))
    return None if better >= LISTED else 1 + better


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
    given = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in given]
    prompt, answer = (value if type(value) is int and 0 <= value <= MOST_TOKENS else None for value in whole)
    return prompt, answer


def _cached(usage: Mapping[str, Any]) -> int:
    """Tokens of the prompt that a server read from its prefix cache, as OpenAI and vLLM or as DeepSeek say it."""
    details = usage.get("prompt_tokens_details")
    said = details.get("cached_tokens") if isinstance(details, dict) else usage.get("prompt_cache_hit_tokens")
    return said if type(said) is int and 0 <= said <= MOST_TOKENS else 0


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


@checked
class ServerResponder(Responder):
    """A model on a server.

    Args:
        base_url: Such as `http://localhost:8000/v1`; `/v1` is added if there is no path.
        model: The name the server knows it by.
        options: Kind, patience, cache, and the variable that holds the key.
        tokenizer: The model's own, to count lengths and locate items; None: both stay unknown. A text is counted as it
            is, a conversation as the tokenizer's chat template renders it.

    Raises:
        UsageError: not an address, one that seems to contain a key, no model, or a key that would be recorded.
    """

    def __init__(
        self, base_url: str, model: str, options: ServerOptions | None = None, *, tokenizer: Any = None
    ) -> None:
        if not isinstance(model, str) or not model:
            raise UsageError(f"a server's model is named by a text that is not empty, got {model!r}")
        self.options = options or ServerOptions()
        self.model = model
        self.tokenizer = with_template_options(tokenizer, None if tokenizer is None else self.options.template_options)
        self._work = dict.fromkeys(WORK, 0)
        self._client = Client(check_address(base_url), self.options)
        recorded = [self._client.address, model, dict(self.options.body), dict(self.options.template_options)]
        if len(key := self.options.key() or "") >= SECRET and key in json.dumps(recorded):
            raise UsageError(
                f"the key in {self.options.key_variable} stands in the address, model or body, too; these are recorded"
            )
        self._kept: dict[str, bytes] = {}
        self._not_taken: set[str] = set()
        """Fields of `INSTEAD` that the model has refused."""
        self.scores: bool | None = None if self.options.kind == "text" else False
        """True if this server scores answers; None before the first such request."""
        self._no_scores: str | None = None if self.options.kind == "text" else "a chat server does not repeat prompts"

    def __repr__(self) -> str:
        return printable(f"ServerResponder({self.model} at {self._client.address})")

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Answer several requests at once, with scores if the server can give them. See `Responder.respond`.

        A prompt that the server refuses by itself, such as by a content filter, is left out and says why.
        """
        if self.options.kind == "text" and any(not isinstance(request.prompt, str) for request in requests):
            raise UsageError("a server of kind 'text' takes prompts as text, got a conversation; allowed kind: chat")
        if self.options.structured and any(request.schema is None for request in requests):
            raise UsageError("structured=True: the rule of this task has no schema; a letter, number or verdict has")
        # A thread of its own, since that of a notebook has a loop; an interruption cancels what is under way.
        with start_blocking_portal() as portal:
            return portal.call(self._replies, requests, generate, score)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record; the key is not among them."""
        vocabulary = None
        if self.tokenizer is not None:  # tells one tokenizer from another
            parts = [sorted(self.tokenizer.get_vocab().items()), getattr(self.tokenizer, "chat_template", None)]
            vocabulary = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return {
            "address": self._client.address,
            # Some servers know a model by a path of their machine.
            "model": Path(self.model).name if Path(self.model).is_absolute() else self.model,
            "tokenizer": vocabulary,
            **{name: value for name, value in asdict(self.options).items() if name != "cache"},
            **self.counts(),
            **self.learnt(),
        }

    def learnt(self) -> dict[str, Any]:
        """Does the server score answers, and if not, why? Is the temperature its own, since it takes no other?"""
        own = {"own_temperature": True} if "temperature" in self._not_taken else {}
        return {"scores": self.scores, "no_scores_because": self._no_scores, **own}

    def counts(self) -> dict[str, float]:
        """Requests, tokens and retries."""
        return {**self._work, "retried": self._client.retried}

    async def _replies(self, requests: Sequence[Request], generate: bool, score: bool) -> list[Reply]:
        """All replies, in order; where one fails for good, nothing more is requested, or paid."""
        self._places = asyncio.Semaphore(self.options.concurrency)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        tasks: list[asyncio.Task[Reply]] = []
        try:
            async with self._client.connected(), asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._reply(request, generate, score)) for request in requests]
        except ExceptionGroup as failures:
            failed = failures.exceptions[0]
            if not isinstance(failed, RunError | RefusedError):
                raise failed from None
            finished = sum(not task.cancelled() and task.exception() is None for task in tasks)
            where = "in memory" if self.options.cache is None else "in the cache"
            lead = "" if isinstance(failed, RunError) else f"server {self._client.address} refuses: "
            raise RunError(
                f"{lead}{failed}; of {len(tasks)} answers asked together {finished} are finished and kept {where}"
            ) from None
        return [task.result() for task in tasks]

    async def _reply(self, request: Request, generate: bool, score: bool) -> Reply:
        response = scored = None
        await self._places.acquire()
        try:
            if generate:
                response = await self._generated(request)
            if score:
                scored = await self._scored(request)
        except RefusedError as refusal:
            if refusal.meaning == "final":
                raise
            # A prompt only generated from, or only scored, would be missing from one curve without a word.
            finish = SKIPPED if refusal.meaning == "too_long" else REFUSED
            response = Response(text="", finish=finish, tokens=0, skipped=str(refusal))
        self._places.release()  # behind a failure there is no place any more, so that nothing is begun
        return Reply(response, scored)

    async def _generated(self, request: Request) -> Response:
        asked = {"model": self.model, **self._asked(request)}
        body = {**asked, "max_tokens": request.max_tokens, "temperature": 0}
        # A conversation may open with thoughts, and end within them where a line does: its answers are cut here.
        if request.stop and self.options.kind == "text":
            body["stop"] = list(request.stop)
        if self.options.structured:
            return await self._structured(body, request)
        response = await self._told(body, request)
        if "stop" in body and response.finish == STOPPED and not response.text.strip():
            del body["stop"]  # it ended in blank lines or thoughts, before the answer
            response = await self._told(body, request)
        return response

    async def _structured(self, body: dict[str, Any], request: Request) -> Response:
        """The answer of a server that keeps to a schema, out of its JSON; as it is if the server did not keep to it."""
        answer = {"type": "object", "properties": {"answer": request.schema}, "required": ["answer"]}
        schema = {"name": "answer", "strict": True, "schema": {**answer, "additionalProperties": False}}
        body = {**body, "max_tokens": request.max_tokens + 32}  # for what is JSON around it
        body[SCHEMA_FIELD] = {"type": "json_schema", "json_schema": schema}
        response = await self._told(body, replace(request, stop=()))
        with suppress(ValueError, LookupError, TypeError):
            return replace(response, text=str(json.loads(response.text)["answer"]))
        return response

    async def _told(self, body: dict[str, Any], request: Request) -> Response:
        """An answer with the thoughts told from it, by the server or by marks."""
        continues = self.options.kind == "text"
        said = await self._answer(body, read_text if continues else read_message)
        finish, pattern = said.finish, request.answer_pattern
        # Some servers call every end a stop, or give no reason: then the count of tokens tells.
        if finish in (STOPPED, UNKNOWN) and (said.tokens or 0) >= body["max_tokens"]:
            finish = CUT_OFF
        if said.thoughts is not None and pattern is None:
            told = told_apart(said.text)
            thinking = MARKED if told.answer.strip() else UNFINISHED
            told = replace(told, thoughts=said.thoughts + (told.thoughts or ""), thinking=thinking)
        else:
            # Behind a prompt that opens thoughts a server may take them out without a word, but not before they end.
            opened = False
            if finish == CUT_OFF and self.tokenizer is not None and (continues or self.tokenizer.chat_template):
                opened = opens_thoughts(rendered(self._conversation(request), self.tokenizer).text)
            told = told_apart(said.text, opened=opened, pattern=pattern)
        told = told.cut(request.stop)
        finish = STOPPED if told.stopped else finish
        return replace(said, text=told.answer, finish=finish, thoughts=told.thoughts, thinking=told.thinking)

    def _asked(self, request: Request) -> dict[str, Any]:
        """The fields that hold the prompt: the text, or the messages, and the tools that they begin with."""
        turns = self._conversation(request)
        if isinstance(turns, str):
            return {"prompt": turns}
        tools, messages = described_tools(turns)
        return {"messages": [dict(message) for message in messages], **({"tools": tools} if tools else {})}

    def _conversation(self, request: Request) -> str | Messages:
        """The prompt as it is sent: a text to a chat server is a message of the user."""
        if self.options.kind == "text" or not isinstance(request.prompt, str):
            return request.prompt
        return [{"role": "user", "content": request.prompt}]

    async def _scored(self, request: Request) -> AnswerScore | None:
        if self.scores is False or request.answer is None or not isinstance(request.prompt, str):
            return None
        text = request.prompt + request.answer
        reason = "the server repeats no log-probabilities"
        # One token more than nothing: not every server accepts 0.
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": LISTED}
        try:
            read = partial(read_score, answer=request.answer)
            repeated, score = await self._answer({"model": self.model, **body}, read)
        except RefusedError as refusal:
            of_the_prompt = self.scores or refusal.meaning == "too_long" or FILTER in str(refusal)
            if of_the_prompt or refusal.status not in (400, 404, 422):
                raise
            repeated, score, reason = False, None, str(refusal)
        if repeated or not self.scores:  # once it has worked, a single refusal does not end it
            self.scores, self._no_scores = repeated, None if repeated else reason
        return score

    async def _answer(self, body: dict[str, Any], read: Callable[[Any], Read]) -> Read:
        """What is read of the answer to a request, which is made unless its answer is kept."""
        taken = {INSTEAD[name] if name in self._not_taken else name: value for name, value in body.items()}
        taken.pop("", None)
        whole = {name: value for name, value in {**taken, **self.options.body}.items() if value is not None}
        if self.options.template_options:
            whole[TEMPLATE_FIELD] = dict(self.options.template_options)
        path, cache = KINDS[self.options.kind], self.options.cache
        named = json.dumps({"address": f"{self._client.address}/{path}", "body": whole}, sort_keys=True)
        key = hashlib.sha256(named.encode()).hexdigest()
        file = None if cache is None else Path(cache) / key[:2] / f"{key}.json"
        async with self._turns[key]:  # the same request twice at once is made once
            with suppress(OSError, *UNREADABLE):  # damaged, or none
                kept = from_json(self._kept.get(key, b"") if file is None else file.read_bytes())
                found = read(kept)
                self._work["reused"] += 1
                self._work["uncounted"] += None in _usage(kept)
                return found
            try:
                content = await self._client.request(path, whole)
            except RefusedError as refusal:
                # A field that the model does not take, or not with this value.
                unsupported = refusal.words if "unsupported_" in refusal.words else ""
                refused = {name for name in INSTEAD if name in whole and f"'{name}'" in unsupported}
                if not refused - set(self.options.body):
                    raise
                self._not_taken |= refused
                return await self._answer(body, read)
            try:
                document = from_json(content)
                found = read(document)
            except UNREADABLE as error:
                raise RunError(f"server {self._client.address}: malformed answer ({error})") from None
            if file is None:
                self._kept[key] = content
            else:
                write_file(file, content)
        prompt_tokens, tokens = _usage(document)
        self._work["requests"] += 1
        if prompt_tokens is None or tokens is None:
            self._work["uncounted"] += 1
        else:
            self._work["prompt_tokens"] += prompt_tokens
            self._work["cached_tokens"] += _cached(document["usage"])
            self._work["generated_tokens"] += tokens
        return found
