"""A fit by gradient: its settings, and what it takes of memory, which is said before it begins.

One step is run on a few short prompts. It holds what the backward pass needs of every layer; the step on ordinary text
after it holds log-probabilities of a whole vocabulary at every token. As many prompts of a batch are run together as
fit; if a single one does not, layers are computed again in the backward pass.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from posbias.errors import UsageError
from posbias.evaluation.responders.local import EncodedRequest
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.work import Work, calibrate, peak_tensor_bytes, without_passes
from posbias.mitigation.fitting.base import Calibration, Checkpoint, Fit, FitOptions, Fitted
from posbias.mitigation.fitting.calibration import EXCHANGED, KEPT, check_varied, other_passages, places_of, varied
from posbias.mitigation.fitting.descent import (
    KEPT_BYTES,
    PROMPTS_PER_WINDOW,
    Answers,
    Loss,
    Numbers,
    begins_of,
    descend,
    encoded_answers,
    step_on_text,
)
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.recipe import read_recipe
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.progress import report
from posbias.runs.caveats import fact_of, refusal
from posbias.tasks.language import Example

SHORTER = "calibration prompts of {} tokens"
COPIES = 7
"""Of the numbers: themselves, their gradient, in pieces and whole, Adam's two moments and its work, the best so far."""
PROBE = 16
"""Tokens whose keys and values tell how many bytes one token's take."""


@dataclass(frozen=True)
class StepCost:
    """The most that one step takes, on its prompts or on its windows of text."""

    prompt: CostEstimate
    """With one prompt at once."""
    window: int = 0
    """Bytes of one window's passes; 0 without any."""
    windows: int = 1
    """Windows of a step."""

    def of(self, together: int) -> CostEstimate:
        """The cost with so many prompts, or windows if there are as many, at once."""
        cost = replace(self.prompt, coefficients=tuple(together * value for value in self.prompt.coefficients))
        return cost.with_constant(max(0.0, min(together, self.windows) * self.window - cost.tensor_bytes))


@runtime_checkable
class FittedNumbers(Numbers, Protocol):
    """Numbers that make a method."""

    def begin_at(self, method: Method) -> None:
        """Take the numbers of a fitted method, which must be of the form that is asked for."""

    def method(self) -> Mitigation:
        """The method with these numbers."""


class GradientFit(Fit):
    """Numbers with which a model gives the right answers wherever they stand."""

    defaults: ClassVar[Mapping[str, Any]]
    """Settings that have a value of their own in every such fit: steps, rate, batch, held_out."""

    @abstractmethod
    def numbers(self, model: HuggingFaceModel, options: FitOptions) -> FittedNumbers:
        """The numbers at no change."""

    def settled(self, options: FitOptions) -> FitOptions:
        """The options as this fit takes them, all set."""
        unset = {name: value for name, value in self.defaults.items() if getattr(options, name) is None}
        return replace(options, **unset)

    def fit(self, calibration: Calibration, *, options: FitOptions, checkpoint: Checkpoint | None) -> Fitted:
        """Descend; the record has the losses of every step's prompts and windows before it, in nats per token.

        Raises:
            UsageError: too few samples, no text, or a family that does not allow it.
            RunError: the loss is not a finite number.
        """
        options = self.settled(options)
        model, counts = calibration.network, calibration.count()
        texts = [kind for kind in (calibration.text, calibration.conversations) if len(kind)]
        if options.penalty > 0 and not texts:
            raise UsageError("fit: windows of ordinary text are needed if the penalty is above 0")
        examples, held_out = _prompts(calibration.examples, options)
        encoded, begins = encoded_answers(model, examples), begins_of(model, examples, options)
        values = self.numbers(model, options)
        if options.begin:
            values.begin_at(read_recipe(options.begin, model))
        loss = Loss(model, values, Answers(model, encoded, begins), begins, options)
        places = places_of(examples, calibration.examples)
        descent = descend(loss, texts, checkpoint, held_out=held_out, places=places)
        lengths = [len(request.prompt) for request in encoded]
        how = {
            **asdict(options),
            "numbers": values.free.numel(),
            **counts,
            "conversations": len(calibration.conversations),
            "prompt_tokens": [min(lengths), max(lengths)],
            "answer_loss": np.round(descent.losses[:, 0], 6).tolist(),
            "text_loss": np.round(descent.losses[:, 1], 6).tolist(),
        }
        if held_out:
            by_place = np.array(descent.held_out_by_place, dtype=np.float64)
            how["held_out_prompts"] = len(held_out)
            how["held_out_loss"] = np.round(descent.held_out, 6).tolist()
            how["held_out_loss_by_place"] = by_place.round(6).tolist()
        return Fitted(values.method(), how)

    def passes(self, samples: int, positions: int, options: FitOptions, *, texts: int = 1) -> int:
        """Prompts and windows of all steps; the part before the question is run once if nothing changes it."""
        options = self.settled(options)
        batch = options.batch or 1
        per_window = 4 * (options.penalty > 0) * texts * -(-batch // PROMPTS_PER_WINDOW)
        per_step = batch if options.from_question else 3 * batch + per_window
        return (options.steps or 0) * per_step + len(options.strengths) * samples * positions

    def reads_text(self, options: FitOptions) -> bool:
        """A penalty needs windows of text."""
        return self.settled(options).penalty > 0

    def preflight(self, calibration: Calibration, *, options: FitOptions, max_memory: int | None) -> FitOptions:
        """Announce the fit, with as many prompts at once as fit; layers are computed again only if none fits otherwise.

        Raises:
            UsageError: it needs more than `max_memory` bytes, or than are free (None).
        """
        settled, name = self.settled(options), self.method.name
        batch = settled.batch or 1
        cost = self.estimate(calibration, settled)
        if cost is None:
            return options
        allowed = cost.prompt.allowed(max_memory)
        if not settled.from_question and allowed is not None and cost.of(1).needed(1) > allowed:
            smaller = self.estimate(calibration, replace(settled, checkpointing=True))
            if smaller is not None and smaller.of(1).needed(1) < cost.of(1).needed(1):
                cost, options = smaller, replace(options, checkpointing=True)
        together = min(batch, settled.together or batch)
        while together > 1 and allowed is not None and cost.of(together).needed(1) > allowed:
            together -= 1
        how = ", layers computed again in the backward pass" if options.checkpointing else ""
        prompts = "a prompt each" if batch == 1 else f"{batch} prompts each, {together} at once,"
        report(f"estimate: {name} is fitted in {settled.steps} steps, {prompts} with its backward pass{how}:")
        try:
            Work(
                calibration.network,
                cost.prompt.n_positions,
                (settled.steps or 0) * batch,
                partial(cost.of, together),
                shorter=SHORTER,
                max_memory=max_memory,
            ).announce()
        except UsageError as error:
            raise refusal("fit_of_method", method=name, because=fact_of(error)) from None
        return options if batch == 1 else replace(options, together=together)

    def estimate(self, calibration: Calibration, options: FitOptions) -> StepCost | None:
        """The most that one step takes, by the number of prompts at once; None if short runs fail."""
        model, settled = calibration.network, self.settled(options)
        examples, _ = _prompts(calibration.examples, settled)
        encoded, begins = encoded_answers(model, examples), begins_of(model, examples, settled)
        answer = max(len(request.answer) for request in encoded)
        values = self.numbers(model, settled)

        def step(token_ids: Int64[np.ndarray, "n"], begin: int = 0) -> None:
            scored = min(answer, len(token_ids) - 1)
            request = EncodedRequest(token_ids[:-scored], token_ids[-scored:])
            answers = Answers(model, [request], [begin])
            beginnings = answers.beginnings([0])
            with values.applied(model, [begin]):
                loss = answers.losses([0], beginnings).sum()
                if torch.is_grad_enabled():
                    loss.backward()  # type: ignore[no-untyped-call]

        sizes = [len(request.prompt) + len(request.answer) for request in encoded]
        longest = int(np.argmax(sizes))
        if settled.from_question:
            # Behind the question few tokens have a backward pass: a whole step takes hardly more than an answer does.
            whole = np.concatenate([encoded[longest].prompt, encoded[longest].answer])
            peak = peak_tensor_bytes(lambda: step(whole, begins[longest]), model.device)
            probe = model.embed(model.token_tensor([whole[:PROBE].tolist()]))
            of_token = Prefix(model, probe).n_bytes // PROBE
            # What they hold alive is twice what they are: they are views of what the forward pass made.
            prefixes = 2 * min(KEPT_BYTES, sum(begins) * of_token)
            joined = float(peak + max(begins) * of_token)  # those of a batch are copied to lie side by side
            cost = replace(without_passes(model, sizes[longest]), coefficients=(joined,), kept=lambda _: prefixes)
            return StepCost(cost)
        squares = torch.no_grad()(step) if settled.checkpointing else None
        estimate = calibrate(model, sizes[longest], step, squares=squares)
        if estimate is None:
            return None
        numbers = COPIES * values.free.nbytes
        estimate = replace(estimate, kept=lambda _: numbers)
        texts = [*calibration.text, *calibration.conversations]
        # Windows of one length run together, of whichever kind they are.
        alike = {len(one) for one in calibration.text} & {len(one) for one in calibration.conversations}
        of_step = StepCost(estimate, windows=(1 + bool(alike)) * -(-(settled.batch or 1) // PROMPTS_PER_WINDOW))
        if settled.penalty == 0 or not texts:
            return of_step
        window = max(texts, key=len)[None]
        on_text = peak_tensor_bytes(lambda: step_on_text(model, window, values, settled.penalty), model.device)
        return replace(of_step, window=on_text)


def _prompts(calibration: Sequence[Example], options: FitOptions) -> tuple[list[Example], list[int]]:
    """The prompts of a fit, and which of them no step sees: those of the last samples, as they are given."""
    samples = list(dict.fromkeys(example.sample for example in calibration))
    unseen = set(samples[len(samples) - int((options.held_out or 0.0) * len(samples)) :])
    prompts = [example for example in calibration if example.sample not in unseen]
    if options.fewest is not None or options.distractors != KEPT:
        check_varied(prompts, fewest=options.fewest, distractors=options.distractors)
        generator, drawn = np.random.default_rng(options.seed), (options.steps or 0) * (options.batch or 1)
        rounds, fewest, distractors = -(-drawn // len(prompts)), options.fewest, options.distractors
        # The passages around the answer are those of its sample, wherever it stands.
        first = {example.sample: example for example in reversed(prompts)}
        others: dict[str, list[str]] = {}
        if distractors == EXCHANGED:
            others = {sample: other_passages(example, first.values()) for sample, example in first.items()}
        prompts = [
            varied(example, generator, fewest=fewest, distractors=distractors, others=others.get(example.sample, ()))
            for _ in range(rounds)
            for example in prompts
        ]
    held_out = [example for example in calibration if example.sample in unseen]
    return prompts + held_out, list(range(len(prompts), len(prompts) + len(held_out)))
