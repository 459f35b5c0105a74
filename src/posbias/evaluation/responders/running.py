"""Token ids through a local model: with one live cache that is cut back and continued, or whole each time.

In lexicographic order of their tokens, prompts that share a beginning stand together, and what a prompt shares with
all earlier ones it shares with the one just before. So one cache, cut back and continued, runs each distinct beginning
exactly once: n - shared tokens per prompt, in sum the number of distinct prefixes, which no method that reuses
prefixes can go below. The cache keeps every position of every layer: layers with a sliding window mask what they must
not see, so that any of them can be cut back. Decoding is greedy; prompts of one length go on together, as one batch,
without padding, and a sequence that has ended leaves the batch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from posbias.errors import RunError
from posbias.evaluation.responders.base import CUT_OFF, STOPPED, Request, Response
from posbias.evaluation.responders.thoughts import Told, told_apart
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.model import Model
from posbias.models.rotary import AngleLengths

TokenIds = Int64[np.ndarray, "_"]
Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each [batch, head, position, feature]."""
SHORT_PROBE = 64
"""Tokens on which a cache is tried where no layer has a window; two windows and a half otherwise."""


def shared_length(first: TokenIds, second: TokenIds) -> int:
    """Number of tokens that two sequences share before they first differ."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def visiting_order(prompts: Sequence[TokenIds]) -> list[int]:
    """Indices in lexicographic order of the tokens; equal ones keep their order."""
    # Big-endian bytes of non-negative numbers compare as the numbers do.
    return sorted(range(len(prompts)), key=lambda index: prompts[index].astype(">i8").tobytes())


def count_tokens(prompts: Sequence[TokenIds]) -> tuple[int, int]:
    """Tokens of all prompts, each run whole; and with every distinct beginning run once.

    A prompt that repeats another, or is the beginning of one, still runs its last token, whose output is wanted.
    """
    floor, previous = 0, np.zeros(0, dtype=np.int64)
    for index in visiting_order(prompts):
        floor += len(prompts[index]) - min(shared_length(previous, prompts[index]), len(prompts[index]) - 1)
        previous = prompts[index]
    return sum(map(len, prompts)), floor


class Runner:
    """Runs token ids and counts how many.

    Args:
        model: A Hugging Face model where `cached`.
        cached: Whether one cache is cut back to what a sequence shares with the one before, and continued from there;
            otherwise every sequence is run from its first token, the only way where no cache can be trusted.
    """

    def __init__(self, model: Model, *, cached: bool) -> None:
        self.model = model
        self.cached = cached
        self.lengths = AngleLengths.of(model.network)
        self.processed = 0
        """Tokens run through the network so far."""
        self.forget()

    def forget(self) -> None:
        """Run the next sequence from its first token."""
        self._held: TokenIds = np.zeros(0, dtype=np.int64)
        self._layers: Layers = []

    def run(self, token_ids: TokenIds, *, rows: int) -> Float[Tensor, "rows vocabulary"]:
        """Next-token logits of the last `rows` positions (>= 1) of a sequence, in order.

        Raises:
            RunError: the network fails, or its logits are not finite.
        """
        start = min(shared_length(self._held, token_ids), len(token_ids) - rows)
        if self.lengths.angles(len(self._held)) != self.lengths.angles(len(token_ids)):
            start = 0  # what is held was turned by other angles
        cache = _cache_of(self.keep(start) if start else []) if self.cached else None
        self.forget()  # should the network fail, nothing is held
        logits = self._outputs(token_ids[None, start:], rows, cache)[0]
        if cache is not None:
            self._held, self._layers = token_ids.copy(), _layers_of(cache)
        return logits

    def keep(self, n_positions: int) -> Layers:
        """Keys and values of the first positions of the last sequence; none without a cache.

        Views, not copies: they stay as they are when the cache goes on.
        """
        return [(keys[:, :, :n_positions], values[:, :, :n_positions]) for keys, values in self._layers]

    def step(self, token_ids: Int64[np.ndarray, "batch new"], cache: Any) -> Float[Tensor, "batch vocabulary"]:
        """Logits after more tokens of several sequences, whose cache goes on by as many positions."""
        return self._outputs(token_ids, 1, cache)[:, 0]

    def _outputs(self, token_ids: Int64[np.ndarray, "batch new"], rows: int, cache: Any) -> Tensor:
        batch, new = token_ids.shape
        self.processed += batch * new
        tokens, positions = self.model.token_tensor(token_ids.tolist()), list(range(new - rows, new))
        with torch.no_grad():
            if isinstance(self.model, HuggingFaceModel):
                logits = self.model.logits(tokens, positions, cache=cache)
            else:
                logits = self.model.outputs(self.model.embed(tokens), positions).logits
        if not bool(logits.isfinite().any(dim=-1).all()) or bool(logits.isnan().any()):
            raise RunError(f"the model's logits are not finite numbers after {new} tokens; try dtype float32")
        return logits


@contextmanager
def counting_tokens(model: Model, count: Callable[[int], None]) -> Iterator[None]:
    """Within the context, `count` is told how many tokens enter a model's layers, at every pass of whomever.

    They are counted where the first layer begins: a method that runs every prompt several times at once, or the network
    beside itself, runs so many more. The network of a family that is not described is counted where it begins itself.
    """

    def entering(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        names = ("hidden_states", "inputs_embeds", "input_ids")
        stream = (
            arguments[0] if arguments else next((named[name] for name in names if named.get(name) is not None), None)
        )
        if isinstance(stream, Tensor):
            count(stream.shape[0] * stream.shape[1])

    described = isinstance(model, HuggingFaceModel) and model.described
    first = model.family.blocks(model.network)[0].module if described else model.network  # type: ignore[attr-defined]
    handle = first.register_forward_pre_hook(entering, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def size_of(layers: Layers) -> int:
    """Bytes of keys and values."""
    return sum(keys.nbytes + values.nbytes for keys, values in layers)


def _cache_of(layers: Layers) -> Any:
    """A cache as transformers takes it, of full layers whatever the configuration says; empty for no layers."""
    from transformers import DynamicCache

    return DynamicCache(layers) if layers else DynamicCache()


def _layers_of(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def trusted_runner(model: Model, token_ids: TokenIds) -> Runner:
    """A runner with a live cache if the model's cache proves right on these tokens, else without.

    The tokens (as many as the widest window needs) are run, cut back to the half and continued with the second half
    reversed, one token at the last step: each time the logits must be those of the whole sequence run alone. A model
    that looks ahead is run the plain way, too.
    """
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    # Long enough that every sliding window has left positions behind, before the cut and after it.
    probe = token_ids[: max(SHORT_PROBE, 5 * window // 2) if isinstance(window, int) else SHORT_PROBE]
    live, whole = Runner(model, cached=True), Runner(model, cached=False)
    if not isinstance(model, HuggingFaceModel) or len(probe) < 4:
        return whole
    half = len(probe) // 2
    turned = np.concatenate([probe[:half], probe[half:][::-1]])
    try:
        if looks_ahead(model, model.embed(model.token_tensor([probe.tolist()]))):
            return whole
        pairs = [
            (live.run(tokens, rows=rows), whole.run(tokens, rows=rows))
            for tokens, rows in ((probe, 1), (turned[:-1], half // 2), (turned, 1))
        ]
    except Exception:  # whatever an architecture without such a cache may raise; it is run whole then
        return Runner(model, cached=False)
    epsilon = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    agree = all(
        float((ours - theirs).abs().max()) <= epsilon**0.5 * float(theirs.abs().max()) for ours, theirs in pairs
    )
    return Runner(model, cached=agree and live.processed < whole.processed)


@dataclass(frozen=True)
class Started:
    """A prompt that has been run and is to be continued."""

    index: int
    request: Request
    prompt: TokenIds
    logits: Float[Tensor, "vocabulary"]
    """After the prompt's last token."""
    kept: Layers
    """Its keys and values; none where it is continued without a cache."""
    thinks: bool = False
    """True if the prompt ends within thoughts, as with chat templates of some models."""


@dataclass(frozen=True)
class Ending:
    """Rules for the end of a sequence and for the text that it holds."""

    tokenizer: Any
    end_tokens: Collection[int]

    def reached(self, generated: Sequence[int], started: Started) -> bool:
        """True after an end token, `max_tokens`, or a stop text behind thoughts and blank lines."""
        request = started.request
        if generated[-1] in self.end_tokens or len(generated) >= request.max_tokens:
            return True
        if not any(text in self._text(generated) for text in request.stop):
            return False
        return self.told(generated, started).stopped

    def _text(self, generated: Sequence[int], *, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=not special))

    def told(self, generated: Sequence[int], started: Started) -> Told:
        """The text with its thoughts told from its answer, which is without special tokens; some marks are such."""
        request = started.request
        told_text = told_apart(
            self._text(generated, special=True), opened=started.thinks, pattern=request.answer_pattern
        )
        answer = told_text.answer
        if told_text.thinking is None:
            answer = self._text(generated)
        else:
            for token in self.tokenizer.all_special_tokens:
                answer = answer.replace(token, "")
        return replace(told_text, answer=answer).cut(request.stop)

    def response(self, generated: Sequence[int], started: Started) -> Response:
        """The response of a finished sequence."""
        parsed = self.told(generated, started)
        stopped = parsed.stopped or generated[-1] in self.end_tokens
        return Response(
            text=parsed.answer,
            finish=STOPPED if stopped else CUT_OFF,
            prompt_tokens=len(started.prompt),
            tokens=len(generated),
            token_ids=tuple(generated),
            continues=isinstance(started.request.prompt, str),
            thoughts=parsed.thoughts,
            thinking=parsed.thinking,
        )


def decode(runner: Runner, batch: Sequence[Started], ending: Ending) -> list[list[int]]:
    """The continuations of prompts of one length, from the keys and values that were kept of them."""
    generated = [[int(started.logits.argmax())] for started in batch]

    def unfinished(indices: Sequence[int]) -> list[int]:
        return [index for index in indices if not ending.reached(generated[index], batch[index])]

    active, cache = unfinished(range(len(batch))), None
    if runner.cached:
        columns = zip(*(batch[index].kept for index in active), strict=True)
        cache = _cache_of(
            [(torch.cat([pair[0] for pair in layer]), torch.cat([pair[1] for pair in layer])) for layer in columns]
        )
    while active:
        whole = np.array([[*batch[index].prompt, *generated[index]] for index in active], dtype=np.int64)
        n_positions = whole.shape[1]
        if cache is None:
            choices = [int(runner.run(sequence, rows=1)[0].argmax()) for sequence in whole]
        elif runner.lengths.angles(n_positions) != runner.lengths.angles(n_positions - 1):
            cache = _cache_of([])  # from here on, all positions are turned by other angles
            choices = runner.step(whole, cache).argmax(dim=-1).tolist()
        else:
            choices = runner.step(whole[:, -1:], cache).argmax(dim=-1).tolist()
        for index, choice in zip(active, choices, strict=True):
            generated[index].append(choice)
        unended = unfinished(active)
        if cache is not None and unended and len(unended) < len(active):
            rows = [active.index(index) for index in unended]
            cache = _cache_of([(keys[rows], values[rows]) for keys, values in _layers_of(cache)])
        active = unended
    return generated
