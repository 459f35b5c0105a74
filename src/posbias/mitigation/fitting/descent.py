"""Fit numbers inside a model by gradient, on calibration answers, with a penalty that keeps ordinary text as it was.

The loss of a step is the negative log-likelihood of right answers, per token, mean over a batch of prompts, plus
`penalty` times the Kullback-Leibler divergence, per token, of the changed model's next token from the unchanged model's
on windows of ordinary text, and on as many everyday conversations if the prompts are conversations. What leaves text
without a question as it is has no penalty. Adam, rate falling linearly to 0. No weight is touched.

Prompts of different lengths are run together with padding behind their ends, which no token before it can see; behind
kept keys and values, with padding before their beginnings, and as many last tokens of each as the longest question has.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.endings import EncodedRequest
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, encode_requests
from posbias.mitigation.fitting.base import BY_LOSS, Checkpoint, FitOptions, Windows
from posbias.models.hugging_face import HuggingFaceModel, Prefix
from posbias.models.rotary import AngleLengths
from posbias.progress import track
from posbias.runs.caveats import refusal
from posbias.tasks.language import Example
from posbias.tasks.language.locating import locate

KEPT_BYTES = 2 << 30
"""Bytes of keys and values before the question that are kept if a method acts from it on: no step changes them."""
STEPS_AT_ONCE = 25
"""Steps between two checkpoints: what an interruption costs at most."""
PROMPTS_PER_WINDOW = 4
"""Prompts of a step for each window of each kind of text in it."""
STEPS_BETWEEN_CHECKS = 10
"""Steps between two looks at the calibration samples that no step sees."""
MEMORY = 0.8
"""Weight of a position's earlier losses in its present one, beside those of the step."""
PATIENCE = 3
"""Looks without an improvement after which a fit ends."""


Losses = Float64[np.ndarray, "prompt"]
Places = Int64[np.ndarray, "prompt"]


@runtime_checkable
class Numbers(Protocol):
    """The numbers that are fitted, and the model with them."""

    free: Tensor
    """A leaf with a gradient."""

    def applied(self, model: HuggingFaceModel, begins: Sequence[int]) -> AbstractContextManager[None]:
        """The model with these numbers; the question begins at these tokens of the prompts of a batch."""


def encoded_answers(model: HuggingFaceModel, examples: Sequence[Example]) -> list[EncodedRequest]:
    """Prompts and right answers in tokens; every prompt must fit into the context."""
    encoded = encode_requests(
        model.tokenizer, [Request(prompt=e.prompt, answer=e.target, own_control=e.own_control) for e in examples]
    )
    if any(request.thinks for request in encoded):
        raise refusal("fit_within_thoughts", because=WITHIN_THOUGHTS)
    longest = max(len(request.prompt) + len(request.answer) for request in encoded)
    if model.max_positions is not None and longest > model.max_positions:
        raise refusal("calibration_prompt_too_long", longest=longest, most=model.max_positions)
    return encoded


def begins_of(model: HuggingFaceModel, examples: Sequence[Example], options: FitOptions) -> list[int]:
    """The first token that a bias acts on in every prompt: the one behind the last passage, or 0."""
    if not options.from_question:
        return [0] * len(examples)
    begins = []
    for example in examples:
        spans, n_tokens = locate(example.prompt, example.passages, model.tokenizer, own_control=example.own_control)
        if not spans or n_tokens is None:
            raise refusal("from_question_without_passages")
        if spans[-1][1] >= n_tokens:
            raise refusal("from_question_at_end")
        begins.append(spans[-1][1])
    return begins


class Answers:
    """Calibration prompts with their answers; the tokens before a method begins to act are run once and kept."""

    def __init__(self, model: HuggingFaceModel, encoded: Sequence[EncodedRequest], begins: Sequence[int]) -> None:
        self._model, self._encoded, self._begins = model, encoded, begins
        self._prefixes: dict[int, Prefix] = {}
        self._lengths = AngleLengths.of(model.network)

    def together(self, indices: Sequence[int], most: int) -> Iterator[list[int]]:
        """Groups of at most so many prompts that are run together, with about as many tokens to run each.

        Alone is what rotary angles of its whole length turn otherwise than those of its kept beginning.
        """
        by_angles: dict[object, list[int]] = {}
        for index in sorted(indices, key=lambda index: -self._n_run(index)):
            angles, begin = self._lengths.angles(self._n_tokens(index)), self._begins[index]
            alone = index if begin and self._lengths.angles(begin) != angles else None
            by_angles.setdefault((angles, begin > 0, alone), []).append(index)
        for alike in by_angles.values():
            while alike:
                columns, begun = self._n_run(alike[0]), self._begins[alike[0]] > 0
                group = [index for index in alike if not begun or self._n_tokens(index) > columns][:most]
                yield group
                alike = [index for index in alike if index not in group]

    def beginnings(self, indices: Sequence[int]) -> list[Prefix]:
        """Keys and values before the question of prompts that are run together, which no numbers change."""
        return [self._prefix(index) for index in indices if self._begins[index]]

    def losses(self, indices: Sequence[int], beginnings: Sequence[Prefix]) -> Float[Tensor, "prompt"]:
        """Negative log-likelihood of each answer, per token, of prompts that are run together."""
        requests = [self._encoded[index] for index in indices]
        wholes = [np.concatenate([request.prompt, request.answer])[:-1] for request in requests]
        columns = max(map(self._n_run, indices))
        tokens = np.zeros((len(requests), columns), dtype=np.int64)
        firsts = [len(whole) - columns if beginnings else 0 for whole in wholes]
        for row, whole, first in zip(tokens, wholes, firsts, strict=True):
            row[: len(whole) - first] = whole[first:]
        starts = [len(request.prompt) - 1 - first for request, first in zip(requests, firsts, strict=True)]
        rows = sorted({row for start, one in zip(starts, requests, strict=True) for row in _rows(start, one)})
        embeddings = self._model.embed(self._model.token_tensor(tokens.tolist()))
        if len(beginnings) > 1:
            outputs = Prefix.outputs_together(beginnings, firsts, embeddings, rows)
        elif beginnings:
            outputs = beginnings[0].outputs(firsts[0], embeddings, rows)
        else:
            outputs = self._model.outputs(embeddings, rows)
        losses = []
        for logits, start, request in zip(outputs.logits, starts, requests, strict=True):
            first = rows.index(start)
            answer = torch.as_tensor(request.answer, device=logits.device)
            losses.append(torch.nn.functional.cross_entropy(logits[first : first + len(answer)].float(), answer))
        return torch.stack(losses)

    def _n_tokens(self, index: int) -> int:
        return len(self._encoded[index].prompt) + len(self._encoded[index].answer) - 1

    def _n_run(self, index: int) -> int:
        """Tokens that no kept keys and values stand for."""
        return self._n_tokens(index) - self._begins[index]

    def _prefix(self, index: int) -> Prefix:
        """The keys and values before the question; as many prompts as `KEPT_BYTES` hold keep theirs."""
        if index in self._prefixes:
            return self._prefixes[index]
        tokens = self._encoded[index].prompt[: self._begins[index]]
        prefix = Prefix(self._model, self._model.embed(self._model.token_tensor([tokens.tolist()])))
        if sum(earlier.n_bytes for earlier in self._prefixes.values()) + prefix.n_bytes <= KEPT_BYTES:
            self._prefixes[index] = prefix
        return prefix


def _rows(start: int, request: EncodedRequest) -> range:
    """The tokens whose next one is an answer's."""
    return range(start, start + len(request.answer))


def step_on_text(
    model: HuggingFaceModel, windows: Int64[np.ndarray, "window token"], values: Numbers, weight: float
) -> float:
    """KL(unchanged || changed) of the next token, per token; its gradient, times the weight, is added."""
    embeddings, positions = model.embed(model.token_tensor(windows.tolist())), list(range(windows.shape[1]))
    with torch.no_grad():
        unchanged = model.outputs(embeddings, positions).logits.flatten(0, 1).float().log_softmax(-1)
    with values.applied(model, [0]):  # layers may be computed again in the backward pass
        changed = model.outputs(embeddings, positions).logits.flatten(0, 1).float().log_softmax(-1)
        divergence = torch.nn.functional.kl_div(changed, unchanged, reduction="batchmean", log_target=True)
        (weight * divergence).backward()  # type: ignore[no-untyped-call]
    return float(divergence.detach())


@dataclass(frozen=True, eq=False)
class Loss:
    """What a fit makes small: the losses of right answers, and what the numbers change on ordinary text."""

    model: HuggingFaceModel
    values: Numbers
    answers: Answers
    begins: Sequence[int]
    """The first token that the numbers act on, of every prompt."""
    options: FitOptions
    """All of them set, as `GradientFit.settled` returns them."""

    def of_answers(self, indices: Sequence[int]) -> Losses:
        """Losses of prompts; if gradients are wanted, those of their mean are added, group by group."""
        losses, order = [], []
        for group in self.answers.together(indices, self.options.together or len(indices)):
            beginnings = self.answers.beginnings(group)
            with self.values.applied(self.model, [self.begins[index] for index in group]):
                of_group = self.answers.losses(group, beginnings)
                if torch.is_grad_enabled():
                    (of_group.sum() / len(indices)).backward()  # type: ignore[no-untyped-call]
            losses.append(of_group.detach())
            order += group
        by_prompt = dict(zip(order, torch.cat(losses).tolist(), strict=True))
        return np.array([by_prompt[index] for index in indices])

    def on_text(self, windows: Windows) -> float:
        """Mean divergence on windows; its gradient, times the penalty, is added, group by group of one length."""
        by_length: dict[int, list[np.ndarray]] = {}
        for window in windows:
            by_length.setdefault(len(window), []).append(window)
        most, total = self.options.together or len(windows), 0.0
        for alike in by_length.values():
            for first in range(0, len(alike), most):
                group = np.stack(alike[first : first + most])
                share = len(group) / len(windows)
                total += share * step_on_text(self.model, group, self.values, self.options.penalty * share)
        return total


@dataclass
class Descent:
    """The losses of a fit, as it goes."""

    losses: Float64[np.ndarray, "steps two"]
    """Before every step, of its answers and of its windows of text."""
    done: int = 0
    """Steps that are done."""
    held_out: list[float] = field(default_factory=list)
    """Losses of the prompts that no step sees, at every look at them."""
    held_out_by_place: list[list[float]] = field(default_factory=list)
    """The same by the answer's place."""
    present: Float64[np.ndarray, "place"] = field(default_factory=lambda: np.zeros(1))
    """The present loss of the prompts of each place; NaN before the first."""
    best: Tensor | None = None
    """The numbers at the lowest of the losses of held-out prompts."""

    @property
    def stopped(self) -> bool:
        """True if the last looks brought no improvement."""
        return len(self.held_out) - 1 - int(np.argmin([*self.held_out, np.inf])) >= PATIENCE

    def look(self, losses: Losses, places: Places, free: Tensor) -> None:
        """Note the losses of the prompts that no step sees, and the numbers if their mean is the lowest."""
        if losses.mean() < min(self.held_out, default=np.inf):
            self.best = free.detach().clone()
        self.held_out.append(float(losses.mean()))
        self.held_out_by_place.append([float(losses[places == place].mean()) for place in np.unique(places)])

    def seen(self, losses: Losses, places: Places) -> None:
        """Note the losses of the prompts of a step."""
        for place in np.unique(places):
            loss, before = losses[places == place].mean(), self.present[place]
            self.present[place] = loss if np.isnan(before) else MEMORY * before + (1 - MEMORY) * loss

    def drawn(self, places: Places, count: int, generator: np.random.Generator) -> Int64[np.ndarray, "count"]:
        """Prompts at the given places, of which one is drawn in proportion to its place's loss over its prompts."""
        present = np.where(np.isnan(self.present), np.nanmax(self.present, initial=1e-9), self.present)
        weights = (present / np.bincount(places, minlength=len(present)).clip(1))[places]
        return generator.choice(len(places), count, p=weights / weights.sum()).astype(np.int64)


def descend(
    loss: Loss,
    texts: Sequence[Windows],
    checkpoint: Checkpoint | None = None,
    *,
    held_out: Sequence[int] = (),
    places: Sequence[int] = (),
) -> Descent:
    """Change the numbers in place, step by step; the losses of every step that was made.

    Args:
        texts: Windows of each kind of text, of which every step reads equally many.
        checkpoint: Where the fit is kept as it goes, and taken up.
        held_out: Prompts that no step sees: the numbers under which they are answered best are taken, and the fit ends
            when these answers get no better.
        places: Number of the place of every prompt's answer, from 0; empty: all at one.

    Raises:
        RunError: the loss is not a finite number.
    """
    options, free, count = loss.options, loss.values.free, len(loss.begins)
    steps, batch, rate = options.steps, options.batch, options.rate
    assert steps is not None and batch is not None and rate is not None, "settled"  # noqa: PT018
    generator = np.random.default_rng(options.seed)
    stepped, unseen = np.setdiff1d(np.arange(count), held_out), np.array(held_out, dtype=np.int64)
    where = np.array(places, dtype=np.int64) if len(places) else np.zeros(count, dtype=np.int64)
    order = stepped[_rounds(len(stepped), steps * batch, generator)].reshape(steps, batch)
    windows = _windows(texts, steps, -(-batch // PROMPTS_PER_WINDOW), generator)
    optimiser = torch.optim.Adam([free], lr=rate)
    descent = Descent(np.zeros((steps, 2)), present=np.full(where.max() + 1, np.nan))
    if checkpoint is not None:
        _take_up(checkpoint, free, optimiser, descent)
    for step in track(range(descent.done, steps), "steps of the fit"):
        if descent.stopped:
            break
        optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimiser.zero_grad()
        chosen = order[step]
        if options.draws == BY_LOSS:
            chosen = stepped[descent.drawn(where[stepped], batch, np.random.default_rng([options.seed, step]))]
        losses = loss.of_answers(chosen.tolist())
        descent.losses[step, 0] = losses.mean()
        descent.seen(losses, where[chosen])
        if options.penalty > 0:
            descent.losses[step, 1] = loss.on_text(windows[step])
        if not np.isfinite(descent.losses[step]).all():
            raise RunError(f"fit: the loss of step {step} is not a finite number; try a smaller rate than {rate:g}")
        optimiser.step()
        descent.done = step + 1
        if len(held_out) and (descent.done % STEPS_BETWEEN_CHECKS == 0 or descent.done == steps):
            with torch.no_grad():
                descent.look(loss.of_answers(held_out), where[unseen], free)
        if checkpoint is not None and descent.done % STEPS_AT_ONCE == 0:
            checkpoint.store.keep(checkpoint.piece, _state(free, optimiser, descent))
    if descent.best is not None:
        with torch.no_grad():
            free.copy_(descent.best)
    descent.losses = descent.losses[: descent.done]
    return descent


def _state(free: Tensor, optimiser: torch.optim.Optimizer, descent: Descent) -> dict[str, np.ndarray]:
    """All that a fit goes on from, as a piece to keep."""
    tensors = {**optimiser.state[free], "free": free} | ({} if descent.best is None else {"best": descent.best})
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    return {
        **arrays,
        "done": np.array([descent.done]),
        "losses": descent.losses,
        "held_out": np.array(descent.held_out, dtype=np.float64),
        "held_out_by_place": np.array(descent.held_out_by_place, dtype=np.float64),
        "present": descent.present,
    }


def _take_up(checkpoint: Checkpoint, free: Tensor, optimiser: torch.optim.Optimizer, descent: Descent) -> None:
    """Numbers, moments and losses become those that were kept, in place."""
    state = checkpoint.store.find(checkpoint.piece)
    if state is None:
        return
    descent.done = int(state.pop("done")[0])
    descent.losses[:] = state.pop("losses")
    descent.held_out, descent.held_out_by_place = (
        state.pop(name).tolist() for name in ("held_out", "held_out_by_place")
    )
    descent.present = state.pop("present")
    tensors = {name: torch.from_numpy(array).to(free.device) for name, array in state.items()}
    with torch.no_grad():
        free.copy_(tensors.pop("free"))
    descent.best = tensors.pop("best", None)
    optimiser.state[free] = {**tensors, "step": tensors["step"].cpu()}  # where Adam has it


def _windows(texts: Sequence[Windows], steps: int, count: int, generator: np.random.Generator) -> list[Windows]:
    """Windows of every step, so many of each kind of text."""
    drawn = [_rounds(len(kind), steps * count, generator).reshape(steps, count) for kind in texts]
    return [
        [kind[index] for kind, indices in zip(texts, drawn, strict=True) for index in indices[step]]
        for step in range(steps)
    ]


def _rounds(n_items: int, count: int, generator: np.random.Generator) -> Int64[np.ndarray, "count"]:
    """So many items: every item once in random order, then all of them again."""
    rounds = [generator.permutation(n_items) for _ in range(-(-count // n_items))]
    return np.concatenate(rounds)[:count].astype(np.int64)
