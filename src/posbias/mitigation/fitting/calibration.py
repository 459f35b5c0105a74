"""Calibration samples: whether there are enough, how probable their answers are, and the candidate that suits them."""

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
"""Characters of a passage from which no two samples are taken to share it by chance."""
LEAST_SAMPLES = 4
"""Calibration samples below which a fit is refused: it would learn them by heart."""


def check_samples(calibration: Sequence[Example]) -> int:
    """How many samples there are; too few are refused."""
    samples = len({example.sample for example in calibration})
    if samples < LEAST_SAMPLES:
        raise UsageError(f"fit: {samples} calibration samples given; at least {LEAST_SAMPLES} are needed")
    return samples


def contents(examples: Sequence[Example]) -> set[str]:
    """What samples have in common with no other, wherever the question stands: hashes of an answer beside all passages,
    in whatever order, and beside its own passage, where that is long enough to be nobody else's; as text and as a
    conversation alike."""
    found = set()
    for one in examples:
        passages = [one.text[begin:end].strip() for begin, end in one.passages] or [one.text]
        own = "" if one.gold_position is None or not one.passages else passages[one.gold_position]
        for held in (sorted(passages), [own] if len(own) >= DISTINCT else []):
            if held:
                found.add(hashlib.sha256("\0".join([f" {one.target.strip()}", *held]).encode()).hexdigest()[:16])
    return found


def answer_logprob(model: HuggingFaceModel, method: Mitigation | None, calibration: Sequence[Example]) -> float:
    """Log-probability of the answers, per token, mean over examples that fit into the model.

    Raises:
        RunError: none does.
    """
    responder: Any = LocalResponder(model)
    if method is not None:
        responder = answering_under(method, responder)
    requests = [
        Request(prompt=one.prompt, answer=one.target, passages=one.passages, own_control=one.own_control)
        for one in calibration
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
    """The candidate under which the answers are most probable, the first of equals, and every one's log-probability."""
    found = [answer_logprob(model, candidate, calibration) for candidate in track(candidates, "candidates")]
    return candidates[int(np.argmax(found))], dict(zip(map(str, candidates), found, strict=True))
