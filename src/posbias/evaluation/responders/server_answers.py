"""What is read out of a server's JSON: a generated text, or the log-probabilities of a repeated prompt."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from posbias.evaluation.responders.asking import MalformedError
from posbias.evaluation.responders.base import AnswerScore


def read_text(kind: str) -> Callable[[Any], dict[str, Any]]:
    """The reader of a generated text, as the fields of a `Response`; raises `MalformedError`."""

    def read(document: Any) -> dict[str, Any]:
        choice = _choice(document)
        if kind == "chat":
            message = choice.get("message")
            if not isinstance(message, dict) or "content" not in message:
                raise MalformedError("no message with content")
            text = "" if message["content"] is None else message["content"]
        else:
            text = choice.get("text")
        if not isinstance(text, str):
            raise MalformedError("the generated text is no text")
        prompt_tokens, tokens = _usage(document)
        finish = choice.get("finish_reason")
        return {
            "text": text,
            "finish": finish if isinstance(finish, str) else "unknown",
            "prompt_tokens": prompt_tokens,
            "tokens": tokens,
        }

    return read


def read_echo(document: Any) -> dict[str, Any]:
    """Tokens of the prompt with their log-probabilities; `tokens` is None where the server gives none.

    Raises:
        MalformedError: lists of different lengths, or none of texts and numbers.
    """
    choice = _choice(document)
    prompt_tokens, generated = _usage(document)
    found = {"prompt_tokens": prompt_tokens, "tokens_generated": generated}
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("tokens"):
        return {**found, "tokens": None}
    tokens, values = logprobs["tokens"], logprobs.get("token_logprobs")
    listed = logprobs.get("top_logprobs") or [None] * len(tokens)
    if not all(isinstance(part, list) and len(part) == len(tokens) for part in (tokens, values, listed)):
        raise MalformedError("lists of log-probabilities have different lengths")
    if not all(isinstance(token, str) for token in tokens):
        raise MalformedError("tokens are no texts")
    return {**found, "tokens": tokens, "logprobs": values, "listed": listed}


def score_of(echo: Mapping[str, Any], answer: str, n_listed: int) -> AnswerScore | None:
    """The score of the answer at the end of a repeated prompt, before what was generated after it.

    Returns:
        None where the answer does not begin with a token of its own, or a log-probability is missing.
    """
    generated = echo["tokens_generated"]
    end = len(echo["tokens"]) - (1 if generated is None else generated)
    start = end
    while start > 0 and sum(len(token) for token in echo["tokens"][start:end]) < len(answer):
        start -= 1
    values = echo["logprobs"][start:end]
    if "".join(echo["tokens"][start:end]) != answer or start == 0:
        return None
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return None
    listed = echo["listed"][start:end]
    ranks = tuple(_rank(value, others, n_listed) for value, others in zip(values, listed, strict=True))
    return AnswerScore(tuple(min(0.0, float(value)) for value in values), ranks)


def _rank(value: float, others: Any, n_listed: int) -> int | None:
    """1 + the listed tokens that are more probable; None where all that were asked for are."""
    if not isinstance(others, dict):
        return None
    better = sum(isinstance(other, int | float) and other > value for other in others.values())
    return None if better >= n_listed else 1 + better


def _choice(document: Any) -> dict[str, Any]:
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedError("no choices")
    choice: dict[str, Any] = choices[0]
    return choice


def _usage(document: Any) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer, as the server counts them."""
    usage = document.get("usage")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    prompt, generated = (count if isinstance(count, int) and count >= 0 else None for count in counts)
    return prompt, generated
