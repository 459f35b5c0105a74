"""Calibration samples and text: their contents, the probability of answers, the candidate that suits them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import RunError, UsageError
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Mitigation
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import track
from posbias.prompts.loading import load_prompts
from posbias.prompts.sources import default_corpus
from posbias.tasks.language import Example

DISTINCT = 32
"""Characters from which on a passage is taken to belong to one sample alone."""
LEAST_SAMPLES = 4
"""Calibration samples below which a fit is refused: it would learn them by heart."""
FIT_WINDOWS = 32
"""Windows of ordinary text that a fit may read; of another source than those that are judged."""
DEFAULT = "default"
JUDGED_FILES = "jargon_file,us_founding_documents"
"""Files of the default corpus that judge, unless another text is asked for; fits read the other files."""


def text_beside(judging: str, model: HuggingFaceModel, *, length: int, seed: int) -> list[Int64[np.ndarray, "token"]]:
    """Windows of ordinary text for fits, from the files of the default corpus that are not in the text that judges."""
    source, _, files = judging.partition("#")
    judged = {group.name for group in default_corpus(files)} if source == DEFAULT else set()
    read = [Path(group.name).stem for group in default_corpus() if group.name not in judged]
    if not read:
        raise UsageError(f"--text {judging}: fits need files of the default corpus that are not judged; name fewer")
    prompts = load_prompts(f"{DEFAULT}#{','.join(read)}", model=model, n_positions=length, seed=seed, count=FIT_WINDOWS)
    return list(prompts.token_ids)


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
