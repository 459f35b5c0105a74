"""What a fit by gradient will take of memory, said before it begins: one step of it is run on a few short prompts.

A step holds what the backward pass needs of every layer; the one of ordinary text after it holds log-probabilities of
a whole vocabulary at every token. Where that does not fit, layers are computed again in the backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from posbias.errors import UsageError
from posbias.evaluation.responders.local import EncodedRequest
from posbias.measurement.cost import calibrate, peak_tensor_bytes, report_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate
from posbias.mitigation.fitting.fit import (
    GRADIENT,
    KEPT_BYTES,
    Answers,
    FitOptions,
    Values,
    Windows,
    begins_of,
    encoded_answers,
    options_of_bias,
    step_on_text,
)
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.progress import report
from posbias.tasks.language import Example

SHORTER = "calibration prompts of {} tokens"
PROBE = 16
"""Tokens whose keys and values tell what those of one take."""


def preflight_fit(
    method: str,
    model: HuggingFaceModel,
    calibration: Sequence[Example],
    text: Windows,
    *,
    options: FitOptions,
    max_memory: int | None,
) -> FitOptions:
    """Say what the fit will take, and refuse what cannot fit; the options, with checkpointing where it fits only so.

    Other methods than those of `GRADIENT` run prompts forward, as their answers do: nothing is said of them.

    Raises:
        UsageError: it needs more than `max_memory` bytes, or than are free (None).
    """
    if method not in GRADIENT:
        return options
    own = options_of_bias(method, options)

    def estimate(*, checkpointing: bool) -> CostEstimate | None:
        return fit_estimate(model, calibration, text, options=replace(own, checkpointing=checkpointing))

    found = estimate(checkpointing=options.checkpointing)
    if found is None:
        return options
    allowed = found.allowed(max_memory)
    if not own.from_question and allowed is not None and found.needed(1) > allowed:
        fewer = estimate(checkpointing=True)
        if fewer is not None and fewer.needed(1) < found.needed(1):
            found, options = fewer, replace(options, checkpointing=True)
    again = ", layers computed again in the backward pass" if options.checkpointing else ""
    report(f"estimate: {method} is fitted in {own.steps} steps, a prompt each with its backward pass{again}:")
    try:
        report_cost(model, found, own.steps, max_memory=max_memory)
    except UsageError as error:
        raise UsageError(f"the fit of {method}: {error}") from None
    return options


def fit_estimate(
    model: HuggingFaceModel, calibration: Sequence[Example], text: Windows, *, options: FitOptions
) -> CostEstimate | None:
    """What one step takes at most, of a prompt or of a window of text; None where short runs fail."""
    encoded = encoded_answers(model, calibration)
    begins = begins_of(model, calibration, options)
    answer = max(len(one.answer) for one in encoded)
    values = Values(model, options)

    def loss(token_ids: Int64[np.ndarray, "n"], begin: int = 0) -> Tensor:
        scored = min(answer, len(token_ids) - 1)
        request = EncodedRequest(token_ids[:-scored], token_ids[-scored:])
        return Answers(model, [request], [begin]).loss(0)

    def step(token_ids: Int64[np.ndarray, "n"], begin: int = 0) -> None:
        with values.applied(model, begin):
            loss(token_ids, begin).backward()  # type: ignore[no-untyped-call]

    def forward(token_ids: Int64[np.ndarray, "n"]) -> None:
        with torch.no_grad(), values.applied(model, 0):
            loss(token_ids)

    sizes = [len(one.prompt) + len(one.answer) for one in encoded]
    longest = int(np.argmax(sizes))
    if options.from_question:
        # Behind the question few tokens have a backward pass: a whole step takes hardly more than an answer does.
        known = np.concatenate([encoded[longest].prompt, encoded[longest].answer])
        peak = peak_tensor_bytes(lambda: step(known, begins[longest]), model.device)
        probe = model.embed(model.token_tensor([known[:PROBE].tolist()]))
        # What they hold alive is twice what they are: they are views of what the forward pass made.
        kept = 2 * min(KEPT_BYTES, sum(begins) * Prefix(model, probe).n_bytes // PROBE)
        found = replace(without_passes(model, sizes[longest]), coefficients=(float(peak),), kept=lambda _: kept)
        return replace(found, shorter=SHORTER)
    estimate = calibrate(model, sizes[longest], step, squares=forward if options.checkpointing else None)
    if estimate is None:
        return None
    constant, *others = estimate.coefficients
    if options.penalty > 0 and len(text):
        window = max(text, key=len)
        on_text = peak_tensor_bytes(lambda: step_on_text(model, window, values, options.penalty), model.device)
        on_answer = sum(value * sizes[longest] ** power for power, value in enumerate(estimate.coefficients))
        constant += max(0.0, on_text - on_answer)
    return replace(estimate, coefficients=(constant, *others), shorter=SHORTER)
