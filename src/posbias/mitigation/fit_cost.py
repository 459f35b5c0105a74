"""What a fit by gradient will take of memory, said before it begins: one step of it is run on a few short prompts.

A step holds what the backward pass needs of every layer; the one of ordinary text after it holds log-probabilities of
a whole vocabulary at every token. Where that does not fit, layers are computed again in the backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.local import EncodedRequest
from posbias.measurement.cost import calibrate, peak_tensor_bytes, report_cost
from posbias.measurement.cost_estimate import CostEstimate
from posbias.mitigation.fitting import (
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
    report(f"{method} is fitted in {own.steps} steps, a prompt each with its backward pass{again}:")
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
    behind = max(len(one.prompt) + len(one.answer) - begin for one, begin in zip(encoded, begins, strict=True))
    values = Values(model, options)

    def step(token_ids: Int64[np.ndarray, "n"]) -> None:
        scored = min(answer, len(token_ids) - 1)
        begin = max(0, len(token_ids) - behind) if options.from_question else 0
        request = EncodedRequest(token_ids[:-scored], token_ids[-scored:])
        with values.applied(model, begin):
            Answers(model, [request], [begin]).loss(0).backward()  # type: ignore[no-untyped-call]

    longest = max(len(one.prompt) + len(one.answer) for one in encoded)
    found = calibrate(model, longest, step)
    if found is None:
        return None
    constant, *others = found.coefficients
    if options.penalty > 0 and len(text):
        window = max(text, key=len)
        on_text = peak_tensor_bytes(lambda: step_on_text(model, window, values, options.penalty), model.device)
        beyond = on_text - sum(value * longest**power for power, value in enumerate(found.coefficients))
        constant += max(0.0, beyond)
    kept = 0
    if options.from_question:  # keys and values before the question stay for all steps
        probe = model.embed(model.token_tensor([[int(encoded[0].prompt[0])] * PROBE]))
        kept = min(KEPT_BYTES, sum(begins) * Prefix(model, probe).n_bytes // PROBE)
    return replace(found, coefficients=(constant, *others), kept=lambda _: kept, shorter="prompts of {} tokens")
