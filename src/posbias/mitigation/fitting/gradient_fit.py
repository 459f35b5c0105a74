"""A fit by gradient: its settings, its prompts, and what its record tells.

As many prompts of a batch are run together as fit into memory.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np

from posbias.errors import UsageError
from posbias.measurement.room import check_passes, halving, together_in_memory
from posbias.mitigation.fitting.base import Calibration, Fit, FitOptions, Fitted
from posbias.mitigation.fitting.descent import (
    Answers,
    Descent,
    Loss,
    Numbers,
    begins_of,
    descend,
    encoded_answers,
)
from posbias.models.hugging_face import HuggingFaceModel
from posbias.tasks.language import Example


class GradientFit(Fit):
    """Numbers with which a model gives the right answers wherever they stand."""

    defaults: ClassVar[Mapping[str, Any]]
    """Settings that have a value of their own in every such fit: steps, rate, batch, held_out."""

    @abstractmethod
    def numbers(self, model: HuggingFaceModel, options: FitOptions) -> Numbers:
        """The numbers at no change."""

    def settled(self, options: FitOptions) -> FitOptions:
        """The options as this fit takes them, all set."""
        unset = {name: value for name, value in self.defaults.items() if getattr(options, name) is None}
        return replace(options, **unset)

    def fit(self, calibration: Calibration, *, options: FitOptions) -> Fitted:
        """Descend; the record has the losses of every step's prompts and windows before it, in nats per token.

        Raises:
            UsageError: too few samples, no text, or a family that does not allow it.
            RunError: the loss is not a finite number.
        """
        options = self.settled(options)
        model, counts = calibration.network, calibration.count()
        if options.penalty > 0 and not len(calibration.text):
            raise UsageError("fit: windows of ordinary text are needed if the penalty is above 0")
        examples, held_out = _prompts(calibration.examples, options)
        encoded, begins = encoded_answers(model, examples), begins_of(model, examples, options)
        lengths = [len(request.prompt) for request in encoded]
        # Behind the question few tokens have a backward pass.
        longest, kept = max(lengths), options.checkpointing or options.from_question
        check_passes(model, longest, checkpointing=kept)

        def descended(together: int) -> tuple[Numbers, Descent]:
            values = self.numbers(model, options)
            loss = Loss(Answers(model, encoded, begins), values, options.penalty, together)
            return values, descend(loss, calibration.text, options, held_out=held_out)

        together = together_in_memory(model, longest, options.batch or 1, checkpointing=kept)
        values, descent = halving(descended, together)
        how = {
            **asdict(options),
            "numbers": values.count,
            **counts,
            "prompt_tokens": [min(lengths), max(lengths)],
            "answer_loss": np.round(descent.losses[:, 0], 6).tolist(),
            "text_loss": np.round(descent.losses[:, 1], 6).tolist(),
        }
        if held_out:
            how["held_out_prompts"] = len(held_out)
            how["held_out_loss"] = np.round(descent.held_out, 6).tolist()
        return Fitted(values.method(), how)

    def reads_text(self, options: FitOptions) -> bool:
        """A penalty needs windows of text."""
        return self.settled(options).penalty > 0


def _prompts(calibration: Sequence[Example], options: FitOptions) -> tuple[list[Example], list[int]]:
    """The prompts of a fit, and which of them no step sees: those of the last samples, as they are given."""
    samples = list(dict.fromkeys(example.sample for example in calibration))
    unseen = set(samples[len(samples) - int((options.held_out or 0.0) * len(samples)) :])
    prompts = [example for example in calibration if example.sample not in unseen]
    held_out = [example for example in calibration if example.sample in unseen]
    return prompts + held_out, list(range(len(prompts), len(prompts) + len(held_out)))
