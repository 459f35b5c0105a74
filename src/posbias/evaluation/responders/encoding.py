"""A request in a model's tokens; and where the answer that it generates ends, and what of it is thoughts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.base import (
    CUT_OFF,
    MARKED,
    STOPPED,
    UNFINISHED,
    Request,
    Response,
    Told,
    opens_thoughts,
    told_apart,
)
from posbias.prompts.tokens import rendered, spelled_in, tokenised
from posbias.tasks.language.calls import call_text, calls_in

WITHIN_THOUGHTS = (
    "the prompts end where the model's thoughts begin, and an answer would be scored within them; --template-options "
    "'enable_thinking=False' closes them in templates that know it"
)
"""Why an answer is not scored."""
CANNOT_READ = "so it cannot read a prompt; allowed: models with a tokenizer"


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """One request in tokens."""

    request: Request
    prompt: Int64[np.ndarray, "_"]
    """The prompt with the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: Int64[np.ndarray, "_"]
    """Tokens to score; empty if the request has no answer."""
    thinks: bool = False
    """True if the prompt ends within thoughts, so that what follows it is no answer."""
    apart: bool = False
    """True if the answer was tokenised on its own, because in one text with the prompt it would form other tokens."""


def encode_requests(tokenizer: Any, requests: Sequence[Request]) -> list[EncodedRequest]:
    """Token ids of all requests.

    Texts are read as they are, conversations as the model's chat template renders them; what either spells of control
    tokens is ordinary text, unless the request says otherwise. Prompt and answer are tokenised
    as one text if that leaves the prompt's tokens as they are, and the answer on its own otherwise (its first
    characters would have merged into the prompt's last token).
    """
    if tokenizer is None:
        raise UsageError(f"the model has no tokenizer, {CANNOT_READ}")
    encoded = []
    for index, request in enumerate(requests):
        text, ordinary, before = rendered(request.prompt, tokenizer, index=index, own_control=request.own_control)
        wanted = request.answer or ""
        moved = [(len(text) + begin, len(text) + end) for begin, end in spelled_in(wanted, tokenizer)]
        prompt = tokenised(text, tokenizer, ordinary).token_ids
        whole = tokenised(text + wanted, tokenizer, [*ordinary, *moved]).token_ids
        apart = len(whole) <= len(prompt) or whole[: len(prompt)] != prompt
        answer = tokenised(wanted, tokenizer).token_ids if apart else whole[len(prompt) :]
        if not before and not prompt:
            raise UsageError(f"prompt {index} has no tokens; give at least 1")
        if wanted and not answer:
            raise UsageError(f"the answer of prompt {index}, {wanted!r}, has no tokens; give at least 1")
        full, scored = (np.array(tokens, dtype=np.int64) for tokens in ([*before, *prompt], answer))
        encoded.append(EncodedRequest(request, full, scored, thinks=opens_thoughts(text), apart=apart))
    return encoded


@dataclass(frozen=True)
class Ending:
    """Rules for the end of an answer and for the text that it holds."""

    tokenizer: Any
    end_tokens: Collection[int]

    def reached(self, generated: Sequence[int], asked: EncodedRequest) -> bool:
        """True after an end token, `max_tokens`, or a stop text behind thoughts and blank lines."""
        if generated[-1] in self.end_tokens or len(generated) >= asked.request.max_tokens:
            return True
        if not any(text in self._text(generated) for text in asked.request.stop):
            return False
        return self.told(generated, asked).stopped

    def told(self, generated: Sequence[int], asked: EncodedRequest) -> Told:
        """The text with its thoughts told from its answer, which is without special tokens; some marks are such."""
        text = self._text(generated, special=True)
        told = self._by_template(text, asked)
        told = told or told_apart(text, opened=asked.thinks, pattern=asked.request.answer_pattern)
        answer = told.answer
        if answer == text:
            answer = self._text(generated)
        else:
            for token in self.tokenizer.all_special_tokens:
                answer = answer.replace(token, "")
        if calls_in(told.answer) and not calls_in(answer):
            answer = told.answer  # the marks of its calls are special tokens
        return replace(told, answer=answer).cut(asked.request.stop)

    def response(self, generated: Sequence[int], asked: EncodedRequest) -> Response:
        """The response of a finished sequence."""
        told = self.told(generated, asked)
        return Response(
            text=told.answer,
            finish=STOPPED if told.stopped or generated[-1] in self.end_tokens else CUT_OFF,
            prompt_tokens=len(asked.prompt),
            tokens=len(generated),
            token_ids=tuple(generated),
            continues=isinstance(asked.request.prompt, str),
            thoughts=told.thoughts,
            thinking=told.thinking,
        )

    def _text(self, generated: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=not special))

    def _by_template(self, text: str, asked: EncodedRequest) -> Told | None:
        """An answer in a conversation as the tokenizer's own response template reads it; None without one.

        Source: transformers, `parse_response`.
        """
        template = getattr(self.tokenizer, "response_template", None)
        if template is None or isinstance(asked.request.prompt, str) or asked.request.answer_pattern is not None:
            return None
        try:
            opening = self._text(asked.prompt[-64:].tolist(), special=True)
            message = self.tokenizer.parse_response(text, prefix=opening)
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
            calls = [call_text(function["name"], function.get("arguments")) for function in functions]
        except (AttributeError, KeyError, TypeError, ValueError):  # not of that form, such as a call that was cut off
            return None
        answer = "\n".join(part for part in (message.get("content"), *calls) if part)
        thoughts = message.get("reasoning_content") or message.get("thinking")
        thinking = MARKED if answer.strip() else UNFINISHED
        return Told(answer, thoughts or None, thinking if thoughts else None)
