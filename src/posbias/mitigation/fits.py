"""The fits of single methods, each registered under the name of its method.

By gradient, with a penalty that keeps ordinary text as it was: `adapter`, with A drawn at random and B 0, so that
nothing changes at first; `key_bias`, splines of ln(1 + j), a few numbers per head and layer; `context_bias`, one number
for all keys before the question. By the log-probability of right answers under every candidate: `temperature` and
`positional_channel`.

The loss of a step is the negative log-likelihood of right answers, per token, mean over a batch of prompts, plus
`penalty` times the Kullback-Leibler divergence, per token, of the changed model's next token from the unchanged model's
on windows of ordinary text. What leaves text without a question as it is has no penalty. Adam, rate falling linearly to
0. No weight is touched.

Prompts of different lengths are run together, as many as fit into memory, with padding behind their ends, which no
token before it can see; behind kept keys and values each is run alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.encoding import WITHIN_THOUGHTS, EncodedRequest, encode_requests
from posbias.interventions.keys import KeyLogits, biased
from posbias.measurement.outputs import checkpointed
from posbias.measurement.units import check_passes, halving, together_in_memory
from posbias.mitigation.fitting import FITS, Calibration, Windows, answer_logprob, best_of
from posbias.mitigation.methods.adapter import SIDES, Adapter, target_projections, tensors_hash, tuned
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.context_bias import ContextBias
from posbias.mitigation.methods.key_bias import BEFORE, KeyBiasMethod
from posbias.mitigation.methods.positional_channel import PositionalChannel
from posbias.mitigation.methods.temperature import Temperature
from posbias.mitigation.options import FitOptions
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
    values: "AdapterNumbers | BiasNumbers"
    penalty: float
    together: int
    """Prompts, or windows, of a batch that run at once, with gradients accumulated."""

    def __post_init__(self) -> None:
        self._wholes = [np.concatenate([request.prompt, request.answer])[:-1] for request in self.encoded]
        self._prefixes: dict[int, Prefix] = {}
        # Behind kept keys, or by angles of every length's own, each prompt is run alone.
        alone = any(self.begins) or AngleLengths.of(self.model.network) != AngleLengths()
        self._together = 1 if alone else self.together

    def of_answers(self, indices: Sequence[int]) -> Losses:
        """Losses of prompts; if gradients are wanted, those of their mean are added, group by group, longest first."""
        order, found = sorted(indices, key=lambda index: -len(self._wholes[index])), np.zeros(len(self.begins))
        for first in range(0, len(order), self._together):
            group = order[first : first + self._together]
            beginning = self._beginning(group[0])  # which no numbers change
            with self.values.applied(self.model, self.begins[group[0]]):
                losses = self._losses(group, beginning)
                if torch.is_grad_enabled():
                    (losses.sum() / len(indices)).backward()  # type: ignore[no-untyped-call]
            found[group] = losses.detach().tolist()
        return np.asarray(found[list(indices)])

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
    numbers: Callable[[HuggingFaceModel, FitOptions], "AdapterNumbers | BiasNumbers"],
    calibration: Calibration,
    options: FitOptions,
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

    def descended(together: int) -> "tuple[AdapterNumbers | BiasNumbers, Descent]":
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


ADAPTER: Mapping[str, Any] = {"steps": 60, "rate": 0.002, "batch": 4, "held_out": 0.2}
"""Settings of this fit where nothing else is asked for."""


class AdapterNumbers:
    """A and B of every target projection."""

    def __init__(self, template: Adapter, model: HuggingFaceModel, options: FitOptions) -> None:
        self.template, self.options = template, options
        generator = np.random.default_rng([options.seed, template.rank])
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._updates: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.count = 0
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
            self.count += template.rank * (read + len(rows))
            up.register_hook(targets.mul)  # type: ignore[no-untyped-call] # other rows stay 0
            self._updates[projection.path] = down, up

    @property
    def free(self) -> list[Tensor]:
        """All A and B."""
        return [numbers for sides in self._updates.values() for numbers in sides]

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these updates, from the first token on."""
        recomputed = checkpointed(model.network, enabled=self.options.checkpointing)
        with tuned(model.network, self._updates), recomputed:
            yield

    def method(self) -> Adapter:
        """The adapter with these numbers, in float32."""
        tensors = {
            f"{path}.{side}": np.ascontiguousarray(numbers.detach().float().cpu().numpy())
            for path, sides in self._updates.items()
            for side, numbers in zip(SIDES, sides, strict=True)
        }
        return replace(self.template, weights=tensors_hash(tensors), updates=tensors)


@FITS.register(Adapter.name)
def fit_adapter(
    calibration: Calibration, options: FitOptions, *, template: Adapter | None = None
) -> tuple[Method, dict[str, Any]]:
    """Updates under which a model gives the right answers wherever they stand, and reads ordinary text as before.

    The template says rank, targets and strength. They act on all tokens, and have neither knots nor scales.
    """
    numbers = partial(AdapterNumbers, template or Adapter())
    return fit_by_gradient(numbers, calibration, options.settled(ADAPTER, knots=(), from_question=False, scales=False))


BIAS: Mapping[str, Any] = {"steps": 300, "rate": 0.05, "batch": 1, "held_out": 0.0}
"""Settings of these fits where nothing else is asked for."""
SCALE_RATE = 0.4
"""Rate of the logarithm of a head's scale, as a share of the rate of biases."""


class BiasNumbers:
    """Biases at all knots but the last, which is 0; or of the context, with scales."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        self.options = options
        heads, depth = model.sizes.get("heads", 0), model.sizes.get("layers", 0)
        shape = depth, heads, max(1, len(options.knots) - 1) + options.scales
        self._numbers = torch.zeros(shape, dtype=torch.float64, requires_grad=True)  # 0 for no change
        self.free, self.count = [self._numbers], self._numbers.numel()
        self._basis = cache(lambda n_positions: torch.tensor(log_spline_basis(options.knots, n_positions)[:, :-1]))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these numbers, for prompts of which the question begins at that token."""

        def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
            basis = self._basis(n_positions) if self.options.knots else BEFORE[:, None]
            return self._numbers[layer][:, : basis.shape[1]] @ basis.T

        def scales(layer: int) -> Float[Tensor, "heads"]:
            return (SCALE_RATE * self._numbers[layer][:, -1]).exp()

        added = KeyLogits(logits, scales if self.options.scales else None, by_side=not self.options.knots)
        recomputed = self.options.checkpointing and not self.options.from_question
        with (
            biased(model, "fit", added, first_query=begin),
            checkpointed(model.network, enabled=recomputed),
        ):
            yield

    def method(self) -> Mitigation:
        """The method with these numbers, to six digits."""
        scales = _rounded((SCALE_RATE * self._numbers[..., -1]).exp()) if self.options.scales else None
        if not self.options.knots:
            return ContextBias(_rounded(self._numbers[..., 0]), scales)
        by_layer = [
            [[*head, 0.0] for head in layer] for layer in _rounded(self._numbers[..., : len(self.options.knots) - 1])
        ]
        biases = [str(LogSpline(values=tuple(map(tuple, heads)), knots=self.options.knots)) for heads in by_layer]
        return KeyBiasMethod(biases, from_question=self.options.from_question, scales=scales)


def _rounded(numbers: Tensor) -> Any:
    """Nested lists of numbers to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


@FITS.register(KeyBiasMethod.name)
def fit_key_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Splines over positions, for all queries, with a penalty, or from the question on, with scales."""
    if not options.knots:
        raise UsageError(f"fit: {KeyBiasMethod.name} needs knots; allowed without any is {ContextBias.name}")
    fixed: dict[str, Any] = {"penalty": 0.0} if options.from_question else {"scales": False}
    return fit_by_gradient(BiasNumbers, calibration, options.settled(BIAS, **fixed))


@FITS.register(ContextBias.name)
def fit_context_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """One number for every head and layer, for all keys before the question, and a scale."""
    options = options.settled(BIAS, knots=(), from_question=True, penalty=0.0)
    return fit_by_gradient(BiasNumbers, calibration, options)


LEAST_POSITIONS = 40
"""Tokens of a window of text below which smoothness cannot be judged."""
SKIPPED_MONOTONE, SKIPPED_SMOOTH = 0.3, 0.2
"""Shares of a window whose first positions do not count: 300 and 200 of 1000 in the released code."""
SMOOTHING = (10, 3)
"""Width and order of the Savitzky-Golay filter under the second differences."""
FACTORS = (0.5, 0.0, -0.5, -1.0)
"""Factors that are tried."""
CHANNELS = 10
"""Monotone channels that are tried, the smoothest first."""
FINALISTS = 4
"""Candidates that are judged on all calibration prompts."""


@FITS.register(PositionalChannel.name)
def fit_positional_channel(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """The channel and the factor under which right answers are most probable, even if the unchanged model does better.

    It tells the log-probability per token of the answers, in nats, mean over examples, of every candidate on one prompt
    of each sample, and of the best few and unchanged on all.

    Raises:
        UsageError: short windows, a family that does not allow it, or no channel that is monotone in position.
        RunError: no calibration prompt fits into the model.
    """
    network, examples, text = calibration.model, calibration.examples, calibration.text
    length, means = len(text[0]) if len(text) else 0, np.zeros(())
    if length < LEAST_POSITIONS:
        raise UsageError(f"fit: positional_channel needs windows of {LEAST_POSITIONS} or more tokens, got {length}")
    for window in text:  # the residual stream behind every block, by position
        ids = network.token_tensor([window.tolist()])
        with torch.no_grad():
            states = network.network(ids, output_hidden_states=True, use_cache=False).hidden_states[1:]
        means = means + torch.stack([layer[0].cpu() for layer in states]).double().numpy() / len(text)
    channels = positional_channels(means, CHANNELS)
    if not channels:
        raise UsageError(f"fit: no channel is monotone in position in more than {len(means) // 4} layers")
    candidates = [
        PositionalChannel(channel, factor, from_question=options.from_question)
        for channel in channels
        for factor in FACTORS
    ]
    samples: dict[str, list[Example]] = {}
    for example in examples:
        samples.setdefault(example.sample, []).append(example)
    _, first = best_of(candidates, network, [of[n % len(of)] for n, of in enumerate(samples.values())])
    ranked = sorted(candidates, key=lambda candidate: -first[str(candidate)])
    best, scores = best_of(ranked[:FINALISTS], network, examples)
    unchanged = answer_logprob(network, None, examples)
    return best, {"found": channels, "unchanged": unchanged, "one_prompt_each": first, "candidates": scores}


def positional_channels(means: Float64[np.ndarray, "layer position channel"], most: int) -> list[int]:
    """Channels whose cubic fit is monotone, one way, in more than a quarter of the layers; the smoothest first.

    Smoothness is the sum of squared second differences of the curve, scaled to [0, 1] and filtered, in the smoothest
    of those layers. The first two layers and the last are left out.
    """
    from scipy.signal import savgol_filter

    depth, n_positions, _ = means.shape
    if depth < 4:
        return []
    inner = means[2 : depth - 1]
    curves, smooth = (inner[:, int(share * n_positions) :] for share in (SKIPPED_MONOTONE, SKIPPED_SMOOTH))
    powers = np.vander(np.linspace(-1, 1, curves.shape[1]), 4)
    steps = np.diff(powers @ (np.linalg.pinv(powers) @ curves), axis=1)
    varies = np.ptp(curves, axis=1) > 0
    rising, falling = ((steps * sign >= 0).all(axis=1) & varies for sign in (1, -1))
    monotone = np.where(rising.sum(axis=0) > falling.sum(axis=0), rising, falling)
    spread = np.ptp(smooth, axis=1, keepdims=True)
    scaled = (smooth - smooth.min(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1)
    rough = np.square(np.diff(savgol_filter(scaled, *SMOOTHING, axis=1), n=2, axis=1)).sum(axis=1)
    roughness = np.where(monotone, rough, np.inf).min(axis=0, initial=np.inf)
    enough = np.flatnonzero(monotone.sum(axis=0) > depth // 4)
    return [int(channel) for channel in enough[np.argsort(roughness[enough], kind="stable")][:most]]


SCALES = (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)
"""Scales that are tried."""


@FITS.register(Temperature.name)
def fit_temperature(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Score the answers under all scales, one after another."""
    best, scores = best_of([Temperature(scale) for scale in SCALES], calibration.model, calibration.examples)
    return best, {"candidates": scores}
