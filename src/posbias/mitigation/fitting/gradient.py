"""Fit numbers inside a model by gradient, on calibration answers, with a penalty that keeps ordinary text as it was.

A key bias is splines of ln(1 + j), a few numbers per head and layer, or one number for all keys before the question.
Biases that act from the question on have a scale of each head's own logits, too. The loss of a step is the negative
log-likelihood of a right answer, per token, plus `penalty` times the Kullback-Leibler divergence, per token, of the
changed model's next token from the unchanged model's on a window of ordinary text. Biases from the question on leave
text without one as it is, and have no penalty. Adam, rate falling linearly to 0. No weight is touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.errors import RunError, UsageError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, EncodedRequest, encode_requests
from posbias.interventions.keys import KeyBiased, KeyLogits, biased
from posbias.measurement.blocks import checkpointed
from posbias.mitigation.fitting.base import Checkpoint, FitOptions, Windows
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.key_bias import BEFORE, ContextBias, KeyBiasMethod
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.progress import track
from posbias.tasks.language import Example
from posbias.tasks.language.base import locate

KEPT_BYTES = 2 << 30
"""Bytes of keys and values before the question that are kept if a bias acts from it on: no step changes them."""
SCALE_RATE = 0.4
"""Rate of the logarithm of a head's scale, as a share of the rate of biases."""
STEPS_AT_ONCE = 25
"""Steps between two checkpoints: what an interruption costs at most."""


class BiasNumbers:
    """The numbers that are fitted: biases at all knots but the last, which is 0; or of the context, with scales."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        self.heads, self.depth = model.family.heads(model.config), model.family.depth(model.config)
        self.options = options
        shape = (
            1 if options.shared in ("layers", "both") else self.depth,
            1 if options.shared in ("heads", "both") else self.heads,
            max(1, len(options.knots) - 1) + options.scales,
        )
        self.free = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        """The numbers that change, all 0 for no change."""
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
        shared = whole[: len(self.free), : self.free.shape[1]]
        alike = shared.shape == self.free.shape and np.array_equal(np.broadcast_to(shared, whole.shape), whole)
        if not alike or method.strength != 1:
            raise UsageError(
                f"fit: begin={options.begin!r} is of another form than is fitted here (method, knots, shared, "
                "from_question, scales)"
            )
        with torch.no_grad():
            self.free.copy_(torch.tensor(shared))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begins: int) -> Iterator[None]:
        """The model with these numbers; the question begins at token `begins`."""

        def of_layer(layer: int) -> Float[Tensor, "heads numbers"]:
            return self.free[layer if len(self.free) > 1 else 0].expand(self.heads, -1)

        def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
            basis = self._basis(n_positions) if self.options.knots else BEFORE[:, None]
            return of_layer(layer)[:, : basis.shape[1]] @ basis.T

        def scales(layer: int) -> Float[Tensor, "heads"]:
            return (SCALE_RATE * of_layer(layer)[:, -1]).exp()

        added = KeyLogits(logits, scales if self.options.scales else None, by_side=not self.options.knots)
        recomputed = self.options.checkpointing and not self.options.from_question
        with (
            biased(model, "fit", added, first_query=begins),
            checkpointed(model.network, enabled=recomputed),
        ):
            yield

    def _basis(self, n_positions: int) -> Float[Tensor, "n knots"]:
        if n_positions not in self._bases:
            self._bases[n_positions] = torch.tensor(log_spline_basis(self.options.knots, n_positions)[:, :-1])
        return self._bases[n_positions]

    def method(self) -> Mitigation:
        """The method with these numbers, to six digits; one encoding if the layers share theirs."""
        whole = self.free.detach().expand(self.depth, self.heads, -1)
        scales = _rounded((SCALE_RATE * whole[..., -1]).exp()) if self.options.scales else None
        if not self.options.knots:
            return ContextBias(_rounded(whole[..., 0]), scales)
        rounded = _rounded(self.free[..., : len(self.options.knots) - 1])
        by_layer = [[[*head, 0.0] for head in layer] for layer in rounded]
        encodings = [
            str(LogSpline(values=heads[0] if len(heads) == 1 else heads, knots=self.options.knots))
            for heads in by_layer
        ]
        biases = encodings[0] if len(by_layer) == 1 else encodings
        return KeyBiasMethod(biases, from_question=self.options.from_question, scales=scales)


def _rounded(numbers: Tensor) -> Any:
    """Nested lists of numbers to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


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


class Answers:
    """Calibration prompts with their answers; the tokens before a bias begins to act are run once and kept."""

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
        """The keys and values before the question; as many prompts as `KEPT_BYTES` hold keep theirs."""
        if index in self._prefixes:
            return self._prefixes[index]
        prefix = Prefix(self._model, embeddings)
        if sum(earlier.n_bytes for earlier in self._prefixes.values()) + prefix.n_bytes <= KEPT_BYTES:
            self._prefixes[index] = prefix
        return prefix


def step_on_text(
    model: HuggingFaceModel, window: Int64[np.ndarray, "token"], values: BiasNumbers, penalty: float
) -> float:
    """KL(unchanged || changed) of the next token, per token; its gradient, times the penalty, is added."""
    embeddings, positions = model.embed(model.token_tensor([window.tolist()])), list(range(len(window)))
    with torch.no_grad():
        unchanged = model.outputs(embeddings, positions).logits[0].float().log_softmax(-1)
    with values.applied(model, 0):  # layers may be computed again in the backward pass
        changed = model.outputs(embeddings, positions).logits[0].float().log_softmax(-1)
        divergence = torch.nn.functional.kl_div(changed, unchanged, reduction="batchmean", log_target=True)
        (penalty * divergence).backward()  # type: ignore[no-untyped-call]
    return float(divergence.detach())


def descend(
    model: HuggingFaceModel,
    values: BiasNumbers,
    answers: Answers,
    begins: Sequence[int],
    text: Windows,
    options: FitOptions,
    checkpoint: Checkpoint | None,
) -> Float64[np.ndarray, "steps two"]:
    """Change the values in place, step by step; the losses before every step, of the answer and of ordinary text.

    Args:
        values: Numbers with `free`, a tensor with a gradient, and `applied`, which opens the model with them.
        begins: The first token that the numbers act on, of every prompt.
        checkpoint: Where the fit is kept as it goes, and taken up.

    Raises:
        RunError: the loss is not a finite number.
    """
    generator = np.random.default_rng(options.seed)
    order = _rounds(len(begins), options.steps, generator)
    windows = _rounds(max(1, len(text)), options.steps, generator)
    optimiser = torch.optim.Adam([values.free], lr=options.rate)
    losses = np.zeros((options.steps, 2))
    begun = 0 if checkpoint is None else _take_up(checkpoint, values.free, optimiser, losses)
    for step in track(range(begun, options.steps), "steps of the fit"):
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
        if checkpoint is not None and (step + 1) % STEPS_AT_ONCE == 0:
            moments = {name: moment.detach().numpy() for name, moment in optimiser.state[values.free].items()}
            state = {"free": values.free.detach().numpy(), "done": np.array([step + 1]), "losses": losses}
            checkpoint.store.keep(checkpoint.piece, {**moments, **state})
    return losses


def _take_up(
    checkpoint: Checkpoint, free: Tensor, optimiser: torch.optim.Optimizer, losses: Float64[np.ndarray, "steps two"]
) -> int:
    """The first step that is still to be done; numbers, moments and losses become those before it, in place."""
    state = checkpoint.store.find(checkpoint.piece)
    if state is None:
        return 0
    with torch.no_grad():
        free.copy_(torch.from_numpy(state.pop("free")))
    step = int(state.pop("done")[0])
    losses[:step] = state.pop("losses")[:step]
    optimiser.state[free] = {name: torch.from_numpy(moment) for name, moment in state.items()}
    return step


def _rounds(n_items: int, steps: int, generator: np.random.Generator) -> Int64[np.ndarray, "step"]:
    """One item for each step: every item once in random order, then all of them again."""
    rounds = [generator.permutation(n_items) for _ in range(-(-steps // n_items))]
    return np.concatenate(rounds)[:steps].astype(np.int64)
