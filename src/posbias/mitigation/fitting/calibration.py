"""Calibration samples: their number and contents, the probability of their answers, the candidate that suits them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from posbias.errors import RunError, UsageError
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Mitigation
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import track
from posbias.tasks.language import Example

DISTINCT = 32
"""Characters from which on a passage is taken to belong to one sample alone."""
LEAST_SAMPLES = 4
"""Calibration samples below which a fit is refused: it would learn them by heart."""


def check_samples(calibration: Sequence[Example]) -> int:
    """The number of samples; too few are refused."""
    samples = len({example.sample for example in calibration})
    if samples < LEAST_SAMPLES:
        raise UsageError(f"fit: {samples} calibration samples given; at least {LEAST_SAMPLES} are needed")
    return samples


def contents(examples: Sequence[Example]) -> set[str]:
    """Hashes by which samples are known again in other prompts, as text or as a conversation.

    An answer is hashed beside all passages, in whatever order and wherever the question stands, and beside its own
    passage if that is long enough to be nobody else's.
    """
    hashes = set()
    for example in examples:
        passages = [example.text[begin:end].strip() for begin, end in example.passages] or [example.text]
        gold = "" if example.gold_position is None or not example.passages else passages[example.gold_position]
        for texts in (sorted(passages), [gold] if len(gold) >= DISTINCT else []):
            if texts:
                hashes.add(hashlib.sha256("\0".join([f" {example.target.strip()}", *texts]).encode()).hexdigest()[:16])
    return hashes


def answer_logprob(model: HuggingFaceModel, method: Mitigation | None, calibration: Sequence[Example]) -> float:
    """Log-probability of the answers, per token, mean over examples that fit into the model.

    Raises:
        RunError: no example fits.
    """
    responder: Any = LocalResponder(model)
    if method is not None:
        responder = answering_under(method, responder)
    requests = [
        Request(
            prompt=example.prompt, answer=example.target, passages=example.passages, own_control=example.own_control
        )
        for example in calibration
    ]
    replies = responder.respond(requests, generate=False, score=True)
    scores = [reply.score.logprob / reply.score.n_tokens for reply in replies if reply.score is not None]
    if not scores:
        why = responder.learnt().get("no_scores_because") or "no calibration prompt fits into the model"
        raise RunError(f"fit: {why}")
    return float(np.mean(scores))


def best_of(
    candidates: Sequence[Mitigation], model: HuggingFaceModel, calibration: Sequence[Example]
) -> tuple[Mitigation, dict[str, float]]:
    """The candidate under which the answers are most probable, the first of equals, and all log-probabilities."""
    scores = [answer_logprob(model, candidate, calibration) for candidate in track(candidates, "candidates")]
    return candidates[int(np.argmax(scores))], dict(zip(map(str, candidates), scores, strict=True))
