"""Where a local model's answer ends, and the text that its tokens hold, told from thoughts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.evaluation.responders.base import CUT_OFF, STOPPED, Request, Response
from posbias.evaluation.responders.thoughts import MARKED, UNFINISHED, Told, told_apart
from posbias.tasks.language.calls import call_text, calls_in

TokenIds = Int64[np.ndarray, "_"]
OPENING = 64
"""Last tokens of a prompt among which an answer is opened."""


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """One request in tokens."""

    prompt: TokenIds
    """The prompt with the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: TokenIds
    """Tokens to score; empty if the request has no answer."""
    thinks: bool = False
    """True if the prompt ends within thoughts, so that what follows it is no answer."""
    apart: bool = False
    """True if the answer was tokenised on its own, because in one text with the prompt it would form other tokens."""


@dataclass(frozen=True)
class Ending:
    """Rules for the end of an answer and for the text that it holds."""

    tokenizer: Any
    end_tokens: Collection[int]

    def reached(self, generated: Sequence[int], request: Request, encoded: EncodedRequest) -> bool:
        """True after an end token, `max_tokens`, or a stop text behind thoughts and blank lines."""
        if generated[-1] in self.end_tokens or len(generated) >= request.max_tokens:
            return True
        if not any(text in self._text(generated) for text in request.stop):
            return False
        return self.told(generated, request, encoded).stopped

    def told(self, generated: Sequence[int], request: Request, encoded: EncodedRequest) -> Told:
        """The text with its thoughts told from its answer, which is without special tokens; some marks are such."""
        text = self._text(generated, special=True)
        told = self._by_template(text, request, encoded)
        told = told or told_apart(text, opened=encoded.thinks, pattern=request.answer_pattern)
        answer = told.answer
        if answer == text:
            answer = self._text(generated)
        else:
            for token in self.tokenizer.all_special_tokens:
                answer = answer.replace(token, "")
        if calls_in(told.answer) and not calls_in(answer):
            answer = told.answer  # the marks of its calls are special tokens
        return replace(told, answer=answer).cut(request.stop)

    def response(self, generated: Sequence[int], request: Request, encoded: EncodedRequest) -> Response:
        """The response of a finished sequence."""
        told = self.told(generated, request, encoded)
        return Response(
            text=told.answer,
            finish=STOPPED if told.stopped or generated[-1] in self.end_tokens else CUT_OFF,
            prompt_tokens=len(encoded.prompt),
            tokens=len(generated),
            token_ids=tuple(generated),
            continues=isinstance(request.prompt, str),
            thoughts=told.thoughts,
            thinking=told.thinking,
        )

    def _text(self, generated: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=not special))

    def _by_template(self, text: str, request: Request, encoded: EncodedRequest) -> Told | None:
        """An answer in a conversation as the tokenizer's own response template reads it; None without one.

        Source: transformers, `parse_response`.
        """
        template = getattr(self.tokenizer, "response_template", None)
        if template is None or isinstance(request.prompt, str) or request.answer_pattern is not None:
            return None
        try:
            opening = self._text(encoded.prompt[-OPENING:].tolist(), special=True)
            message = self.tokenizer.parse_response(text, prefix=opening)
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
            calls = [call_text(function["name"], function.get("arguments")) for function in functions]
        except (AttributeError, KeyError, TypeError, ValueError):  # not of that form, such as a call that was cut off
            return None
        answer = "\n".join(part for part in (message.get("content"), *calls) if part)
        thoughts = message.get("reasoning_content") or message.get("thinking")
        thinking = MARKED if answer.strip() else UNFINISHED
        return Told(answer, thoughts or None, thinking if thoughts else None)
