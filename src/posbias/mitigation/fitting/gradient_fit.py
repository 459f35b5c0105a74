"""A fit by gradient: its prompts, and what its record tells.

As many prompts of a batch are run together as fit into memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.measurement.room import check_passes, halving, together_in_memory
from posbias.mitigation.fitting.base import Calibration, FitOptions
from posbias.mitigation.fitting.descent import (
    Answers,
    Descent,
    Loss,
    Numbers,
    begins_of,
    descend,
    encoded_answers,
)
from posbias.mitigation.methods.base import Method
from posbias.models.hugging_face import HuggingFaceModel
from posbias.tasks.language import Example


def fit_by_gradient(
    numbers: Callable[[HuggingFaceModel, FitOptions], Numbers], calibration: Calibration, options: FitOptions
) -> tuple[Method, dict[str, Any]]:
    """Numbers with which a model gives the right answers wherever they stand.

    The record has the losses of every step's prompts and windows before it, in nats per token.

    Args:
        numbers: The numbers at no change.
        calibration: Samples and text.
        options: All of them set.

    Raises:
        UsageError: no text, or a family that does not allow it.
        RunError: the loss is not a finite number.
    """
    model, text = calibration.model, calibration.text if options.penalty > 0 else ()
    if options.penalty > 0 and not len(text):
        raise UsageError("fit: windows of ordinary text are needed if the penalty is above 0")
    examples, held_out = _prompts(calibration.examples, options)
    encoded, begins = encoded_answers(model, examples), begins_of(model, examples, options)
    lengths = [len(request.prompt) for request in encoded]
    # Behind the question few tokens have a backward pass.
    longest, kept = max(lengths), options.checkpointing or options.from_question
    check_passes(model, longest, checkpointing=kept)

    def descended(together: int) -> tuple[Numbers, Descent]:
        values = numbers(model, options)
        loss = Loss(Answers(model, encoded, begins), values, options.penalty, together)
        return values, descend(loss, text, options, held_out=held_out)

    together = together_in_memory(model, longest, options.batch or 1, checkpointing=kept)
    values, (losses, looks) = halving(descended, together)
    how = {
        **asdict(options),
        "numbers": values.count,
        "prompt_tokens": [min(lengths), max(lengths)],
        "answer_loss": np.round(losses[:, 0], 6).tolist(),
        "text_loss": np.round(losses[:, 1], 6).tolist(),
    }
    if held_out:
        how["held_out_prompts"] = len(held_out)
        how["held_out_loss"] = np.round(looks, 6).tolist()
    return values.method(), how


def _prompts(calibration: Sequence[Example], options: FitOptions) -> tuple[list[Example], list[int]]:
    """The prompts of a fit, and which of them no step sees: those of the last samples, as they are given."""
    samples = list(dict.fromkeys(example.sample for example in calibration))
    unseen = set(samples[len(samples) - int((options.held_out or 0.0) * len(samples)) :])
    prompts = [example for example in calibration if example.sample not in unseen]
    held_out = [example for example in calibration if example.sample in unseen]
    return prompts + held_out, list(range(len(prompts), len(prompts) + len(held_out)))
