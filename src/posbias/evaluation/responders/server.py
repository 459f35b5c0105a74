"""`ServerResponder`: a model behind any OpenAI-compatible server, text or chat.

Texts are generated at temperature 0. Answers are scored where a text server repeats the prompt with log-probabilities
(`echo` and `logprobs`, as vLLM's /v1/completions does); elsewhere there is no score, and the record says so. Every
finished answer is kept at once, so that a run that breaks off is continued with `--resume`.
"""

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.display.showing import Presented, Shown
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import (
    CUT_OFF,
    REFUSED,
    SKIPPED,
    STOPPED,
    AnswerScore,
    Messages,
    Reply,
    Request,
    Responder,
    Response,
)
from posbias.evaluation.responders.client import (
    KINDS,
    SCHEMA_FIELD,
    TEMPLATE_FIELD,
    WRAPPING,
    Client,
    ServerOptions,
    StoppedError,
    check_address,
)
from posbias.evaluation.responders.refusals import FILTERED, RefusedError
from posbias.evaluation.responders.server_answers import (
    UNKNOWN,
    AnswerCache,
    Echo,
    Generated,
    Kind,
    Message,
    score_of,
)
from posbias.evaluation.responders.thoughts import MARKED, UNFINISHED, Told, opens_thoughts, told_apart
from posbias.prompts.templates import described_tools, with_template_options
from posbias.tasks.language import rendered

OF_SCHEMAS = re.compile(r"response_?format|json_?schema|schema|structured|guided|grammar", re.IGNORECASE)
"""How servers speak of what they refuse of `structured`."""
LISTED = 5
"""More probable tokens that are requested at each place; a rank beyond them is not known."""


@dataclass(frozen=True)
class Usage:
    """Work that a server has done so far."""

    requests: int = 0
    """Answers that the server gave."""
    reused: int = 0
    """Answers taken from the cache."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    """Tokens of prompts and answers taken from the cache, for which nothing is paid again."""
    uncounted: int = 0
    """Answers whose tokens the server did not count."""


@checked
class ServerResponder(Presented, Responder):
    """A model on a server.

    Args:
        base_url: Such as `http://localhost:8000/v1`; `/v1` is added if there is no path.
        model: The name the server knows it by.
        options: Kind, pace, patience, prices, cache, and the variable that holds the key.
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
        self.usage = Usage()
        self._client = Client(check_address(base_url), self.options)
        recorded = json.dumps(
            [self._client.address, model, dict(self.options.body), dict(self.options.template_options)]
        )
        if self._client.mask.answer(recorded) != recorded:
            raise UsageError(
                f"the key in {self.options.key_variable} stands in the address, model or body, too; these are recorded"
            )
        self._cache = AnswerCache(self.options.cache, reuse=self.options.reuse, hide=self._client.mask.answer)
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self.scores: bool | None = None if self.options.kind == "text" else False
        """True if this server scores answers; None before the first such request."""
        self._no_scores: str | None = None if self.options.kind == "text" else "a chat server does not repeat prompts"

    def shown(self) -> Shown:
        """The model and its server."""
        return Shown(f"{self.model} at {self._client.address}")

    @property
    def cost(self) -> float | None:
        """Price of the tokens counted so far, in the currency of the prices; None without prices."""
        price_in, price_out = self.options.price_in, self.options.price_out
        if price_in is None and price_out is None:
            return None
        usage = self.usage
        return (usage.prompt_tokens * (price_in or 0.0) + usage.generated_tokens * (price_out or 0.0)) / 1e6

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Answer several requests at once, with scores if the server can give them. See `Responder.respond`.

        A prompt that the server refuses by itself, such as by a content filter, is left out and says why.
        """
        if self.options.kind == "text" and any(not isinstance(request.prompt, str) for request in requests):
            raise UsageError("a server of kind 'text' takes prompts as text, got a conversation; allowed kind: chat")
        if self.options.structured and any(request.schema is None for request in requests):
            raise UsageError("structured=True: the rule of this task has no schema; allowed: a letter, number or date")
        self._client.stop.clear()
        # The others are told to stop before any thread is joined, should the user interrupt.
        pool = ThreadPoolExecutor(self.options.concurrency)
        try:
            with self._client.connected():
                try:
                    futures = [pool.submit(self._reply, request, generate, score) for request in requests]
                    return self._gather(futures)
                finally:
                    self._client.stop.set()  # before the connection closes: whoever is cut off does not try again
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def repeated(self, seed: int) -> "ServerResponder":
        """The same model on the same server, whose answers at a temperature differ with the seed."""
        if not self.options.body.get("temperature"):
            raise UsageError("repeats differ at a temperature alone: --server-options \"body={'temperature': 1}\"")
        options = replace(self.options, body={**self.options.body, "seed": seed})
        return ServerResponder(self._client.address, self.model, options, tokenizer=self.tokenizer)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record; the key is not among them."""
        options = asdict(self.options)
        options.pop("cache")  # a path of this machine
        options.pop("reuse")
        return {
            "address": self._client.address,
            # Some servers know a model by a path of their machine.
            "model": Path(self.model).name if Path(self.model).is_absolute() else self.model,
            "tokenizer": None if self.tokenizer is None else vocabulary_sha256(self.tokenizer),
            **options,
            "key_in_clear": self._client.key_in_clear,
            "cost": None,
            **self.counts(),
            **self.learnt(),
        }

    def learnt(self) -> dict[str, Any]:
        """Does the server score answers, and if not, why?"""
        return {"scores": self.scores, "no_scores_because": self._no_scores}

    def counts(self) -> dict[str, float]:
        """Requests, tokens, retries and, with prices, what they cost."""
        priced = {} if self.cost is None else {"cost": self.cost}
        return {**asdict(self.usage), "retried": self._client.retried, **priced}

    def _gather(self, futures: Sequence["Future[Reply]"]) -> list[Reply]:
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        if pending:
            self._client.stop.set()
            for future in pending:
                future.cancel()
            wait(pending)
        errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
        failed = next((error for error in errors if not isinstance(error, StoppedError)), None)
        if failed is None:
            return [future.result() for future in futures]
        if not isinstance(failed, RunError | RefusedError):
            raise failed
        finished = sum(not future.cancelled() and future.exception() is None for future in futures)
        where = "in memory" if self.options.cache is None else "in the cache"
        lead = "" if isinstance(failed, RunError) else f"server {self._client.address} refuses: "
        raise RunError(f"{lead}{failed}; {finished} of {len(futures)} answers are finished and kept {where}") from None

    def _reply(self, request: Request, generate: bool, score: bool) -> Reply:
        response = scored = None
        try:
            if generate:
                response = self._generated(request)
            if score:
                scored = self._scored(request)
        except (RunError, RefusedError) as failure:
            if not (isinstance(failure, RefusedError) and failure.alone):
                self._client.stop.set()  # nothing more is requested, or paid, once the run has failed
                raise
            # A prompt that is only generated from, or only scored, would be missing from one curve without a word.
            finish = SKIPPED if failure.meaning == "too_long" else REFUSED
            response = Response(text="", finish=finish, tokens=0, skipped=str(failure))
        return Reply(response, scored)

    def _generated(self, request: Request) -> Response:
        asked = {"model": self.model, **self._asked(request)}
        body = {**asked, "max_tokens": request.max_tokens, "temperature": 0}
        # A conversation may open with thoughts, and end within them where a line does: its answers are cut here.
        if request.stop and self.options.kind == "text":
            body["stop"] = list(request.stop)
        if self.options.structured:
            return self._structured(body, request)
        generated, parsed = self._told(body, request)
        if "stop" in body and generated.finish == STOPPED and not parsed.answer.strip():
            del body["stop"]  # it ended in blank lines or thoughts, before the answer
            generated, parsed = self._told(body, request)
        return self._response(generated, parsed)

    def _structured(self, body: dict[str, Any], request: Request) -> Response:
        """The answer of a server that keeps to a schema, out of its JSON; as it is if the server did not keep to it."""
        answer = {"type": "object", "properties": {"answer": request.schema}, "required": ["answer"]}
        schema = {"name": "answer", "strict": True, "schema": {**answer, "additionalProperties": False}}
        body = {**body, "max_tokens": request.max_tokens + WRAPPING}
        body[SCHEMA_FIELD] = {"type": "json_schema", "json_schema": schema}
        try:
            generated, parsed = self._told(body, replace(request, stop=()))
        except RefusedError as refusal:
            if OF_SCHEMAS.search(str(refusal)):
                raise UsageError(f"server {self._client.address} takes no structured=True: {refusal}") from None
            raise
        with suppress(ValueError, LookupError, TypeError):
            value = json.loads(parsed.answer)["answer"]
            parsed = replace(parsed, answer=" > ".join(value) if isinstance(value, list) else str(value))
        return self._response(generated, parsed)

    def _response(self, generated: Generated, parsed: Told) -> Response:
        return Response(
            parsed.answer,
            STOPPED if parsed.stopped else generated.finish,
            prompt_tokens=generated.prompt_tokens,
            tokens=generated.tokens,
            continues=self.options.kind == "text",
            thoughts=parsed.thoughts,
            thinking=parsed.thinking,
        )

    def _told(self, body: dict[str, Any], request: Request) -> tuple[Generated, Told]:
        """An answer, and its text with the thoughts told from it, by the server or by marks."""
        generated = self._answer(body, Message if self.options.kind == "chat" else Generated)
        # Some servers call every end a stop, or give no reason: then the count of tokens tells.
        if generated.finish in (STOPPED, UNKNOWN) and (generated.tokens or 0) >= body["max_tokens"]:
            generated = generated.model_copy(update={"finish": CUT_OFF})
        named = generated.thoughts if isinstance(generated, Message) else None
        if named is not None and request.answer_pattern is None:
            parsed = told_apart(generated.whole)
            thinking = MARKED if parsed.answer.strip() else UNFINISHED
            return generated, replace(parsed, thoughts=named + (parsed.thoughts or ""), thinking=thinking).cut(
                request.stop
            )
        # Behind a prompt that opens thoughts a server may take them out without a word, but not before they end.
        readable = self.tokenizer is not None and (self.options.kind == "text" or self.tokenizer.chat_template)
        opened = False
        if generated.finish == CUT_OFF and readable:
            (text, _), _ = rendered(self._conversation(request), self.tokenizer)
            opened = opens_thoughts(text)
        return generated, told_apart(generated.whole, opened=opened, pattern=request.answer_pattern).cut(request.stop)

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

    def _scored(self, request: Request) -> AnswerScore | None:
        if self.scores is False or request.answer is None or not isinstance(request.prompt, str):
            return None
        text = request.prompt + request.answer
        # One token more than nothing: not every server accepts 0.
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": LISTED}
        try:
            echo = self._answer({"model": self.model, **body}, Echo)
        except RefusedError as refusal:
            of_the_prompt = self.scores or refusal.meaning == "too_long" or FILTERED.search(str(refusal))
            if of_the_prompt or refusal.status not in (400, 404, 422):
                raise
            self._note_scores(str(refusal))
            return None
        if not echo.tokens:
            self._note_scores("the server repeats no log-probabilities")
            return None
        self._note_scores(None)
        return score_of(echo, request.answer, LISTED)

    def _note_scores(self, reason: str | None) -> None:
        """Note that scoring works, or the reason against it; once it has worked, a single refusal does not end it."""
        with self._lock:
            if reason is None or not self.scores:
                self.scores, self._no_scores = reason is None, reason

    def _answer(self, body: dict[str, Any], kind: type[Kind]) -> Kind:
        whole = {name: value for name, value in {**body, **self.options.body}.items() if value is not None}
        if self.options.template_options:
            whole[TEMPLATE_FIELD] = dict(self.options.template_options)
        path = KINDS[self.options.kind]
        named = json.dumps({"address": f"{self._client.address}/{path}", "body": whole}, sort_keys=True)
        key = hashlib.sha256(named.encode()).hexdigest()
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:  # the same request twice at once is made once
            cached = self._cache.find(key, kind)
            if cached is not None:
                counted = cached.prompt_tokens is not None and cached.generated is not None
                tokens = (cached.prompt_tokens or 0) + (cached.generated or 0)
                self._count(reused=1, **({"reused_tokens": tokens} if counted else {"uncounted": 1}))
                return cached
            answer = self._client.request(path, whole, kind)
            self._cache.keep(key, answer)
        if answer.prompt_tokens is None or answer.generated is None:
            self._count(requests=1, uncounted=1)
        else:
            self._count(requests=1, prompt_tokens=answer.prompt_tokens, generated_tokens=answer.generated)
        return answer

    def _count(self, **added: int) -> None:
        with self._lock:
            self.usage = replace(self.usage, **{name: getattr(self.usage, name) + more for name, more in added.items()})


def vocabulary_sha256(tokenizer: Any) -> str:
    """Hash that tells one tokenizer from another: of its tokens with their numbers, and its chat template."""
    parts = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
