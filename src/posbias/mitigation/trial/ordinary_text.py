"""Ordinary text and conversations under every method, or why a method leaves them as they are.

Text is judged by nats per token of the same windows. Everyday conversations, which are measured if the task's prompts
are conversations, are reported as the divergence of the next token from the unchanged model's, over given replies: a
reply may change its style at no loss, which the likelihood of anybody else's words does not show.

Text has no passages and no question. What acts from the question on, what moves or reads passages, and what changes
requests cannot change it, and is not judged by it (`Method.text_reason`). `ms_poe` knows the passages only to rank
heads at their end; it is given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from posbias.evaluation.responders.endings import EncodedRequest
from posbias.evaluation.responders.local import score_answer
from posbias.measurement.perturbation import divergences
from posbias.mitigation.fitting.calibration import (
    DEFAULT,
    JUDGED_FILES,
    everyday_conversations,
    holds_conversations,
    text_beside,
)
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import Mitigation
from posbias.mitigation.trial.arms import Arm
from posbias.mitigation.trial.plan import TrialPlan
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.loading import load_prompts

ORDINARY_TEXT = "ordinary text"
SERVER, UNASKED = "server", "not asked"
"""Reasons why text is put to no arm: the model is behind a server; no windows were asked for."""

Nats = Float64[np.ndarray, "documents"]
Divergences = Float64[np.ndarray, "conversations"]


def window_length(model: Model, plan: TrialPlan) -> int:
    """Tokens of each window."""
    length = plan.options.length
    return length if model.max_positions is None else min(length, model.max_positions)


def _source(plan: TrialPlan) -> str:
    """The text that judges."""
    return f"{DEFAULT}#{JUDGED_FILES}" if plan.options.text == DEFAULT else plan.options.text


def _load(plan: TrialPlan, source: str, count: int) -> Int64[np.ndarray, "documents token"]:
    model = plan.model
    assert model is not None
    seed = plan.options.evaluation.seed
    return load_prompts(source, model=model, n_positions=window_length(model, plan), seed=seed, count=count).token_ids


def judged_windows(plan: TrialPlan) -> Int64[np.ndarray, "documents token"] | None:
    """Windows of ordinary text that judge; None if none were asked for, or the model is behind a server."""
    return _load(plan, _source(plan), plan.options.documents) if plan.options.documents and plan.model else None


def windows_of_fits(plan: TrialPlan) -> list[Int64[np.ndarray, "token"]]:
    """Windows for fits that read text, of another source than the text that judges; none if no fit reads any."""
    fits = [arm.to_fit for arm in plan.arms if arm.to_fit is not None]
    if plan.model is None or not any(fit.reads_text(plan.options.fitting) for fit in fits):
        return []
    seed = plan.options.evaluation.seed
    return text_beside(_source(plan), plan.model, length=window_length(plan.model, plan), seed=seed)


def text_reason(plan: TrialPlan, arm: Arm) -> str:
    """A code for why ordinary text is not put to an arm; empty if it is, or if it would be if it were asked for."""
    if plan.model is None:
        return SERVER
    return "" if arm.method is None else arm.method.text_reason


def measure_text(plan: TrialPlan) -> tuple[list[Nats | None], dict[str, str]]:
    """Nats per token of every window in every arm, None if text is not judged; and the reason, by the arm's name."""
    windows = plan.text
    nats: list[Nats | None] = []
    reasons = {}
    for arm in track(plan.arms, ORDINARY_TEXT):
        reason = text_reason(plan, arm) or ("" if windows is not None else UNASKED)
        if reason or windows is None:
            reasons[arm.name] = reason
            nats.append(None)
        else:
            nats.append(plan.lasting.get(f"text-{arm.slug}", partial(_measured, arm, windows))["nats"])
    return nats, reasons


def _measured(arm: Arm, windows: Int64[np.ndarray, "documents token"]) -> dict[str, np.ndarray]:
    """Mean negative log-likelihood of every token but the first of each window, as a piece to keep."""
    if arm.method is None:
        return {"nats": _likelihood(arm.model, windows)}
    assert isinstance(arm.method, Mitigation)  # others have a reason
    whole = [(0, windows.shape[1])] if arm.method.needs_passages else []
    with mitigated(arm.model, arm.method, passages=whole) as changed:
        return {"nats": _likelihood(changed, windows)}


def measure_conversations(plan: TrialPlan) -> dict[str, Divergences]:
    """Divergence on everyday conversations, nats per token of their replies, by the name of each arm that has any."""
    if plan.model is None or not plan.options.documents or not holds_conversations(plan.test.examples):
        return {}
    conversations = everyday_conversations(plan.model, judged=True)
    if not conversations:
        return {}
    return {
        arm.name: plan.lasting.get(f"conversations-{arm.slug}", partial(_divergence, arm, conversations))["nats"]
        for arm in track(plan.arms, "everyday conversations")
        if isinstance(arm.method, Mitigation) and not text_reason(plan, arm)
    }


def _divergence(arm: Arm, conversations: Sequence[EncodedRequest]) -> dict[str, np.ndarray]:
    """KL(unchanged || changed) of the next token, mean over the reply of each conversation, as a piece to keep."""
    assert arm.method is not None
    nats = []
    for request in conversations:
        tokens = np.concatenate([request.prompt, request.answer])
        whole = [(0, len(tokens))] if arm.method.needs_passages else []
        logits = [_logits(arm.model, tokens, len(request.answer))]
        with mitigated(arm.model, arm.method, passages=whole) as changed:
            logits.append(_logits(changed, tokens, len(request.answer)))
        nats.append(divergences(torch.cat(logits)).mean())
    return {"nats": np.array(nats)}


def _likelihood(model: Any, windows: Int64[np.ndarray, "documents token"]) -> Nats:
    n_scored = windows.shape[1] - 1
    scores = [score_answer(_logits(model, window, n_scored)[0], window[1:]) for window in windows]
    return np.array([-score.logprob / n_scored for score in scores])


@torch.no_grad()
def _logits(
    model: Any, tokens: Int64[np.ndarray, "token"], n_scored: int
) -> Float[torch.Tensor, "one n_scored vocabulary"]:
    """Logits of the last tokens, each read from the token before it."""
    rows = list(range(len(tokens) - n_scored - 1, len(tokens) - 1))
    return model.outputs(model.embed(model.token_tensor([tokens.tolist()])), rows).logits  # type: ignore[no-any-return]
