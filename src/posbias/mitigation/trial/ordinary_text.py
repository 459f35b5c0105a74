"""Ordinary text under every method: nats per token of the same windows, or why a method leaves them as they are.

Text has no passages and no question. What acts from the question on, what moves or reads passages, and what changes
requests cannot change it, and is not judged by it. `ms_poe` knows the passages only to rank heads at their end; it is
given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.evaluation.responders.local import score_answer
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import Mitigation, PromptMitigation
from posbias.mitigation.methods.key_bias import ContextBias
from posbias.mitigation.methods.rotary import MsPoe
from posbias.mitigation.trial.arms import Arm, MitigateOptions
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts
from posbias.prompts.sources import default_corpus
from posbias.runs.parts import PartStore

ORDINARY_TEXT = "ordinary text"
FIT_WINDOWS = 32
"""Windows of ordinary text that a fit may read; of another source than those that are judged."""
DEFAULT = "default"
JUDGED_FILES = "jargon_file,us_founding_documents"
"""Of the default corpus, where no other text is asked for; fits read the other files."""
SERVER = "not judged: the model is behind a server"
UNASKED = "not judged: no windows were asked for"
REQUESTS = "unchanged: only prompts change"
FROM_QUESTION = "unchanged: acts only after a question begins"
NO_PASSAGES = "not judged: needs passages, and text has none"

Nats = Float64[np.ndarray, "documents"]


def windows_of(
    responder: Responder, options: MitigateOptions, *, fits_read: bool
) -> tuple[Prompts | None, list[Int64[np.ndarray, "token"]]]:
    """Ordinary text that is judged, None where none is; and what fits may read, of another source."""
    if not isinstance(responder, LocalResponder):
        return None, []
    model, judged = responder.model, f"{DEFAULT}#{JUDGED_FILES}" if options.text == DEFAULT else options.text
    load = partial(load_prompts, model=model, n_positions=length_of(model, options), seed=options.evaluation.seed)
    text = load(judged, count=options.documents) if options.documents else None
    if not fits_read:
        return text, []
    source, _, files = judged.partition("#")
    judging = {group.name for group in default_corpus(files)} if source == DEFAULT else set()
    read = [Path(group.name).stem for group in default_corpus() if group.name not in judging]
    if not read:
        raise UsageError(
            f"--text {options.text}: fits need files of the default corpus that are not judged; name fewer"
        )
    return text, list(load(f"{DEFAULT}#{','.join(read)}", count=FIT_WINDOWS).token_ids)


def length_of(model: Model, options: MitigateOptions) -> int:
    """Tokens of each window."""
    return options.length if model.max_positions is None else min(options.length, model.max_positions)


def why_not_judged(arm: Arm, *, asked: bool) -> str:
    """Why ordinary text is not put to an arm; empty where it is. `asked`: whether there is any."""
    method = arm.method
    if arm.model is None:
        return SERVER
    if isinstance(method, PromptMitigation):
        return REQUESTS
    if isinstance(method, ContextBias) or getattr(method, "from_question", False):
        return FROM_QUESTION
    if isinstance(method, Mitigation) and method.needs_passages and not isinstance(method, MsPoe):
        return NO_PASSAGES
    return "" if asked else UNASKED


def texts_of(arms: Sequence[Arm], text: Prompts | None, store: PartStore) -> tuple[list[Nats | None], dict[str, str]]:
    """Nats per token of every window in every arm, None where text is not judged; and the reason, by the arm's name."""
    found: list[Nats | None] = []
    reasons = {arm.name: why_not_judged(arm, asked=text is not None) for arm in arms}
    for arm in track(arms, ORDINARY_TEXT):
        if reasons[arm.name] or text is None:
            found.append(None)
            continue
        windows = text.token_ids
        piece = store.get(f"text-{arm.slug}", lambda arm=arm, windows=windows: {"nats": _nats(arm, windows)})  # type: ignore[misc]
        found.append(piece["nats"])
    return found, {name: reason for name, reason in reasons.items() if reason}


def _nats(arm: Arm, windows: Int64[np.ndarray, "documents token"]) -> Nats:
    """Mean negative log-likelihood of every token but the first of each window."""
    assert arm.model is not None  # as `why_not_judged` says
    if arm.method is None:
        return _likelihood(arm.model, windows)
    whole = [(0, windows.shape[1])] if getattr(arm.method, "needs_passages", False) else []
    with mitigated(arm.model, arm.method, passages=whole) as changed:
        return _likelihood(changed, windows)


def _likelihood(model: Any, windows: Int64[np.ndarray, "documents token"]) -> Nats:
    import torch

    rows = list(range(windows.shape[1] - 1))
    nats = []
    for window in windows:
        with torch.no_grad():
            logits = model.outputs(model.embed(model.token_tensor([window.tolist()])), rows).logits[0]
        nats.append(-score_answer(logits, window[1:]).logprob / len(rows))
    return np.array(nats)
