"""Fit a method to a model on calibration samples, with a penalty that keeps ordinary text as it was.

A key bias: splines of ln(1 + j), a few numbers per head and layer; or one number for all keys before the question. What
acts from the question on has a scale of each head's own logits, too. The loss of a step is the negative log-likelihood
of a right answer, per token, plus `penalty` times the Kullback-Leibler divergence, per token, of the changed model's
next token from the unchanged model's on a window of ordinary text. What acts from the question on leaves text without
one as it is, and has no penalty. Adam, rate falling linearly to 0. No weight is touched.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.checks import check_choice, check_number, check_seed, check_size, checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, EncodedRequest, encode_requests
from posbias.interventions.base import check_model
from posbias.interventions.keys import KeyBiased, KeyLogits, biased
from posbias.limits import UPDATES
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.calibration import best_of, check_samples, contents
from posbias.mitigation.fitting.channel_search import ChannelOptions, fit_channel
from posbias.mitigation.fitting.checkpoint import Checkpoint
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation, check_strength, inside_methods
from posbias.mitigation.methods.key_bias import BEFORE, ContextBias, KeyBiasMethod
from posbias.mitigation.methods.positional_channel import PositionalChannel
from posbias.mitigation.methods.recipe import read_recipe, samples_of_recipe
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.progress import track
from posbias.registry import Registry
from posbias.runs.records import plain
from posbias.tasks.language import Example
from posbias.tasks.language.base import locate

SHARING = ("none", "heads", "layers", "both")
"""What has numbers in common: nothing; the heads of a layer; the layers, head by head; all heads of all layers."""

KEPT_BYTES = 2 << 30
"""Of keys and values before the question, where a bias acts from the question on: they are the same at every step."""

SCALE_RATE = 0.4
"""Of the rate of biases: that of the logarithm of a head's scale."""

GRADIENT = (KeyBiasMethod.name, ContextBias.name)
"""Methods that are fitted by gradient."""
SEARCHED = (*GRADIENT, PositionalChannel.name)
"""Methods without a grid whose parameters are fitted or searched; the others have a default for all of them."""

Windows = Sequence[Int64[np.ndarray, "token"]]


FITS: Registry["FitOptions"] = Registry("fit")
"""Its one variant reads the options of a fit from text: `options(steps=600)`."""


@FITS.register("options")
@dataclass(frozen=True)
class FitOptions:
    """How a key bias is fitted."""

    steps: int = 300
    """Of one calibration prompt each, and one window of text where there is a penalty, >= 1."""
    rate: float = 0.05
    """Of Adam at the first step, in nats."""
    penalty: float = 1.0
    """Weight of the divergence on ordinary text, >= 0; none where the bias acts from the question on."""
    knots: Sequence[int] = (0, 1, 8, 64, 512)
    """Keys whose biases are fitted, that at the last knot being 0; between them splines; not for a context bias."""
    shared: str = "none"
    """One of `SHARING`."""
    from_question: bool = False
    """Whether the bias acts from the question on only."""
    scales: bool = True
    """Whether every head's logits have a scale, too, for the queries from the question on; not where all queries have
    the bias."""
    seed: int = 0
    """Of the order of prompts and windows."""
    begin: str = ""
    """A recipe of the same form, from whose numbers the fit goes on; empty: from no change."""
    checkpointing: bool = False
    """Whether layers are computed again in the backward pass, for less memory and more time; not from the question on,
    where few tokens have one."""
    strengths: Sequence[float] = ()
    """Strengths of whatever is fitted, each in [0, 1], from which the calibration samples choose; empty: 1."""

    def __post_init__(self) -> None:
        for name in ("knots", "strengths"):
            given = getattr(self, name)
            if not isinstance(given, Iterable) or isinstance(given, str):
                raise UsageError(f"fit: {name} must be a list of numbers, got {given!r}")
            object.__setattr__(self, name, tuple(plain(each) for each in given))
        check_size("fit: steps", self.steps, UPDATES)
        check_number("fit: rate", self.rate, above=0.0)
        check_number("fit: penalty", self.penalty)
        check_choice("fit: shared", self.shared, SHARING)
        check_seed(self.seed)
        if not isinstance(self.begin, str):
            raise UsageError(f"fit: begin must be the path of a recipe, got {self.begin!r}")
        for strength in self.strengths:
            check_strength("fit", strength)
        if len(set(self.strengths)) < len(self.strengths):
            raise UsageError(f"fit: each of strengths once, got {list(self.strengths)}")
        if self.knots:
            LogSpline(values=[0.0] * len(self.knots), knots=self.knots)


@dataclass(frozen=True)
class Fitted:
    """A fitted method and how it came about."""

    method: Mitigation
    how: dict[str, Any]
    """Plain values for a recipe or record: options, calibration samples, and what the fit saw of them; `samples` are
    `contents` of these, by which a run refuses to judge the recipe on them."""


@checked
def fit(
    method: str,
    model: Any,
    calibration: Sequence[Example],
    *,
    text: Windows = (),
    options: FitOptions | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fitted:
    """A method with the parameters that suit a model, from calibration samples alone.

    Args:
        method: "key_bias" or "context_bias" (`fit_bias`), "positional_channel" (`fit_channel`), or a method with a grid
            of parameters: the candidate is taken under which the right answers are most probable, per token, averaged
            over samples and positions.
        model: What `load_model` returns.
        calibration: Examples with their answers, of at least 4 samples; all positions that matter among them.
        text: Token ids of windows of ordinary text, for a key bias or a channel.
        options: Of a key bias; of the others, the strengths to choose from.
        checkpoint: Where a fit by gradient is kept as it goes, and taken up.

    Raises:
        UsageError: a method without parameters to fit, or too few samples.
    """
    found = _fitted(method, model, calibration, text, options or FitOptions(), checkpoint)
    seen = contents(calibration) | (samples_of_recipe(options.begin) if options and options.begin else set())
    found = replace(found, how={**found.how, "samples": sorted(seen)})
    strengths = () if options is None else options.strengths
    if not strengths:
        return found
    candidates = [replace(found.method, strength=strength) for strength in strengths]
    best, scores = best_of(candidates, check_model(model), calibration)
    chosen = dict(zip(map(str, strengths), scores.values(), strict=True))
    return Fitted(best, {**found.how, "strengths": chosen})


def _fitted(
    method: str,
    model: Any,
    calibration: Sequence[Example],
    text: Windows,
    options: FitOptions,
    checkpoint: Checkpoint | None,
) -> Fitted:
    """At full strength."""
    if method in GRADIENT:
        return fit_bias(method, model, calibration, text, options=options, checkpoint=checkpoint)
    if method == PositionalChannel.name:
        chosen = ChannelOptions(from_question=options.from_question)
        return Fitted(*fit_channel(model, calibration, text, options=chosen))
    kind = MITIGATIONS[method]
    if not (issubclass(kind, Mitigation) and kind.grid):
        fitted = [name for name in inside_methods() if MITIGATIONS[name].grid]
        raise UsageError(f"{method} has no parameters to fit; allowed: {', '.join([*SEARCHED, *fitted])}")
    network, n_samples = check_model(model), check_samples(calibration)
    names, values = list(kind.grid), list(kind.grid.values())
    candidates = [kind(**dict(zip(names, each, strict=True))) for each in product(*values)]
    best, found = best_of(candidates, network, calibration)
    how = {"candidates": found, "calibration_samples": n_samples, "calibration_prompts": len(calibration)}
    return Fitted(best, how)


def passes_of_fit(method: str, samples: int, positions: int, options: FitOptions) -> int:
    """Forward passes of a calibration prompt that `fit` takes, roughly: a backward pass is two, a window a prompt."""
    prompts = samples * positions
    strengths = len(options.strengths) * prompts
    if method in GRADIENT:
        options = options_of_bias(method, options)
        # What is before the question is computed once where nothing changes it.
        each = 1 if options.from_question else 3 + 4 * (options.penalty > 0)
        return options.steps * each + strengths
    if method == PositionalChannel.name:
        tried = ChannelOptions()
        return tried.channels * len(tried.factors) * samples + (tried.finalists + 1) * prompts + strengths
    grid = getattr(MITIGATIONS[method], "grid", {})  # none: the curve is measured, one answer to each prompt
    return math.prod(len(values) for values in grid.values()) * prompts + (strengths if grid else 0)


def reads_text(method: str, options: FitOptions) -> bool:
    """Whether a fit of the method reads windows of ordinary text."""
    if method in GRADIENT:
        return options_of_bias(method, options).penalty > 0
    return method == PositionalChannel.name


def options_of_bias(method: str, options: FitOptions) -> FitOptions:
    """As the fit of that bias takes them."""
    if method == ContextBias.name:
        options = replace(options, knots=(), from_question=True)
    return replace(options, penalty=0.0) if options.from_question else replace(options, scales=False)


def fit_bias(
    method: str,
    model: Any,
    calibration: Sequence[Example],
    text: Windows,
    *,
    options: FitOptions | None = None,
    checkpoint: Checkpoint | None = None,
) -> Fitted:
    """A bias by key under which a model gives the right answers wherever they stand.

    Args:
        method: "key_bias", splines over positions, or "context_bias", for every head and layer one number for all keys
            before the question, and a scale.
        model: What `load_model` returns, of a family whose attention goes through transformers' interface.
        calibration: Examples with their answers, of at least 4 samples; all positions that matter among them.
        text: Token ids of windows of ordinary text, at least one where there is a penalty.
        checkpoint: Where the fit is kept as it goes, and taken up.
        options: How. The record has the losses of every step's prompt and window before the step, in nats per token.

    Raises:
        UsageError: too few samples, no text, or a family that does not allow it.
        RunError: the loss is not a finite number.
    """
    options = options_of_bias(method, options or FitOptions())
    if method == KeyBiasMethod.name and not options.knots:
        raise UsageError(f"fit: {method} needs knots; allowed without any is {ContextBias.name}")
    network = check_model(model)
    n_samples = check_samples(calibration)
    if options.penalty > 0 and not len(text):
        raise UsageError("fit: windows of ordinary text are needed where the penalty is above 0")
    encoded = encoded_answers(network, calibration)
    begins = begins_of(network, calibration, options)
    values = Values(network, options)
    if options.begin:
        values.begin_at(read_recipe(options.begin, network))
    losses = descend(network, values, Answers(network, encoded, begins), begins, text, options, checkpoint)
    how = {
        **asdict(options),
        "numbers": values.free.numel(),
        "calibration_samples": n_samples,
        "calibration_prompts": len(encoded),
        "answer_loss": np.round(losses[:, 0], 6).tolist(),
        "text_loss": np.round(losses[:, 1], 6).tolist(),
    }
    return Fitted(values.method(), how)


def descend(
    model: HuggingFaceModel,
    values: "Trained",
    answers: "Answers",
    begins: Sequence[int],
    text: Windows,
    options: FitOptions,
    checkpoint: Checkpoint | None,
) -> Float64[np.ndarray, "steps two"]:
    """The losses of every step before it, of the answer and of ordinary text; the values are changed in place."""
    generator = np.random.default_rng(options.seed)
    order = _rounds(len(begins), options.steps, generator)
    windows = _rounds(max(1, len(text)), options.steps, generator)
    optimiser = torch.optim.Adam([values.free], lr=options.rate)
    losses = np.zeros((options.steps, 2))
    done = 0 if checkpoint is None else checkpoint.resumed(values.free, optimiser, losses)
    for step in track(range(done, options.steps), "steps of the fit"):
        for group in optimiser.param_groups:
            group["lr"] = options.rate * (1 - step / options.steps)
        optimiser.zero_grad()
        index = int(order[step])
        with values.applied(model, begins[index]):
            answer = answers.loss(index)
            answer.backward()  # type: ignore[no-untyped-call]
        losses[step, 0] = float(answer.detach())
        if options.penalty > 0:
            losses[step, 1] = step_on_text(model, text[int(windows[step])], values, options.penalty)
        if not np.isfinite(losses[step]).all():
            raise RunError(
                f"fit: the loss of step {step} is not a finite number; try a smaller rate than {options.rate:g}"
            )
        optimiser.step()
        if checkpoint is not None:
            checkpoint.keep(step, values.free, optimiser, losses)
    return losses


@runtime_checkable
class Trained(Protocol):
    """What a fit changes."""

    free: Tensor
    """The numbers, float64, with a gradient; all 0 where nothing is changed."""

    def applied(self, model: HuggingFaceModel, begins: int) -> AbstractContextManager[None]:
        """The model with these numbers, where the question begins at that token."""


class Values:
    """The numbers that are fitted: biases at all knots but the last, which is 0; or of the context, with scales."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        self.heads, self.depth, self.options = (
            model.family.heads(model.config),
            model.family.depth(model.config),
            options,
        )
        shape = (
            1 if options.shared in ("layers", "both") else self.depth,
            1 if options.shared in ("heads", "both") else self.heads,
            max(1, len(options.knots) - 1) + options.scales,
        )
        self.free = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        self._bases: dict[int, Tensor] = {}

    def begin_at(self, method: Method) -> None:
        """Take the numbers of a fitted method, which must be of the form that is asked for."""
        options, whole, scaled = self.options, np.zeros((0, 0, 0)), None
        if isinstance(method, ContextBias) and not options.knots:
            whole, scaled = np.array(method.values)[..., None], method.scales
        elif isinstance(method, KeyBiasMethod) and method.from_question == options.from_question:
            layers = KeyBiased(method.biases).layers(self.depth)
            if all(isinstance(layer, LogSpline) and tuple(layer.knots) == options.knots for layer in layers):
                values = np.stack([layer.parameters(self.heads) for layer in layers])
                whole, scaled = (values - values[..., -1:])[..., :-1], method.scales
        if scaled is not None:
            whole = np.concatenate([whole, np.log(scaled)[..., None] / SCALE_RATE], axis=-1)
        own = whole[: len(self.free), : self.free.shape[1]]
        same = own.shape == self.free.shape and np.array_equal(np.broadcast_to(own, whole.shape), whole)
        if not same or method.strength != 1:
            raise UsageError(
                f"fit: begin={options.begin!r} is of another form than is fitted here (method, knots, shared, "
                "from_question, scales)"
            )
        with torch.no_grad():
            self.free.copy_(torch.tensor(own))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begins: int) -> Iterator[None]:
        """The model with these numbers, where the question begins at that token."""

        def of_layer(layer: int) -> Float[Tensor, "heads numbers"]:
            return self.free[layer if len(self.free) > 1 else 0].expand(self.heads, -1)

        def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
            basis = self._basis(n_positions) if self.options.knots else BEFORE[:, None]
            return of_layer(layer)[:, : basis.shape[1]] @ basis.T

        def scales(layer: int) -> Float[Tensor, "heads"]:
            return (SCALE_RATE * of_layer(layer)[:, -1]).exp()

        added = KeyLogits(logits, scales if self.options.scales else None, by_side=not self.options.knots)
        changed = biased(model, "fit", added, first_query=begins)
        again = self.options.checkpointing and not self.options.from_question
        with changed, checkpointed(model.network, enabled=again):
            yield

    def _basis(self, n_positions: int) -> Float[Tensor, "n knots"]:
        if n_positions not in self._bases:
            self._bases[n_positions] = torch.tensor(log_spline_basis(self.options.knots, n_positions)[:, :-1])
        return self._bases[n_positions]

    def method(self) -> Mitigation:
        """With these numbers, to six digits; one encoding where the layers share."""
        whole = self.free.detach().expand(self.depth, self.heads, -1)
        scales = _rounded((SCALE_RATE * whole[..., -1]).exp()) if self.options.scales else None
        if not self.options.knots:
            return ContextBias(_rounded(whole[..., 0]), scales)
        rounded = _rounded(self.free[..., : len(self.options.knots) - 1])
        given = [[[*head, 0.0] for head in layer] for layer in rounded]
        encodings = [
            str(LogSpline(values=layer[0] if len(layer) == 1 else layer, knots=self.options.knots)) for layer in given
        ]
        biases = encodings[0] if len(given) == 1 else encodings
        return KeyBiasMethod(biases, from_question=self.options.from_question, scales=scales)


def _rounded(numbers: Tensor) -> Any:
    """As nested lists, to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


def encoded_answers(model: HuggingFaceModel, examples: Sequence[Example]) -> list[EncodedRequest]:
    """Prompts and right answers in tokens; every prompt must fit into the context."""
    requests = [Request(prompt=e.prompt, answer=e.target, own_control=e.own_control) for e in examples]
    encoded = encode_requests(model.tokenizer, requests)
    if any(one.thinks for one in encoded):
        raise UsageError(f"fit: {WITHIN_THOUGHTS}")
    longest = max(len(one.prompt) + len(one.answer) for one in encoded)
    if model.max_positions is not None and longest > model.max_positions:
        raise UsageError(f"fit: a calibration prompt has {longest} tokens; the model takes {model.max_positions}")
    return encoded


def begins_of(model: HuggingFaceModel, examples: Sequence[Example], options: FitOptions) -> list[int]:
    """The first token that a bias acts on in every prompt: that behind the last passage, or 0."""
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


def _rounds(n_items: int, steps: int, generator: np.random.Generator) -> Int64[np.ndarray, "step"]:
    """Every item once in random order, then all of them again, for so many steps."""
    rounds = [generator.permutation(n_items) for _ in range(-(-steps // n_items))]
    return np.concatenate(rounds)[:steps].astype(np.int64)


class Answers:
    """Calibration prompts with their answers; what stands before a bias begins to act is run once and kept."""

    def __init__(self, model: HuggingFaceModel, encoded: Sequence[EncodedRequest], begins: Sequence[int]) -> None:
        self._model, self._encoded, self._begins = model, encoded, begins
        self._prefixes: dict[int, Prefix] = {}

    def loss(self, index: int) -> Tensor:
        """Negative log-likelihood of an answer, per token."""
        prompt, answer, begin = self._encoded[index].prompt, self._encoded[index].answer, self._begins[index]
        whole = np.concatenate([prompt, answer])[:-1]
        embeddings = self._model.embed(self._model.token_tensor([whole.tolist()]))
        rows = list(range(len(prompt) - 1 - begin, len(whole) - begin))
        if begin:
            outputs = self._prefix(index, embeddings[:, :begin]).outputs(begin, embeddings[:, begin:], rows)
        else:
            outputs = self._model.outputs(embeddings, rows)
        logits = outputs.logits[0].float()
        return torch.nn.functional.cross_entropy(logits, torch.as_tensor(answer, device=logits.device))

    def _prefix(self, index: int, embeddings: Tensor) -> Prefix:
        """The first ones stay, as many as `KEPT_BYTES` hold; the others are run again."""
        if index in self._prefixes:
            return self._prefixes[index]
        prefix = Prefix(self._model, embeddings)
        if sum(kept.n_bytes for kept in self._prefixes.values()) + prefix.n_bytes <= KEPT_BYTES:
            self._prefixes[index] = prefix
        return prefix


def step_on_text(model: HuggingFaceModel, window: Int64[np.ndarray, "token"], values: Trained, penalty: float) -> float:
    """KL(unchanged || changed) of the next token, per token, whose gradient, times the penalty, is added."""
    embeddings, positions = model.embed(model.token_tensor([window.tolist()])), list(range(len(window)))
    with torch.no_grad():
        unchanged = model.outputs(embeddings, positions).logits[0].float().log_softmax(-1)
    with values.applied(model, 0):  # layers may be computed again in the backward pass
        changed = model.outputs(embeddings, positions).logits[0].float().log_softmax(-1)
        divergence = torch.nn.functional.kl_div(changed, unchanged, reduction="batchmean", log_target=True)
        (penalty * divergence).backward()  # type: ignore[no-untyped-call]
    return float(divergence.detach())
