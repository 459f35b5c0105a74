"""Ordinary text under every method, or why a method leaves it as it is: nats per token of the same windows.

Text has no passages and no question. What acts from the question on, what moves or reads passages, and what changes
requests cannot change it, and is not judged by it (`Method.text_reason`). `ms_poe` knows the passages only to rank
heads at their end; it is given a whole window as one, as its paper ranks at the end of a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.evaluation.responders.local import score_answer
from posbias.mitigation.fitting.calibration import DEFAULT, JUDGED_FILES, text_beside
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import Mitigation
from posbias.mitigation.trial.arms import Arm
from posbias.mitigation.trial.plan import TrialPlan
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.loading import load_prompts

ORDINARY_TEXT = "ordinary text"
SERVER, UNASKED = "not judged: the model is behind a server", "not judged: no windows were asked for"
"""Why text is put to no arm."""

Nats = Float64[np.ndarray, "documents"]


@dataclass(frozen=True, eq=False)
class TextEffects:
    """Ordinary text in every arm."""

    nats: tuple[Nats | None, ...]
    """Per token of every window, by arm; None if text is not judged."""
    reasons: Mapping[str, str]
    """A code for why not, by the arm's name."""


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


def measure_text(plan: TrialPlan) -> TextEffects:
    """Nats per token of every window in every arm, or why text is not judged."""
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
    return TextEffects(tuple(nats), reasons)


def _measured(arm: Arm, windows: Int64[np.ndarray, "documents token"]) -> dict[str, np.ndarray]:
    """Mean negative log-likelihood of every token but the first of each window, as a piece to keep."""
    if arm.method is None:
        return {"nats": _likelihood(arm.model, windows)}
    assert isinstance(arm.method, Mitigation)  # others have a reason
    whole = [(0, windows.shape[1])] if arm.method.needs_passages else []
    with mitigated(arm.model, arm.method, passages=whole) as changed:
        return {"nats": _likelihood(changed, windows)}


@torch.no_grad()
def _likelihood(model: Any, windows: Int64[np.ndarray, "documents token"]) -> Nats:
    rows = list(range(windows.shape[1] - 1))  # each token is read from the one before it
    logits = [model.outputs(model.embed(model.token_tensor([window.tolist()])), rows).logits[0] for window in windows]
    scores = [score_answer(one, window[1:]) for one, window in zip(logits, windows, strict=True)]
    return np.array([-score.logprob / len(rows) for score in scores])
