"""The fits of `key_bias` and `context_bias` by gradient, and what they take of memory, which is said before they begin.

One step is run on a few short prompts. It holds what the backward pass needs of every layer; the step on ordinary text
after it holds log-probabilities of a whole vocabulary at every token. If that does not fit, layers are computed again
in the backward pass.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from posbias.errors import UsageError
from posbias.evaluation.responders.local import EncodedRequest
from posbias.measurement.cost import calibrate, peak_tensor_bytes, report_cost, without_passes
from posbias.measurement.cost_estimate import CostEstimate
from posbias.mitigation.fitting.base import FITS, Calibration, Checkpoint, Fit, FitOptions, Fitted, Windows
from posbias.mitigation.fitting.gradient import (
    KEPT_BYTES,
    Answers,
    BiasNumbers,
    begins_of,
    descend,
    encoded_answers,
    step_on_text,
)
from posbias.mitigation.methods.key_bias import ContextBias, KeyBiasMethod
from posbias.mitigation.methods.recipe import read_recipe
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.progress import report
from posbias.tasks.language import Example

SHORTER = "calibration prompts of {} tokens"
PROBE = 16
"""Tokens whose keys and values tell how many bytes one token's take."""


class BiasFit(Fit):
    """A bias by key under which a model gives the right answers wherever they stand."""

    @abstractmethod
    def settled(self, options: FitOptions) -> FitOptions:
        """The options as this bias takes them."""

    def fit(self, calibration: Calibration, *, options: FitOptions, checkpoint: Checkpoint | None) -> Fitted:
        """Descend; the record has the losses of every step's prompt and window before it, in nats per token.

        Raises:
            UsageError: too few samples, no text, or a family that does not allow it.
            RunError: the loss is not a finite number.
        """
        options = self.settled(options)
        model, text, counts = calibration.network, calibration.text, calibration.count()
        if options.penalty > 0 and not len(text):
            raise UsageError("fit: windows of ordinary text are needed if the penalty is above 0")
        encoded = encoded_answers(model, calibration.examples)
        begins = begins_of(model, calibration.examples, options)
        values = BiasNumbers(model, options)
        if options.begin:
            values.begin_at(read_recipe(options.begin, model))
        losses = descend(model, values, Answers(model, encoded, begins), begins, text, options, checkpoint)
        how = {
            **asdict(options),
            "numbers": values.free.numel(),
            **counts,
            "answer_loss": np.round(losses[:, 0], 6).tolist(),
            "text_loss": np.round(losses[:, 1], 6).tolist(),
        }
        return Fitted(values.method(), how)

    def passes(self, samples: int, positions: int, options: FitOptions) -> int:
        """A prompt and a window for each step; the part before the question is run once if nothing changes it."""
        options = self.settled(options)
        per_step = 1 if options.from_question else 3 + 4 * (options.penalty > 0)
        return options.steps * per_step + len(options.strengths) * samples * positions

    def reads_text(self, options: FitOptions) -> bool:
        """A penalty needs windows of text."""
        return self.settled(options).penalty > 0

    def preflight(self, calibration: Calibration, *, options: FitOptions, max_memory: int | None) -> FitOptions:
        """Announce the fit; it computes layers again only if it does not fit otherwise.

        Raises:
            UsageError: it needs more than `max_memory` bytes, or than are free (None).
        """
        model, settled = calibration.network, self.settled(options)

        def estimate(*, checkpointing: bool) -> CostEstimate | None:
            again = replace(settled, checkpointing=checkpointing)
            return fit_estimate(model, calibration.examples, calibration.text, options=again)

        cost = estimate(checkpointing=options.checkpointing)
        if cost is None:
            return options
        allowed = cost.allowed(max_memory)
        if not settled.from_question and allowed is not None and cost.needed(1) > allowed:
            smaller = estimate(checkpointing=True)
            if smaller is not None and smaller.needed(1) < cost.needed(1):
                cost, options = smaller, replace(options, checkpointing=True)
        how = ", layers computed again in the backward pass" if options.checkpointing else ""
        name = self.method.name
        report(f"estimate: {name} is fitted in {settled.steps} steps, a prompt each with its backward pass{how}:")
        try:
            report_cost(model, cost, settled.steps, max_memory=max_memory)
        except UsageError as error:
            raise UsageError(f"the fit of {name}: {error}") from None
        return options


@FITS.register(KeyBiasMethod.name)
class KeyBiasFit(BiasFit):
    """Splines over positions, for all queries or from the question on."""

    method = KeyBiasMethod

    def fit(self, calibration: Calibration, *, options: FitOptions, checkpoint: Checkpoint | None) -> Fitted:
        """Descend, with knots alone."""
        if not options.knots:
            raise UsageError(f"fit: {self.method.name} needs knots; allowed without any is {ContextBias.name}")
        return super().fit(calibration, options=options, checkpoint=checkpoint)

    def settled(self, options: FitOptions) -> FitOptions:
        """Scales go with biases from the question on, a penalty with all others."""
        return replace(options, penalty=0.0) if options.from_question else replace(options, scales=False)


@FITS.register(ContextBias.name)
class ContextBiasFit(BiasFit):
    """One number for every head and layer, for all keys before the question, and a scale."""

    method = ContextBias

    def settled(self, options: FitOptions) -> FitOptions:
        """It has no knots, acts from the question on, and so has no penalty."""
        return replace(options, knots=(), from_question=True, penalty=0.0)


def fit_estimate(
    model: HuggingFaceModel, calibration: Sequence[Example], text: Windows, *, options: FitOptions
) -> CostEstimate | None:
    """The most that one step takes, on a prompt or on a window of text; None if short runs fail."""
    encoded = encoded_answers(model, calibration)
    begins = begins_of(model, calibration, options)
    answer = max(len(request.answer) for request in encoded)
    values = BiasNumbers(model, options)

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

    sizes = [len(request.prompt) + len(request.answer) for request in encoded]
    longest = int(np.argmax(sizes))
    if options.from_question:
        # Behind the question few tokens have a backward pass: a whole step takes hardly more than an answer does.
        whole = np.concatenate([encoded[longest].prompt, encoded[longest].answer])
        peak = peak_tensor_bytes(lambda: step(whole, begins[longest]), model.device)
        probe = model.embed(model.token_tensor([whole[:PROBE].tolist()]))
        # What they hold alive is twice what they are: they are views of what the forward pass made.
        prefixes = 2 * min(KEPT_BYTES, sum(begins) * Prefix(model, probe).n_bytes // PROBE)
        cost = replace(without_passes(model, sizes[longest]), coefficients=(float(peak),), kept=lambda _: prefixes)
        return replace(cost, shorter=SHORTER)
    estimate = calibrate(model, sizes[longest], step, squares=forward if options.checkpointing else None)
    if estimate is None:
        return None
    constant, *higher = estimate.coefficients
    if options.penalty > 0 and len(text):
        window = max(text, key=len)
        on_text = peak_tensor_bytes(lambda: step_on_text(model, window, values, options.penalty), model.device)
        on_answer = sum(value * sizes[longest] ** power for power, value in enumerate(estimate.coefficients))
        constant += max(0.0, on_text - on_answer)
    return replace(estimate, coefficients=(constant, *higher), shorter=SHORTER)
