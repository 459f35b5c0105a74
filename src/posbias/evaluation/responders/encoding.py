"""Requests as token ids: the prompt as the model reads it, and the answer's tokens after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.base import Request
from posbias.prompts.chat import check_template, render_conversation
from posbias.prompts.tokens import opening, tokenise


@dataclass(frozen=True, eq=False)
class Encoded:
    """One request in tokens."""

    prompt: Int64[np.ndarray, "_"]
    """With the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: Int64[np.ndarray, "_"]
    """Tokens to score; empty where the request has no answer."""


def encode(tokenizer: Any, requests: Sequence[Request]) -> list[Encoded]:
    """Token ids of all requests.

    Prompt and answer are tokenised as one text where that leaves the prompt's tokens as they are, and the answer on
    its own otherwise (its first characters would have merged into the prompt's last token).

    Args:
        tokenizer: The model's own.
        requests: Texts are read as they are, conversations as the model's chat template renders them.

    Raises:
        UsageError: no tokenizer, no chat template for a conversation, or a prompt that has no tokens.
    """
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot read a prompt; allowed: models with one")
    rendered = [_rendered(tokenizer, request, index) for index, request in enumerate(requests)]
    answers = [request.answer or "" for request in requests]
    start = opening(tokenizer)
    prompts = tokenise([text for text, _ in rendered], tokenizer)
    wholes = tokenise([text + answer for (text, _), answer in zip(rendered, answers, strict=True)], tokenizer)
    alone = tokenise(answers, tokenizer)
    encoded = []
    for index, (_, conversation) in enumerate(rendered):
        prompt, whole = prompts[index], wholes[index]
        continues = len(whole) > len(prompt) and np.array_equal(whole[: len(prompt)], prompt)
        answer = whole[len(prompt) :] if continues else alone[index]
        # A template writes its special tokens out; a text has none of its own.
        full = prompt if conversation else np.concatenate([np.array(start, dtype=np.int64), prompt])
        if not len(full):
            raise UsageError(f"prompt {index} has no tokens; give at least 1")
        if answers[index] and not len(answer):
            raise UsageError(f"the answer of prompt {index}, {answers[index]!r}, has no tokens; give at least 1")
        encoded.append(Encoded(full, answer if answers[index] else answer[:0]))
    return encoded


def _rendered(tokenizer: Any, request: Request, index: int) -> tuple[str, bool]:
    """The text that the model reads, and whether a chat template made it."""
    if isinstance(request.prompt, str):
        return request.prompt, False
    check_template(tokenizer)
    return render_conversation(tokenizer, request.prompt, index=index), True
