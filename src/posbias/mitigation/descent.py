"""Fit numbers inside a model by gradient, on calibration answers, with a penalty that keeps ordinary text as it was.

The loss of a step is the negative log-likelihood of right answers, per token, mean over a batch of prompts, plus
`penalty` times the Kullback-Leibler divergence, per token, of the changed model's next token from the unchanged model's
on windows of ordinary text. What leaves text without a question as it is has no penalty. Adam, rate falling linearly to
0. No weight is touched.

Prompts of different lengths are run together, as many as fit into memory, with padding behind their ends, which no
token before it can see; behind kept keys and values each is run alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, encode_requests
from posbias.evaluation.responders.passes import EncodedRequest
from posbias.measurement.units import check_passes, halving, together_in_memory
from posbias.mitigation.fitting import Calibration, FitOptions, Windows
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.models.layout import AngleLengths
from posbias.progress import track
from posbias.prompts.tokens import locate
from posbias.tasks.language import Example

KEPT_BYTES = 2 << 30
"""Bytes of keys and values before the question that are kept if a method acts from it on: no step changes them."""
PROMPTS_PER_WINDOW = 4
"""Prompts of a step for each window of text in it."""
STEPS_BETWEEN_CHECKS = 10
"""Steps between two looks at the calibration samples that no step sees."""
PATIENCE = 3
"""Looks without an improvement after which a fit ends."""


Losses = Float64[np.ndarray, "prompt"]


@runtime_checkable
class Numbers(Protocol):
    """The numbers that are fitted, and the model with them."""

    count: int
    """How many numbers are fitted."""

    @property
    def free(self) -> Sequence[Tensor]:
        """Leaves with a gradient."""

    def applied(self, model: HuggingFaceModel, begin: int) -> AbstractContextManager[None]:
        """The model with these numbers, for prompts of which the question begins at that token."""

    def method(self) -> Mitigation:
        """The method with these numbers."""


def encoded_answers(model: HuggingFaceModel, examples: Sequence[Example]) -> list[EncodedRequest]:
    """Prompts and right answers in tokens; every prompt must fit into the context."""
    encoded = encode_requests(
        model.tokenizer, [Request(prompt=e.prompt, answer=e.target, own_control=e.own_control) for e in examples]
    )
    if any(request.thinks for request in encoded):
        raise UsageError(f"fit: {WITHIN_THOUGHTS}")
    longest = max(len(request.prompt) + len(request.answer) for request in encoded)
    if model.max_positions is not None and longest > model.max_positions:
        raise UsageError(f"fit: a calibration prompt has {longest} tokens; the model takes {model.max_positions}")
    return encoded


def begins_of(model: HuggingFaceModel, examples: Sequence[Example], options: FitOptions) -> list[int]:
    """The first token that a bias acts on in every prompt: the one behind the last passage, or 0."""
    if not options.from_question:
        return [0] * len(examples)
    begins = []
    for example in examples:
        spans, n_tokens = locate(example.prompt, example.passages, model.tokenizer, own_control=example.own_control)
        if not spans or n_tokens is None:
            raise UsageError("fit: from_question needs prompts with passages, and a tokenizer with character offsets")
        if spans[-1][1] >= n_tokens:
            raise UsageError("fit: from_question needs prompts that go on after their last passage; one ends there")
        begins.append(spans[-1][1])
    return begins


@dataclass(eq=False)
class Loss:
    """What a fit makes small: the losses of right answers, and what the numbers change on ordinary text."""

    model: HuggingFaceModel
    encoded: Sequence[EncodedRequest]
    """Calibration prompts with their answers."""
    begins: Sequence[int]
    """The first token of each that a method acts on; those before it are run once, and kept as far as there is room."""
    values: Numbers
    penalty: float
    together: int
    """Prompts, or windows, of a batch that run at once, with gradients accumulated."""

    def __post_init__(self) -> None:
        self._wholes = [np.concatenate([request.prompt, request.answer])[:-1] for request in self.encoded]
        self._prefixes: dict[int, Prefix] = {}

    def of_answers(self, indices: Sequence[int]) -> Losses:
        """Losses of prompts; if gradients are wanted, those of their mean are added, group by group.

        Prompts that are run together have alike rotary angles; the longest are first.
        """
        lengths, alike = AngleLengths.of(self.model.network), dict[object, list[int]]()
        for index in sorted(indices, key=lambda index: -len(self._wholes[index])):
            alone = index if self.begins[index] else None
            alike.setdefault((lengths.angles(len(self._wholes[index])), alone), []).append(index)
        by_prompt: dict[int, float] = {}
        for several in alike.values():
            for first in range(0, len(several), self.together):
                group = several[first : first + self.together]
                beginning = self._beginning(group[0])  # which no numbers change
                with self.values.applied(self.model, self.begins[group[0]]):
                    losses = self._losses(group, beginning)
                    if torch.is_grad_enabled():
                        (losses.sum() / len(indices)).backward()  # type: ignore[no-untyped-call]
                by_prompt |= zip(group, losses.detach().tolist(), strict=True)
        return np.array([by_prompt[index] for index in indices])

    def _beginning(self, index: int) -> Prefix | None:
        """Keys and values before the question of a prompt that is run alone; as many as `KEPT_BYTES` hold are kept."""
        if not self.begins[index] or index in self._prefixes:
            return self._prefixes.get(index)
        tokens = self.encoded[index].prompt[: self.begins[index]]
        prefix = Prefix(self.model, self.model.embed(self.model.token_tensor([tokens.tolist()])))
        if sum(earlier.n_bytes for earlier in self._prefixes.values()) + prefix.n_bytes <= KEPT_BYTES:
            self._prefixes[index] = prefix
        return prefix

    def _losses(self, group: Sequence[int], beginning: Prefix | None) -> Float[Tensor, "prompt"]:
        """Negative log-likelihood of each answer, per token, of prompts that are run together."""
        first = self.begins[group[0]]
        tokens = np.zeros((len(group), max(len(self._wholes[index]) for index in group) - first), dtype=np.int64)
        rows = []
        for row, index in zip(tokens, group, strict=True):
            row[: len(self._wholes[index]) - first] = self._wholes[index][first:]
            start = len(self.encoded[index].prompt) - 1 - first
            rows.append(range(start, start + len(self.encoded[index].answer)))
        read = sorted(set().union(*rows))
        embeddings = self.model.embed(self.model.token_tensor(tokens.tolist()))
        run = self.model.outputs if beginning is None else partial(beginning.outputs, first)
        losses = []
        for logits, predicting, index in zip(run(embeddings, read).logits, rows, group, strict=True):
            predicted = logits[read.index(predicting.start) :][: len(predicting)].float()
            answer = torch.as_tensor(self.encoded[index].answer, device=logits.device)
            losses.append(torch.nn.functional.cross_entropy(predicted, answer))
        return torch.stack(losses)

    def on_text(self, windows: Int64[np.ndarray, "window token"]) -> float:
        """KL(unchanged || changed) of the next token, per token; its gradient, times the penalty, is added."""
        model, positions, total = self.model, list(range(windows.shape[1])), 0.0

        def logprobs(embeddings: Tensor) -> Tensor:
            return model.outputs(embeddings, positions).logits.flatten(0, 1).float().log_softmax(-1)

        for first in range(0, len(windows), self.together):
            group = windows[first : first + self.together]
            share, embeddings = len(group) / len(windows), model.embed(model.token_tensor(group.tolist()))
            with torch.no_grad():
                unchanged = logprobs(embeddings)
            with self.values.applied(model, 0):  # layers may be computed again in the backward pass
                changed = logprobs(embeddings)
                divergence = torch.nn.functional.kl_div(changed, unchanged, reduction="batchmean", log_target=True)
                (self.penalty * share * divergence).backward()  # type: ignore[no-untyped-call]
            total += share * float(divergence.detach())
        return total


Descent = tuple[Float64[np.ndarray, "steps two"], list[float]]
"""Losses before every step that was made, of its answers and of its windows of text; and of the prompts that no step
sees, at every look at them."""


def descend(loss: Loss, text: Windows, options: FitOptions, *, held_out: Sequence[int] = ()) -> Descent:
    """Change the numbers in place, step by step.

    Args:
        text: Windows of ordinary text, all of one length.
        options: All of them set, as `FitOptions.settled` returns them.
        held_out: Prompts that no step sees: the numbers under which they are answered best are taken, and the fit ends
            when these answers get no better.

    Raises:
        RunError: the loss is not a finite number.
    """
    steps, batch, rate, free = options.steps, options.batch, options.rate, loss.values.free
    assert steps is not None and batch is not None and rate is not None, "settled"  # noqa: PT018
    generator = np.random.default_rng(options.seed)
    stepped = np.setdiff1d(np.arange(len(loss.begins)), held_out)
    order = stepped[_rounds(len(stepped), steps * batch, generator)].reshape(steps, batch)
    per_step = -(-batch // PROMPTS_PER_WINDOW) if options.penalty > 0 else 0
    windows = _rounds(len(text), steps * per_step, generator).reshape(steps, per_step)
    optimiser = torch.optim.Adam(free, lr=rate)
    losses, looks, best = np.zeros((steps, 2)), [], list[Tensor]()
    for step in track(range(steps), "steps of the fit"):
        optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimiser.zero_grad()
        losses[step, 0] = loss.of_answers(order[step].tolist()).mean()
        if options.penalty > 0:
            losses[step, 1] = loss.on_text(np.stack([text[index] for index in windows[step]]))
        if not np.isfinite(losses[step]).all():
            raise RunError(f"fit: the loss of step {step} is not a finite number; try a smaller rate than {rate:g}")
        optimiser.step()
        if len(held_out) and ((step + 1) % STEPS_BETWEEN_CHECKS == 0 or step + 1 == steps):
            with torch.no_grad():
                looks.append(float(loss.of_answers(held_out).mean()))
            if looks[-1] == min(looks) and looks.count(looks[-1]) == 1:
                best = [numbers.detach().clone() for numbers in free]
            if len(looks) - 1 - int(np.argmin(looks)) >= PATIENCE:
                losses = losses[: step + 1]
                break
    with torch.no_grad():
        for numbers, lowest in zip(free, best, strict=False):
            numbers.copy_(lowest)
    return losses, looks


def _rounds(n_items: int, count: int, generator: np.random.Generator) -> Int64[np.ndarray, "count"]:
    """So many items: every item once in random order, then all of them again."""
    rounds = [generator.permutation(n_items) for _ in range(-(-count // max(n_items, 1)))]
    return np.concatenate([*rounds, np.zeros(0)])[:count].astype(np.int64)


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
    samples = list(dict.fromkeys(example.sample for example in calibration.examples))
    unseen = set(samples[len(samples) - int((options.held_out or 0.0) * len(samples)) :])  # by any step: the last ones
    examples = sorted(calibration.examples, key=lambda example: example.sample in unseen)
    held_out = [index for index, example in enumerate(examples) if example.sample in unseen]
    encoded, begins = encoded_answers(model, examples), begins_of(model, examples, options)
    lengths = [len(request.prompt) for request in encoded]
    # Behind the question few tokens have a backward pass.
    longest, kept = max(lengths), options.checkpointing or options.from_question
    check_passes(model, longest, checkpointing=kept)

    def descended(together: int) -> tuple[Numbers, Descent]:
        values = numbers(model, options)
        loss = Loss(model, encoded, begins, values, options.penalty, together)
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
