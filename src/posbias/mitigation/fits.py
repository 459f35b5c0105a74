"""The fits of single methods, from calibration samples alone. No weight is touched.

By gradient, with a penalty that keeps ordinary text as it was: `adapter`, with A drawn at random and B 0, so that
nothing changes at first; `key_bias`, splines of ln(1 + j), a few numbers per head and layer; `context_bias`, one number
for all keys before the question. By the log-probability of right answers under every candidate: `temperature`.

The loss of a step is the negative log-likelihood of right answers, per token, mean over a batch of prompts, plus
`penalty` times the Kullback-Leibler divergence, per token, of the changed model's next token from the unchanged model's
on windows of ordinary text. What leaves text without a question as it is has no penalty. Adam, rate falling linearly to
0. With a teacher no right answer is read: the unchanged model answers where that is easiest for it, and the loss is the
divergence, per token of that answer, of the changed model's distribution from the one that it had there
(position-to-position distillation, arXiv 2508.15709).

Each prompt of a batch is run by itself, so that its gradients alone have to fit into memory.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from transformers import DynamicCache

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.encoding import EncodedRequest
from posbias.interventions.keys import biased
from posbias.measurement.outputs import checkpointed
from posbias.measurement.units import check_passes, halving
from posbias.mitigation.methods.adapter import SIDES, Adapter, target_projections, tensors_hash, tuned
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Mitigation
from posbias.mitigation.methods.context_bias import ContextBias
from posbias.mitigation.methods.key_bias import BEFORE, KeyBiasMethod
from posbias.mitigation.methods.temperature import Temperature
from posbias.mitigation.options import FitOptions
from posbias.mitigation.teaching import (
    Kept,
    answer_logits,
    encoded_answers,
    opening_tokens,
    question_opening,
    teachers_of,
    with_questions,
)
from posbias.models.attention import beyond_attention
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AngleLengths
from posbias.progress import track
from posbias.tasks.language import Example

KEPT_BYTES = 2 << 30
"""Bytes of keys and values before the question that are kept if a method acts from it on: no step changes them."""
PROMPTS_PER_WINDOW = 4
"""Prompts of a step for each window of text in it."""
STEPS_BETWEEN_CHECKS = 10
"""Steps between two looks at the calibration samples that no step sees."""
PATIENCE = 3
"""Looks without an improvement after which a fit ends."""

Windows = Sequence[Int64[np.ndarray, "_"]]
"""Windows of ordinary text, in token ids."""
Losses = Float64[np.ndarray, "prompt"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The material of a fit: the model, samples with their answers, and ordinary text, which some fits read."""

    model: HuggingFaceModel
    examples: Sequence[Example]
    text: Callable[[], Windows]


Found = tuple[Mitigation, dict[str, Any]]
"""A method at full strength, and how it was found, in plain values."""
Fit = Callable[..., Found]
"""Finds it from calibration and settings."""


@dataclass(frozen=True)
class Numbers:
    """What a fit by gradient changes."""

    free: Sequence[Tensor]
    """Leaves, at no change at first."""
    count: int
    """Numbers among them that may change."""
    applied: Callable[[HuggingFaceModel, int], AbstractContextManager[None]]
    """The model with these numbers, for prompts of which the question begins at that token."""
    method: Callable[[], Mitigation]
    """The method that has them."""


@dataclass(eq=False)
class Loss:
    """What a fit makes small: the losses of answers, and what the numbers change on ordinary text."""

    model: HuggingFaceModel
    encoded: Sequence[EncodedRequest]
    """Calibration prompts with their answers."""
    begins: Sequence[int]
    """The first token of each that a method acts on; those before it are run once, and kept as far as there is room."""
    numbers: Numbers
    penalty: float
    teachers: Sequence[EncodedRequest] = ()
    """Of each prompt the one whose distributions over the same answer are to be met; none: the answer itself is."""

    def __post_init__(self) -> None:
        self._kept: dict[object, Any] = {}
        self._lengths = AngleLengths.of(self.model.config)

    def of_answers(self, indices: Sequence[int]) -> Losses:
        """Losses of prompts; if gradients are wanted, those of their mean are added."""
        found = []
        for index in indices:
            request, begin, beginning = self.encoded[index], self.begins[index], self._beginning(index)
            taught = self._once(self._distributions, self.teachers[index]) if self.teachers else None
            with self.numbers.applied(self.model, begin):
                told = answer_logits(self.model, request, begin if beginning else 0, beginning).log_softmax(-1)
                if taught is None:
                    loss = nn.functional.nll_loss(told, torch.as_tensor(request.answer, device=told.device))
                else:
                    ((target,),) = taught
                    loss = nn.functional.kl_div(told, target, reduction="batchmean", log_target=True)
                if torch.is_grad_enabled():
                    (loss / len(indices)).backward()  # type: ignore[no-untyped-call]
            found.append(float(loss.detach()))
        return np.asarray(found)

    def _once(self, find: Callable[[Any], Any], of: Any) -> Any:
        """Tensors that no step changes, as the unchanged model has them; as many as `KEPT_BYTES` hold are kept."""
        if of in self._kept:
            return self._kept[of]
        with torch.no_grad():
            found = find(of)
        if sum(part.nbytes for kept in (*self._kept.values(), found) for parts in kept for part in parts) <= KEPT_BYTES:
            self._kept[of] = found
        return found

    def _beginning(self, index: int) -> Kept | None:
        """Keys and values before the question of a prompt; None of one so long that its rotary angles are others."""
        n_read = len(self.encoded[index].prompt) + len(self.encoded[index].answer) - 1
        begin = self.begins[index]
        shared = begin and self._lengths.angles(begin) == self._lengths.angles(n_read)
        return self._once(self._read, index) if shared else None

    def _read(self, index: int) -> Kept:
        # Without the configuration: sliding layers would keep only a window.
        cache, begin = DynamicCache(), self.begins[index]
        embeddings = self.model.embed(self.model.token_tensor([self.encoded[index].prompt[:begin].tolist()]))
        self.model.outputs(embeddings, [begin - 1], cache=cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _distributions(self, teacher: EncodedRequest) -> list[tuple[Float[Tensor, "token vocabulary"]]]:
        return [(answer_logits(self.model, teacher).log_softmax(-1),)]

    def on_text(self, windows: Windows) -> float:
        """KL(unchanged || changed) of the next token, per token; its gradient, times the penalty, is added."""
        model, total = self.model, 0.0
        for window in windows:
            embeddings, rows = model.embed(model.token_tensor([window.tolist()])), list(range(len(window)))
            with torch.no_grad():
                unchanged = model.outputs(embeddings, rows).logits[0].float().log_softmax(-1)
            with self.numbers.applied(model, 0):  # layers may be computed again in the backward pass
                changed = model.outputs(embeddings, rows).logits[0].float().log_softmax(-1)
                divergence = nn.functional.kl_div(changed, unchanged, reduction="batchmean", log_target=True)
                (self.penalty * divergence / len(windows)).backward()  # type: ignore[no-untyped-call]
            total += float(divergence.detach()) / len(windows)
        return total


def descend(
    loss: Loss, text: Windows, options: FitOptions, *, held_out: Sequence[int] = ()
) -> tuple[Float64[np.ndarray, "steps two"], list[float]]:
    """Change the numbers in place, step by step.

    Args:
        text: Windows of ordinary text, all of one length.
        options: All of them set, as `FitOptions.settled` returns them.
        held_out: Prompts that no step sees: the numbers under which they are answered best are taken, and the fit ends
            when these answers get no better.

    Returns:
        Losses before every step that was made, of its answers and of its windows of text; and of the prompts that no
        step sees, at every look at them.

    Raises:
        RunError: the loss is not a finite number.
    """
    steps, batch, rate, free = options.steps or 0, options.batch or 0, options.rate or 0.0, loss.numbers.free
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
            losses[step, 1] = loss.on_text([text[index] for index in windows[step]])
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
    made: Callable[[HuggingFaceModel, FitOptions], Numbers], calibration: Calibration, options: FitOptions
) -> Found:
    """Numbers with which a model gives the right answers, or its teacher's, wherever they stand.

    The record has the losses of every step's prompts and windows before it, in nats per token.

    Args:
        made: Makes the numbers at no change.
        options: All of them set.

    Raises:
        UsageError: no text, or a family that does not allow it.
        RunError: the loss is not a finite number.
    """
    model, windows = calibration.model, calibration.text() if options.penalty > 0 else ()
    lengths = sorted({len(window) for window in windows})
    if options.penalty > 0 and len(lengths) != 1:
        got = f"{lengths[0]} to {lengths[-1]} tokens" if lengths else "none"
        raise UsageError(f"fit: a penalty above 0 needs windows of ordinary text, all of one length; got {got}")
    given, written = with_questions(model, calibration.examples)
    samples = list(dict.fromkeys(example.sample for example in given))
    unseen = set(samples[len(samples) - int((options.held_out or 0.0) * len(samples)) :])  # by any step: the last ones
    examples = sorted(given, key=lambda example: example.sample in unseen)
    held_out = [index for index, example in enumerate(examples) if example.sample in unseen]
    teachers, facts = teachers_of(model, examples, options.teacher) if options.teacher else ([], {})
    encoded = encoded_answers(model, examples, teachers)
    lengths = [len(request.prompt) for request in encoded]
    recomputed = options.checkpointing and not options.from_question
    # Behind the question few tokens have a backward pass.
    check_passes(model, max(lengths), checkpointing=recomputed or options.from_question)

    numbers, begins = made(model, options), [0] * len(encoded)
    if options.from_question:
        unfitted, openings = numbers.method(), [question_opening(model, example)[0] for example in examples]
        pairs = zip(openings, encoded, strict=True)
        begins = [unfitted.known([(0, begin)], one.prompt.tolist())[-1][1] for begin, one in pairs]
        if any(begin >= len(one.prompt) for begin, one in zip(begins, encoded, strict=True)):
            raise UsageError(
                f"fit: not all calibration prompts hold the tokens from which on {unfitted.name} is to act"
            )
    loss = Loss(model, encoded, begins, numbers, options.penalty, teachers)
    with checkpointed(model.network, enabled=recomputed):
        losses, looks = halving(lambda _: descend(loss, windows, options, held_out=held_out), 1)
    how = {
        **asdict(options),
        "numbers": numbers.count,
        "prompt_tokens": [min(lengths), max(lengths)],
        "answer_loss": np.round(losses[:, 0], 6).tolist(),
        "text_loss": np.round(losses[:, 1], 6).tolist(),
        **facts,
        **written,
    }
    if held_out:
        how |= {"held_out_prompts": len(held_out), "held_out_loss": np.round(looks, 6).tolist()}
    return numbers.method(), how


ADAPTER: Mapping[str, Any] = {"steps": 60, "rate": 0.002, "batch": 4, "held_out": 0.2}
"""Settings of this fit where nothing else is asked for."""


def adapter_numbers(template: Adapter, model: HuggingFaceModel, options: FitOptions) -> Numbers:
    """A and B of every target projection; they act on all tokens, or on those from the question on."""
    if template.invocation and beyond_attention(model.network):
        raise UsageError(f"fit: from_question needs attention in every layer, which {model.model_type} models lack")
    generator = np.random.default_rng([options.seed, template.rank])
    dtype, count = torch.promote_types(model.dtype, torch.float32), 0
    updates: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for projection in target_projections(model, template):
        made, read = projection.shape
        # As torch draws a linear map: uniform, of variance 1 / (3 x features read).
        drawn = generator.uniform(-(read**-0.5), read**-0.5, (template.rank, read))
        down, up = (
            nn.Parameter(torch.tensor(numbers, dtype=dtype, device=model.device))
            for numbers in (drawn, np.zeros((made, template.rank)))
        )
        rows, targets = torch.cat(list(projection.rows.values())), torch.zeros_like(up[:, :1])
        targets[rows] = 1.0
        count += template.rank * (read + len(rows))
        up.register_hook(targets.mul)  # type: ignore[no-untyped-call] # other rows stay 0
        updates[projection.path] = down, up

    def method() -> Adapter:
        tensors = {
            f"{path}.{side}": np.ascontiguousarray(numbers.detach().float().cpu().numpy())
            for path, sides in updates.items()
            for side, numbers in zip(SIDES, sides, strict=True)
        }
        return replace(template, weights=tensors_hash(tensors), updates=tensors)

    free = [numbers for sides in updates.values() for numbers in sides]
    return Numbers(free, count, lambda model, begin: tuned(model.network, updates, begin), method)


def fit_adapter(calibration: Calibration, options: FitOptions, *, template: Adapter | None = None) -> Found:
    """Updates under which a model gives the right answers wherever they stand, and reads ordinary text as before.

    The template says rank, targets, strength and, if others than those that all prompts share, the tokens from which on
    they act. They have neither knots nor scales, and no penalty where they leave text as it is.
    """
    template = template or Adapter()
    if options.from_question and not template.invocation:
        template = replace(template, invocation=opening_tokens(calibration.model, calibration.examples))
    fixed: dict[str, Any] = {"penalty": 0.0} if template.invocation else {}
    fixed |= {"knots": (), "scales": False, "from_question": bool(template.invocation)}
    return fit_by_gradient(partial(adapter_numbers, template), calibration, options.settled(ADAPTER, **fixed))


BIAS: Mapping[str, Any] = {"steps": 300, "rate": 0.05, "batch": 1, "held_out": 0.0}
"""Settings of these fits where nothing else is asked for."""
SCALE_RATE = 0.4
"""Rate of the logarithm of a head's scale, as a share of the rate of biases."""


def bias_numbers(model: HuggingFaceModel, options: FitOptions) -> Numbers:
    """Biases at all knots but the last, which is 0, or of the context, and scales, by layer and head."""
    knots, n_biases = options.knots, max(1, len(options.knots) - 1)
    shape = model.sizes.get("layers", 0), model.sizes.get("heads", 0), n_biases + options.scales
    table = torch.zeros(shape, dtype=torch.float64, requires_grad=True)  # 0 for no change
    basis_of = cache(lambda n_positions: torch.tensor(log_spline_basis(knots, n_positions)[:, :-1]))

    def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
        return table[layer][:, :n_biases] @ (basis_of(n_positions) if knots else BEFORE[:, None]).T

    def scales(layer: int) -> Float[Tensor, "heads"]:
        return (SCALE_RATE * table[layer][:, -1]).exp()

    def applied(model: HuggingFaceModel, begin: int) -> AbstractContextManager[None]:
        factors = scales if options.scales else None
        return biased(model, "fit", logits, scales=factors, by_side=not knots, first_query=begin)

    def method() -> Mitigation:
        factors = _rounded((SCALE_RATE * table[..., -1]).exp()) if options.scales else None
        if not knots:
            return ContextBias(_rounded(table[..., 0]), factors)
        by_layer = [[(*head, 0.0) for head in layer] for layer in _rounded(table[..., :n_biases])]
        biases = [str(LogSpline(values=tuple(heads), knots=knots)) for heads in by_layer]
        return KeyBiasMethod(biases, from_question=options.from_question, scales=factors)

    return Numbers([table], table.numel(), applied, method)


def _rounded(numbers: Tensor) -> Any:
    """Nested lists of numbers to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


def fit_key_bias(calibration: Calibration, options: FitOptions) -> Found:
    """Splines over positions, for all queries, with a penalty, or from the question on, with scales."""
    if not options.knots:
        raise UsageError(f"fit: {KeyBiasMethod.name} needs knots; allowed without any is {ContextBias.name}")
    fixed: dict[str, Any] = {"penalty": 0.0} if options.from_question else {"scales": False}
    return fit_by_gradient(bias_numbers, calibration, options.settled(BIAS, **fixed))


def fit_context_bias(calibration: Calibration, options: FitOptions) -> Found:
    """One number for every head and layer, for all keys before the question, and a scale."""
    settled = options.settled(BIAS, knots=(), from_question=True, penalty=0.0)
    return fit_by_gradient(bias_numbers, calibration, settled)


SCALES = (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)
"""Scales that are tried."""


def fit_temperature(calibration: Calibration, options: FitOptions) -> Found:
    """The scale under which the answers are most probable per token, on average; the first of equals.

    Raises:
        RunError: no example fits into the model.
    """
    requests = [
        Request(prompt=one.prompt, answer=one.target, passages=one.passages, own_control=one.own_control)
        for one in calibration.examples
    ]
    candidates, scores = {str(one): one for one in map(Temperature, SCALES)}, dict[str, float]()
    for name, candidate in track(list(candidates.items()), "candidates"):
        responder = answering_under(candidate, LocalResponder(calibration.model))
        replies = responder.respond(requests, generate=False, score=True)
        found = [reply.score.logprob / reply.score.n_tokens for reply in replies if reply.score is not None]
        if not found:
            why = responder.learnt().get("no_scores_because") or "no calibration prompt fits into the model"
            raise RunError(f"fit: {why}")
        scores[name] = float(np.mean(found))
    return candidates[max(scores, key=scores.__getitem__)], {"candidates": scores}


FITS: Mapping[str, Fit] = {
    Adapter.name: fit_adapter,
    ContextBias.name: fit_context_bias,
    KeyBiasMethod.name: fit_key_bias,
    Temperature.name: fit_temperature,
}
"""The fits by the name of their method."""
