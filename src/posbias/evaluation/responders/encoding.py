"""Requests as token ids: the prompt as the model reads it, and the answer's tokens after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.base import Request
from posbias.prompts.tokens import tokenise
from posbias.tasks.language.encoding import rendered


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """One request in tokens."""

    prompt: Int64[np.ndarray, "_"]
    """With the special tokens that the tokenizer (text) or the chat template (messages) puts into it."""
    answer: Int64[np.ndarray, "_"]
    """Tokens to score; empty where the request has no answer."""


def encode_requests(tokenizer: Any, requests: Sequence[Request]) -> list[EncodedRequest]:
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
    texts = [rendered(request.prompt, tokenizer, index=index) for index, request in enumerate(requests)]
    answers = [request.answer or "" for request in requests]
    prompts = tokenise([text for text, _ in texts], tokenizer)
    wholes = tokenise([text + answer for (text, _), answer in zip(texts, answers, strict=True)], tokenizer)
    alone = tokenise(answers, tokenizer)
    encoded = []
    for index, (_, before) in enumerate(texts):
        prompt, whole = prompts[index], wholes[index]
        continues = len(whole) > len(prompt) and np.array_equal(whole[: len(prompt)], prompt)
        answer = whole[len(prompt) :] if continues else alone[index]
        full = np.concatenate([np.array(before, dtype=np.int64), prompt])
        if not len(full):
            raise UsageError(f"prompt {index} has no tokens; give at least 1")
        if answers[index] and not len(answer):
            raise UsageError(f"the answer of prompt {index}, {answers[index]!r}, has no tokens; give at least 1")
        encoded.append(EncodedRequest(full, answer if answers[index] else answer[:0]))
    return encoded
