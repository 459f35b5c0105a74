"""Token sequences through a local model: several together, whatever their lengths, each from where it is new.

Sequences of a pass are padded on the left, and begin where an earlier pass left the keys and values of a beginning that
they share (`pass_plan.py` says which). Decoding is greedy, of all prompts together; rows of prompts that have ended
leave the batch. A model whose logits are others with padding or with a cache, tried on first use, runs prompts of one
length together, or each alone and whole.
"""

import weakref
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
from posbias.evaluation.responders.pass_plan import PassLimits, TokenIds
from posbias.evaluation.responders.thoughts import MARKED, UNFINISHED, Told, told_apart
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.model import Model
from posbias.models.rotary import AngleLengths
from posbias.tasks.language.calls import call_text, calls_in

SHORT_PROBE = 32
"""Tokens on which a cache is tried if no layer has a window; two windows and a half otherwise."""
COMPARED = 16
"""Last tokens whose logits are compared at most: a vocabulary is large."""
FIXED, FIXED_ACCELERATED = 32, 2048
"""Tokens that take as long as a pass does at least: on a processor, reading the weights; on an accelerator, launching
the kernels of some thirty layers (benchmarks/README.md)."""
TOGETHER, TOGETHER_ACCELERATED, TOGETHER_EAGER = 512, 1 << 15, 1 << 13
"""Most tokens of a pass with several sequences: there a device is full, and memory is what more of them cost; on an
accelerator fewer if attention is formed as matrices."""
OPENING = 64
"""Last tokens of a prompt among which an answer is opened."""
SPARE_ROWS = 0.75
"""Share of a batch's rows that have not ended below which the others are dropped: that copies all keys and values."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Keys and values of the first positions of one sequence, as views of those of its pass."""

    layers: list[tuple[Tensor, Tensor]]
    """One entry per layer, each [1, head, position, feature]."""
    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def first(self, length: int) -> "Kept":
        """The first positions alone."""
        return Kept([(keys[:, :, :length], values[:, :, :length]) for keys, values in self.layers], length)


class Runner:
    """Runs token sequences.

    Args:
        model: A Hugging Face model where `cached`.
        cached: Whether sequences can go on from keys and values that were kept; otherwise every one is run alone from
            its first token, the only way if no cache can be trusted.
        padded: Whether sequences of several lengths can be run together.
    """

    def __init__(self, model: Model, *, cached: bool, padded: bool = False) -> None:
        self.model = model
        self.cached, self.padded = cached, padded
        self.lengths = AngleLengths.of(model.network)
        self.position_bytes = 0.0
        """Bytes of one position's keys and values in all layers, as tried."""
        self.reading: tuple[int, ...] = ()
        """Numbers of the requests in the rows that the network now reads; empty: of none."""
        self.tokens_of_slots = (1, 1)
        """Tokens among the slots that the network now reads, and these slots, which are more by the padding."""

    def limits(self, rows: int) -> PassLimits:
        """Limits that decide how sequences are run together, at most so many."""
        fixed, tokens = FIXED, TOGETHER
        if self.model.device.type != "cpu":
            implementation = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
            fixed, tokens = FIXED_ACCELERATED, TOGETHER_EAGER if implementation == "eager" else TOGETHER_ACCELERATED
        return PassLimits(
            fixed=fixed,
            tokens=tokens,
            rows=rows if self.cached else 1,
            pads=self.padded,
            shares=self.cached,
        )

    def whole(self, token_ids: TokenIds, *, rows: int) -> Float[Tensor, "rows vocabulary"]:
        """Next-token logits of the last `rows` positions (>= 1) of a sequence alone, in order.

        Raises:
            RunError: the network fails, or its logits are not finite.
        """
        logits: Tensor = self._outputs(token_ids[None], rows, None, [0])[0]
        return logits

    def read(
        self, sequences: Sequence[TokenIds], origins: Sequence[Kept | None], *, columns: int, rows: int, keep: bool
    ) -> tuple[Float[Tensor, "batch rows vocabulary"], list[Kept]]:
        """The logits of the last `rows` positions of sequences, of which the last `columns` tokens are run.

        Those before them are in `origins`. Also returned, if wanted, are the keys and values of every sequence.
        """
        longest = max(columns, *map(len, sequences))
        padding, past = [longest - len(sequence) for sequence in sequences], longest - columns
        tokens = np.stack(
            [np.concatenate([np.repeat(row[:1], columns - len(row[-columns:])), row[-columns:]]) for row in sequences]
        )
        cache = self._begun(origins, padding, past) if past or keep else None
        logits = self._outputs(tokens, rows, cache, padding)
        if not keep:
            return logits, []
        return logits, kept_of(cache, padding)

    def joined(self, batch: Sequence[Kept], *, room: int) -> tuple[Any, list[int]]:
        """One cache of several sequences that has room for more positions, and the padding before each.

        Layer by layer what they held is given up.
        """
        from posbias.evaluation.responders.growing_cache import growing_cache

        longest = max(kept.length for kept in batch)
        padding, layers = [longest - kept.length for kept in batch], []
        while batch[0].layers:
            rooms = []
            for parts in zip(*(kept.layers.pop(0) for kept in batch), strict=True):
                _, heads, _, features = parts[0].shape
                rooms.append(parts[0].new_zeros(len(batch), heads, longest + room, features))
                for row, (begin, part) in enumerate(zip(padding, parts, strict=True)):
                    rooms[-1][row, :, begin:longest] = part[0]
            layers.append((rooms[0], rooms[1]))
        return growing_cache(layers, longest), padding

    def step(self, token_ids: Sequence[int], cache: Any, padding: Sequence[int], *, wanted: int) -> list[int]:
        """The most probable token after one more of every row of a cache, of which so many rows are wanted."""
        tokens = np.array(token_ids, dtype=np.int64)[:, None]
        best = self._logits(tokens, 1, cache, padding, idle=len(token_ids) - wanted)[:, 0].max(dim=-1)
        # Both in one transfer: an accelerator waits for each.
        choices, finite = torch.stack([best.indices, best.values.isfinite().long()]).tolist()
        self._check(all(finite), 1)
        return list(choices)

    def _begun(self, origins: Sequence[Kept | None], padding: Sequence[int], past: int) -> Any:
        """A cache of the first slots of sequences, from what was kept."""
        from transformers import DynamicCache

        if not past:
            return DynamicCache()
        pieces = [
            None if origin is None else origin.first(max(0, past - begin))
            for origin, begin in zip(origins, padding, strict=True)
        ]
        layers: list[list[Tensor]] = []
        for layer in range(max(len(piece.layers) for piece in pieces if piece is not None)):
            layers.append([])
            for part in (0, 1):
                parts = [None if piece is None else piece.layers[layer][part][0] for piece in pieces]
                like = next(part for part in parts if part is not None)
                if len(parts) == 1:
                    layers[-1].append(like[None])
                    continue
                joined = like.new_zeros(len(parts), like.shape[0], past, like.shape[2])
                for row, tensor in enumerate(parts):
                    if tensor is not None:
                        joined[row, :, past - tensor.shape[1] :] = tensor
                layers[-1].append(joined)
        return DynamicCache([(keys, values) for keys, values in layers])

    def _outputs(
        self, token_ids: Int64[np.ndarray, "batch new"], rows: int, cache: Any, padding: Sequence[int]
    ) -> Tensor:
        """Logits of the last tokens of several rows, which are finite."""
        logits = self._logits(token_ids, rows, cache, padding)
        self._check(bool(logits.amax(dim=-1).isfinite().all()), token_ids.shape[1])
        return logits

    def _check(self, finite: bool, new: int) -> None:
        if not finite:
            raise RunError(f"the model's logits are not finite numbers after {new} tokens; try dtype float32")

    def _logits(
        self, token_ids: Int64[np.ndarray, "batch new"], rows: int, cache: Any, padding: Sequence[int], *, idle: int = 0
    ) -> Tensor:
        """Logits of the last tokens of several rows, of which so many are idle."""
        batch, new = token_ids.shape
        past = 0 if cache is None else int(cache.get_seq_length())
        read = batch * new - sum(max(0, slots - past) for slots in padding) - idle
        tokens, positions = self.model.token_tensor(token_ids.tolist()), list(range(new - rows, new))
        self.tokens_of_slots = read, batch * new
        try:
            with torch.no_grad():
                if isinstance(self.model, HuggingFaceModel):
                    slots = torch.tensor(padding, device=tokens.device) if any(padding) else None
                    return self.model.logits(tokens, positions, cache=cache, padding=slots)
                return self.model.outputs(self.model.embed(tokens), positions).logits
        finally:
            self.tokens_of_slots = 1, 1


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


def kept_of(cache: Any, padding: Sequence[int]) -> list[Kept]:
    """Keys and values that a cache holds of every row, behind its padding."""
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return [
        Kept(
            [(keys[row : row + 1, :, begin:], values[row : row + 1, :, begin:]) for keys, values in layers],
            cache.get_seq_length() - begin,
        )
        for row, begin in enumerate(padding)
    ]


_PROVED: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[bool, bool, float]]] = (
    weakref.WeakKeyDictionary()
)
"""Of networks that nothing had changed, by what a trial depends on: whether caches and padding proved right, and the
bytes of a position."""


def trusted_runner(model: Model, token_ids: TokenIds) -> Runner:
    """A runner that keeps and pads as far as the model proves right in that, tried once on a network as it was loaded.

    A trial takes as long as a few short prompts; a network with a hook or a method in it is tried each time.
    """
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    # Long enough that every sliding window has left positions behind, before the cut and after it.
    probe = token_ids[: max(SHORT_PROBE, 5 * window // 2) if isinstance(window, int) else SHORT_PROBE]
    if model.intervention is not None or not _as_loaded(model.network):
        return _tried_runner(model, probe)
    proved = _PROVED.setdefault(model.network, {})
    key = (len(probe), window, model.dtype, model.device, getattr(config, "_attn_implementation", None))
    if key not in proved:
        tried = _tried_runner(model, probe)
        proved[key] = tried.cached, tried.padded, tried.position_bytes
    cached, padded, position_bytes = proved[key]
    runner = Runner(model, cached=cached, padded=padded)
    runner.position_bytes = position_bytes
    return runner


def _as_loaded(network: nn.Module) -> bool:
    """Tell whether no module has a hook, those of `counting_tokens` apart, or a forward pass of its own."""
    for module in network.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(getattr(hook, "__module__", None) != __name__ for hook in hooks):
            return False
    return True


def _tried_runner(model: Model, probe: TokenIds) -> Runner:
    """A runner that keeps and pads as far as the model proves right in that on these tokens.

    The tokens are run, cut back to the half and continued with the second half
    reversed, one token at the last step; then both halves together as a batch, and each a token further. Each time the
    logits must be those of the sequence run alone. A model that looks ahead is run the plain way, too.
    """
    whole, length, half = Runner(model, cached=False), len(probe), len(probe) // 2
    if not isinstance(model, HuggingFaceModel) or length < 4:
        return whole
    turned = np.concatenate([probe[:half], probe[half:][::-1]])
    live = Runner(model, cached=True, padded=True)

    def continued(wholes: Sequence[TokenIds], begun: Sequence[Kept | None], columns: int, without: int) -> list[Kept]:
        """What is kept of sequences without so many last tokens, if their logits are those of each alone."""
        rows = min(columns, COMPARED, *(len(tokens) - without for tokens in wholes))
        logits, kept = live.read(
            [tokens[: len(tokens) - without] for tokens in wholes], begun, columns=columns, rows=rows, keep=True
        )
        for ours, tokens in zip(logits, wholes, strict=True):
            theirs = alone[tokens.tobytes()]
            theirs = theirs[: len(theirs) - without][-rows:]
            epsilon = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
            if not float((ours - theirs).abs().max()) <= epsilon**0.5 * float(theirs.abs().max()):
                raise RunError("the logits are others than those of the sequence alone")
        return kept

    try:
        if looks_ahead(model, model.embed(model.token_tensor([probe.tolist()]))):
            return whole
        second_half = probe[half - 1 :]
        alone = {
            tokens.tobytes(): whole.whole(tokens, rows=min(len(tokens), COMPARED + 1))
            for tokens in (probe, turned, second_half)
        }
        (first,) = continued([probe], [None], length, 0)
        live.position_bytes = first.n_bytes / length
        (second,) = continued([turned], [first.first(half)], length - 1 - half, 1)
        continued([turned], [second], 1, 0)
    except Exception:  # whatever an architecture without such a cache may raise; it is run whole then
        return whole
    try:
        kept = continued([turned, second_half], [first.first(half), None], length - half + 1, 1)
        continued([turned, second_half], kept, 1, 0)
    except Exception:
        live.padded = False
    return live


@dataclass(frozen=True)
class Started:
    """A prompt that has been run and is to be continued."""

    index: int
    request: Request
    prompt: TokenIds
    first: int
    """The first token of the answer."""
    kept: Kept | None = None
    """Keys and values of the prompt; None if it is continued without a cache."""
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
        text, request = self._text(generated, special=True), started.request
        told_text = self._by_template(text, started) or told_apart(
            text, opened=started.thinks, pattern=request.answer_pattern
        )
        answer = told_text.answer
        if answer == text:
            answer = self._text(generated)
        else:
            for token in self.tokenizer.all_special_tokens:
                answer = answer.replace(token, "")
        if calls_in(told_text.answer) and not calls_in(answer):
            answer = told_text.answer  # the marks of its calls are special tokens
        return replace(told_text, answer=answer).cut(request.stop)

    def _by_template(self, text: str, started: Started) -> Told | None:
        """An answer in a conversation as the tokenizer's own response template reads it; None without one.

        Source: transformers, `parse_response`.
        """
        request, template = started.request, getattr(self.tokenizer, "response_template", None)
        if template is None or isinstance(request.prompt, str) or request.answer_pattern is not None:
            return None
        try:
            opening = self._text(started.prompt[-OPENING:].tolist(), special=True)
            message = self.tokenizer.parse_response(text, prefix=opening)
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
            calls = [call_text(function["name"], function.get("arguments")) for function in functions]
        except (AttributeError, KeyError, TypeError, ValueError):  # not of that form, such as a call that was cut off
            return None
        answer = "\n".join(part for part in (message.get("content"), *calls) if part)
        thoughts = message.get("reasoning_content") or message.get("thinking")
        thinking = MARKED if answer.strip() else UNFINISHED
        return Told(answer, thoughts or None, thinking if thoughts else None)

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


def decode(runner: Runner, started: Sequence[Started], ending: Ending) -> list[list[int]]:
    """The continuations of prompts, from the keys and values that were kept of them and are given up."""
    continuations: list[list[int]] = [[] for _ in started]
    batches: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(started):
        length = len(prompt.prompt)
        angles = runner.lengths.angles(length)
        steady = angles == runner.lengths.angles(length + prompt.request.max_tokens)
        alike = angles if runner.padded and steady else (length,)
        batches.setdefault(alike if runner.cached else (place,), []).append(place)
    for places in batches.values():
        batch = [started[place] for place in places]
        generated = _decode_batch(runner, batch, ending) if runner.cached else _decode_whole(runner, batch, ending)
        for place, tokens in zip(places, generated, strict=True):
            continuations[place] = tokens
    return continuations


def _decode_whole(runner: Runner, started: Sequence[Started], ending: Ending) -> list[list[int]]:
    """The continuations of prompts, each run whole for every token."""
    generated = [[prompt.first] for prompt in started]
    for tokens, prompt in zip(generated, started, strict=True):
        runner.reading = (prompt.index,)
        while not ending.reached(tokens, prompt):
            tokens.append(int(runner.whole(np.array([*prompt.prompt, *tokens]), rows=1).argmax()))
    return generated


def _decode_batch(runner: Runner, started: Sequence[Started], ending: Ending) -> list[list[int]]:
    """The continuations of prompts that are decoded together: of one length where rotary angles may change."""
    generated = [[prompt.first] for prompt in started]
    kept = {place: prompt.kept for place, prompt in enumerate(started) if prompt.kept is not None}
    cache, rows, padding = None, list[int](), list[int]()

    def unfinished(places: Sequence[int]) -> list[int]:
        return [place for place in places if not ending.reached(generated[place], started[place])]

    active = unfinished(range(len(started)))
    while active:
        length = len(started[active[0]].prompt) + len(generated[active[0]])
        if runner.lengths.angles(length) != runner.lengths.angles(length - 1):
            rows, cache = active, None  # from here on, all positions are turned by other angles
            runner.reading = tuple(started[place].index for place in rows)
            wholes = [np.array([*started[place].prompt, *generated[place]]) for place in rows]
            logits, states = runner.read(wholes, [None] * len(rows), columns=length, rows=1, keep=True)
            kept, choices = dict(zip(rows, states, strict=True)), logits[:, 0].argmax(dim=-1).tolist()
        else:
            if cache is None:
                rows = active
                room = max(started[place].request.max_tokens - len(generated[place]) for place in rows)
                cache, padding = runner.joined([kept[place] for place in rows], room=room)
                kept = {}
            runner.reading = tuple(started[place].index for place in rows)
            last = [generated[place][-1] for place in rows]
            choices = runner.step(last, cache, padding, wanted=len(active))
        going = set(active)
        for place, choice in zip(rows, choices, strict=True):
            if place in going:
                generated[place].append(choice)
        active = unfinished(active)
        if cache is not None and active and len(active) < SPARE_ROWS * len(rows):
            places = [rows.index(place) for place in active]
            rows, begin = active, min(padding[row] for row in places)
            padding = [padding[row] - begin for row in places]
            for layer in cache.layers:
                layer.narrow(torch.tensor(places), begin)
    return generated
