"""The two halves of what a responder replies, each without the other."""

from collections.abc import Sequence

from posbias.evaluation.responders import AnswerScore, Request, Responder, Response


def generated(responder: Responder, requests: Sequence[Request]) -> list[Response]:
    """Greedy continuations."""
    replies = responder.respond(requests, generate=True, score=False)
    return [reply.response for reply in replies if reply.response is not None]


def scored(responder: Responder, requests: Sequence[Request]) -> list[AnswerScore | None]:
    """Teacher-forced scores."""
    return [reply.score for reply in responder.respond(requests, generate=False, score=True)]
