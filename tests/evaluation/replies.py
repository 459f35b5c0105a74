"""A responder that says what a test decides, and the two halves of what a responder replies, each without the other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

import posbias as pb
from posbias.evaluation.responders import AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.encoding import EncodedRequest, Ending


class Says(Responder):
    """Answers with what `say` makes of each request: a text, a whole response or a whole reply."""

    def __init__(self, say: Callable[[Request], Any], name: str = "says") -> None:
        self.say, self.name = say, name

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        replies = [whole_reply(self.say(request)) for request in requests]
        return [Reply(reply.response if generate else None, reply.score if score else None) for reply in replies]

    def describe(self) -> dict[str, Any]:
        return {"kind": "says", "model": {"source": self.name}}


def whole_reply(said: Any) -> Reply:
    response = Response(said, "stop") if isinstance(said, str) else said
    return response if isinstance(response, Reply) else Reply(response, None)


def place_of(request: Request) -> int:
    """Where the answer stands among the passages; 0 without any."""
    texts = [request.text[slice(*span)] for span in request.passages]
    return [str(request.answer).strip() in text for text in texts].index(True) if texts else 0


def generated(responder: Responder, requests: Sequence[Request]) -> list[Response]:
    """Greedy continuations."""
    replies = responder.respond(requests, generate=True, score=False)
    return [reply.response for reply in replies if reply.response is not None]


def scored(responder: Responder, requests: Sequence[Request]) -> list[AnswerScore | None]:
    """Teacher-forced scores."""
    return [reply.score for reply in responder.respond(requests, generate=False, score=True)]


def ending_of(directory: Path, *marks: str) -> Ending:
    """What a model of this directory generates, read with these marks as special tokens, as many models have theirs."""
    tokenizer = pb.load_model(directory).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(mark) for mark in marks]})
    return Ending(tokenizer, set())


def encoded(ending: Ending, request: Request, read: str = "q", *, thinks: bool = False) -> EncodedRequest:
    """A request that the model reads as this text."""
    prompt = np.array(ending.tokenizer(read, add_special_tokens=False)["input_ids"])
    return EncodedRequest(request, prompt, np.array([], dtype=np.int64), thinks=thinks)
