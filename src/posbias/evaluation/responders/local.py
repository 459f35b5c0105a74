"""`LocalResponder`: a model in this process, which reads and answers as many prompts together as its memory takes.

A prompt goes on from what it shares with the one before it in lexicographic order; those that share next to nothing go
together with others of about their length, so that nearly nothing is read for padding. Then all of them are decoded as
one batch, whatever the lengths (parts timed: benchmarks/README.md). Where a trial on the first prompt finds other
logits with padding, prompts go one at a time; where it finds others with a cache, they are read whole.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from posbias.checks import Natural, checked, checked_value
from posbias.errors import RunError, UsageError
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders.base import SKIPPED, AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.encoding import (
    CANNOT_READ,
    WITHIN_THOUGHTS,
    EncodedRequest,
    Ending,
    TokenIds,
    encode_requests,
)
from posbias.models.devices import free_bytes
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.layout import AngleLengths
from posbias.models.loading import as_model
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import check_vocabulary

MOST_ROWS, CACHE_BYTES = 256, 1 << 30
"""Most prompts at a time, and bytes of their keys and values on a processor, which so many prompts keep busy."""
SPARE_ROWS = 0.75
"""Share of a batch's rows that have not ended below which the others are dropped: that copies all keys and values."""
FIXED, FIXED_ACCELERATED = 32, 2048
"""Tokens that take as long as a pass does at least: on a processor, reading the weights; on an accelerator, launching
the kernels of some thirty layers (benchmarks/README.md)."""
FULL, FULL_ACCELERATED = 512, 1 << 13
"""Most tokens of a pass with several sequences: there a device is full, and memory is what more of them cost."""
PROBE, COMPARED = 32, 16
"""Tokens on which cache and padding are tried if no layer has a window, and the last of them whose logits are held
against each other: a vocabulary is large."""
NOT_FINITE = "the model's logits are not finite numbers after {} tokens; try dtype float32"
Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of a sequence's first positions, one entry per layer, each [1, head, position, feature]."""


@dataclass(eq=False)
class Reading:
    """A request on its way: its prompt is read, with its answer if that is scored, and continued."""

    index: int
    encoded: EncodedRequest
    alike: int
    """First tokens that read the same in every sequence that begins with them."""
    scored: bool = False
    angles: tuple[int, ...] = ()
    """Name of the rotary angles in all its passes, from the prompt's to the longest; empty: they change on the way."""
    score: AnswerScore | None = None
    response: Response | None = None
    generated: list[int] = field(default_factory=list)
    kept: Kept = field(default_factory=list)
    """What is kept of the prompt from its reading until it is continued."""

    @cached_property
    def token_ids(self) -> TokenIds:
        """All tokens that are read: the last one of an answer predicts nothing."""
        return np.concatenate([self.encoded.prompt, self.encoded.answer[: -1 if self.scored else 0]])

    @property
    def rows(self) -> int:
        """The last tokens, >= 1, whose logits are wanted."""
        return len(self.token_ids) - len(self.encoded.prompt) + 1

    @property
    def room(self) -> int:
        """Positions that it takes at most."""
        return len(self.encoded.prompt) + max(self.encoded.request.max_tokens, len(self.encoded.answer))

    def shared(self, other: "Reading") -> int:
        """First tokens whose keys and values another one can go on from."""
        shorter = min(self.alike, other.alike, len(self.token_ids), len(other.token_ids) - other.rows)
        different = np.flatnonzero(self.token_ids[:shorter] != other.token_ids[:shorter])
        return int(different[0]) if len(different) else shorter


def passes_of(readings: Sequence[Reading], *, fixed: int, most: int) -> Iterator[tuple[list[Reading], int]]:
    """Readings, given in lexicographic order, of each pass, and the tokens that it goes on from of the pass before.

    Args:
        readings: In the order of their tokens.
        fixed: Tokens that a pass costs whatever it runs: what is shared must save more, and padding not cost more.
        most: Tokens of a pass with several readings, padding included; 0: each has a pass of its own.
    """
    shared = [0, *(one.shared(other) for one, other in pairwise(readings)), 0]
    lone: list[Reading] = []
    for place, reading in enumerate(readings):
        if max(shared[place : place + 2]) > fixed:
            yield [reading], shared[place] if shared[place] > fixed else 0
        else:
            lone.append(reading)
    group: list[Reading] = []
    for reading in sorted(lone, key=lambda reading: -len(reading.token_ids)):
        longest = len(group[0].token_ids) if group else 0
        if group and ((len(group) + 1) * longest > most or longest - len(reading.token_ids) > fixed):
            yield group, 0
            group = []
        group.append(reading)
    if group:
        yield group, 0


@checked
class LocalResponder(Responder):
    """A loaded model with a tokenizer, and with a chat template if requests are conversations."""

    renders = True

    def __init__(self, model: Model | str | Path | nn.Module, options: LocalOptions | None = None) -> None:
        model = as_model(model)
        if model.tokenizer is None or not isinstance(model, HuggingFaceModel):
            raise UsageError(f"{model.no_tokenizer}, {CANNOT_READ}")
        self.model, self.tokenizer, self.max_positions = model, model.tokenizer, model.max_positions
        self.options = options or LocalOptions()
        self.reading: tuple[int, ...] = ()
        """Numbers of the requests in the rows that the network now reads; empty: of none."""
        self._at_once: int | None = None
        """Most prompts at a time; 1: padding would change logits, 0: a cache would, too; None: neither was tried."""
        self._position_bytes = 0.0
        """Bytes of one position's keys and values in all layers."""
        self._apart = 0
        self._unscored = False
        """True once an answer was to be scored although the prompt ends within thoughts."""
        ends: list[Any] = []
        for settings in (getattr(model.network, "generation_config", None), model.tokenizer):
            named = getattr(settings, "eos_token_id", None)  # one, several or none
            ends += [] if named is None else named if isinstance(named, list | tuple) else [named]
        for token in ends:
            checked_value("eos_token_id of the model", token, Natural)
        self._ending = Ending(model.tokenizer, frozenset(ends))
        self._lengths = AngleLengths.of(model.config)

    def __repr__(self) -> str:
        return f"LocalResponder({self.model!r})"

    def respond(
        self,
        requests: Sequence[Request],
        *,
        generate: bool = True,
        score: bool = False,
        alike: Sequence[int] | None = None,
    ) -> list[Reply]:
        """Answer requests (`Responder.respond`); one that does not fit into the context is skipped, never truncated.

        `alike`: number of first tokens of each prompt that the network reads as in any other prompt that begins with
        them; None: all.
        """
        readings = []
        for index, tokens in enumerate(encode_requests(self.tokenizer, requests)):
            check_vocabulary(tokens.prompt, self.model, f"prompt {index}")
            check_vocabulary(tokens.answer, self.model, f"answer {index}")
            length = len(tokens.prompt)
            reading = Reading(index, tokens, length if alike is None else alike[index])
            if score and len(tokens.answer):
                reading.scored, self._unscored = not tokens.thinks, self._unscored or tokens.thinks
            following = max(requests[index].max_tokens * generate, len(tokens.answer))
            if self.max_positions is not None and length + following > self.max_positions:
                reason = f"{length} tokens and {following} of the answer; the model takes {self.max_positions}"
                reading.response = Response("", SKIPPED, prompt_tokens=length, tokens=0, skipped=reason)
            angles = self._lengths.angles(length)
            reading.angles = angles if angles == self._lengths.angles(reading.room) else ()
            readings.append(reading)
        asked = [each for each in readings if each.response is None and (generate or each.scored)]
        self._apart += sum(each.scored and each.encoded.apart for each in asked)
        try:
            for portion in track(list(self._portions(asked)), "answers"):
                self._answer(portion, generate=generate)
        finally:
            self.reading = ()
        return [Reply(each.response, each.score) for each in readings]

    def _portions(self, readings: Sequence[Reading]) -> Iterator[list[Reading]]:
        """Readings in lexicographic order, at a time as many as memory has room for their keys and values."""
        if not readings:
            return
        self.tried(max((reading.encoded.prompt for reading in readings), key=len))
        free = None if self.model.device.type == "cpu" else free_bytes(self.model.device)
        slots = (CACHE_BYTES if free is None else free // 2) / max(1.0, self._position_bytes)  # a state has none
        portion: list[Reading] = []
        for reading in sorted(readings, key=lambda each: (each.angles, each.token_ids.astype(">i8").tobytes())):
            largest = max(each.room for each in (*portion, reading))
            full = len(portion) >= (self.options.batch or MOST_ROWS) or (len(portion) + 1) * largest > slots
            if portion and (full or reading.angles != portion[0].angles):
                yield portion
                portion = []
            portion.append(reading)
        yield portion

    def _answer(self, portion: Sequence[Reading], *, generate: bool) -> None:
        """Read and continue requests at once; what memory does not hold, or padding makes overflow, is halved.

        Raises:
            RunError: a prompt alone does not fit, or gives no finite logits.
        """
        try:
            at_once = self.tried(portion[0].encoded.prompt) if portion[0].angles else 0
            self._begin(portion, at_once, generate=generate)
            for batch in [portion] if at_once > 1 else [[each] for each in portion]:
                if generate:
                    self._continue(batch, whole=at_once == 0)
            return
        except RunError:
            if len(portion) == 1:
                raise
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if len(portion) == 1:
                raise RunError(
                    "the memory of the device does not hold one prompt; try fewer tokens, --dtype bfloat16, or another "
                    "--device"
                ) from None
        for each in portion:
            each.kept = []
        middle = len(portion) // 2
        self._answer(portion[:middle], generate=generate)
        self._answer(portion[middle:], generate=generate)

    def _begin(self, portion: Sequence[Reading], at_once: int, *, generate: bool) -> None:
        """Score requests, and find the first token of their answers; what a pass keeps serves the next ones."""
        fixed, most = (FIXED, FULL) if self.model.device.type == "cpu" else (FIXED_ACCELERATED, FULL_ACCELERATED)
        states: list[Kept] = []
        for group, shared in passes_of(portion, fixed=fixed if at_once else sys.maxsize, most=most * (at_once > 1)):
            self.reading = tuple(reading.index for reading in group)
            logits, states = self._read(
                [reading.token_ids for reading in group],
                first(states[0], shared) if shared else None,
                rows=max(reading.rows for reading in group),
                keep=at_once > 0,
            )
            for row, reading in enumerate(group):
                wanted = logits[row, -reading.rows :]
                if reading.scored:
                    reading.score = score_answer(wanted, reading.encoded.answer)
                reading.generated = [int(wanted[0].argmax())]
                if states and generate:
                    reading.kept = first(states[row], len(reading.encoded.prompt))

    def _continue(self, batch: Sequence[Reading], *, whole: bool) -> None:
        """Continue requests together, greedily, from what was kept of them and is given up; `whole`: read anew."""
        asked, cache, padding = batch, None, list[int]()
        while True:
            active = [row for row, each in enumerate(batch) if not self._ending.reached(each.generated, each.encoded)]
            if not active:
                break
            if not whole and (cache is None or len(active) < SPARE_ROWS * len(batch)):
                parts = [batch[row].kept if cache is None else cut(cache, row, padding[row]) for row in active]
                batch, active = [batch[row] for row in active], list(range(len(active)))
                cache, padding = joined(
                    parts, room=max(each.encoded.request.max_tokens - len(each.generated) for each in batch)
                )
            self.reading = tuple(each.index for each in batch)
            new = [
                np.array([*each.encoded.prompt, *each.generated] if whole else each.generated[-1:]) for each in batch
            ]
            best = self._logits(new, cache, padding)[:, -1].max(dim=-1)
            # Both in one transfer: an accelerator waits for each.
            choices, finite = torch.stack([best.indices, best.values.isfinite().long()]).tolist()
            if not all(finite):
                raise RunError(NOT_FINITE.format(len(new[0])))
            for row in active:
                batch[row].generated.append(choices[row])
        for each in asked:
            each.response = self._ending.response(each.generated, each.encoded)
            each.kept = []  # of one that ended at once

    def tried(self, prompt: TokenIds) -> int:
        """How many prompts may go together; tried on the first prompt, in the time of a few short ones.

        Its first tokens are read, cut back to the half and continued with the second half reversed; then that goes
        together with the second half alone. Each time, one token more is a step of its own.
        """
        if self._at_once is not None:
            return self._at_once
        window = getattr(self.model.config, "sliding_window", None)
        # Long enough that every sliding window has left positions behind, before the cut and after it.
        probe = prompt[: max(PROBE, 5 * window // 2) if isinstance(window, int) else PROBE]
        moving = self._lengths.moving_from
        turns = [*self._lengths.switches, *([] if moving is None else [moving])]
        probe = probe[: min(turns, default=len(probe))]  # beyond, a pass of another length is another one
        half = len(probe) // 2
        turned = np.concatenate([probe[:half], probe[half:][::-1]])
        self._at_once = 0
        with suppress(Exception):  # whatever an architecture without such a cache may raise; it is run whole then
            if len(probe) < 4 or looks_ahead(self.model, self.model.embed(self.model.token_tensor([probe.tolist()]))):
                return 0
            _, (kept,) = self._read([probe], keep=True)
            self._position_bytes = sum(part.nbytes for layer in kept for part in layer) / len(probe)
            self._compare([turned], first(kept, half))
            self._at_once = 1
            self._compare([turned, probe[half - 1 :]])
            self._at_once = MOST_ROWS
        return self._at_once

    def _compare(self, sequences: Sequence[TokenIds], past: Kept | None = None) -> None:
        """Hold the last logits of sequences that are read together, and a step further, against each one's alone.

        Raises:
            RunError: they are others.
        """
        near = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        new = min(map(len, sequences)) - 1 - (past[0][0].shape[-2] if past else 0)
        before, kept = self._read([row[:-1] for row in sequences], past, rows=min(COMPARED, new), keep=True)
        behind = self._logits([row[-1:] for row in sequences], *joined(kept, room=1))
        for sequence, *found in zip(sequences, before, behind, strict=True):
            [alone], _ = self._read([sequence], rows=len(found[0]) + 1)
            if not float((torch.cat(found) - alone).abs().max()) <= near * float(alone.abs().max()):
                raise RunError("the logits are others than those of the sequence alone")

    def _read(
        self, sequences: Sequence[TokenIds], past: Kept | None = None, *, rows: int = 1, keep: bool = False
    ) -> tuple[Float[Tensor, "sequence rows vocabulary"], list[Kept]]:
        """Logits of the last `rows` positions of sequences and, if wanted, what is kept of each.

        With `past`, the first positions of a single sequence, what is behind them is run alone.

        Raises:
            RunError: logits are not finite.
        """
        longest, begin = max(map(len, sequences)), 0 if past is None else past[0][0].shape[-2]
        padding = [longest - len(sequence) for sequence in sequences]
        padded = [np.concatenate([np.repeat(row[:1], longest - len(row)), row[begin:]]) for row in sequences]
        cache = DynamicCache(past or ()) if past or keep else None
        logits = self._logits(padded, cache, padding, rows=rows)
        if not logits.amax(dim=-1).isfinite().all():
            raise RunError(NOT_FINITE.format(longest - begin))
        return logits, [cut(cache, row, begins) for row, begins in enumerate(padding)] if keep else []

    def _logits(
        self, new: Sequence[TokenIds], cache: Any, padding: Sequence[int], *, rows: int = 1
    ) -> Float[Tensor, "row rows vocabulary"]:
        """Logits of the last of as many new tokens in every row, of which the first ones, cached ones too, are none."""
        tokens, length = self.model.token_tensor([row.tolist() for row in new]), len(new[0])
        slots = torch.tensor(padding, device=tokens.device) if any(padding) else None
        return self.model.logits(tokens, list(range(length - rows, length)), cache=cache, padding=slots)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        described = {"kind": "local", "model": self.model.describe(), "batch": self.options.batch}
        return {**described, **self.learnt(), **self.counts()}

    def learnt(self) -> dict[str, Any]:
        """What goes together, "all lengths" or "nothing" (None: not tried), and why answers were not scored."""
        together = None if self._at_once is None else "all lengths" if self._at_once > 1 else "nothing"
        return {"together": together, **({"no_scores_because": WITHIN_THOUGHTS} if self._unscored else {})}

    def counts(self) -> dict[str, float]:
        """Answers that were scored as separate tokens although they would merge with the prompt's last ones."""
        return {"answers_apart": self._apart}


def as_responder(subject: Any) -> Responder:
    """The responder that puts requests to a subject.

    Args:
        subject: A responder, which is taken as it is; a loaded model; or what `load_model` takes: a hub id, a
            directory, a file.gguf, "demo", or a model of transformers.

    Raises:
        UsageError: a model that cannot be loaded, or one without a tokenizer, such as a model of transformers alone:
            `load_model(network, tokenizer)` gives it one.
    """
    return subject if isinstance(subject, Responder) else LocalResponder(as_model(subject))


def score_answer(logits: Float[Tensor, "token vocabulary"], answer: Int64[np.ndarray, "token"]) -> AnswerScore:
    """Log-probability and rank of each answer token, from the logits of the position before it.

    log p(a_t) = logit(a_t) - log sum exp(logits), in float32 at least; rank = 1 + tokens with a larger logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    answer_logits = logits.gather(1, torch.as_tensor(answer, device=logits.device)[:, None])
    logprobs = (answer_logits[:, 0] - logits.logsumexp(dim=-1)).tolist()
    ranks = (1 + (logits > answer_logits).sum(dim=-1)).tolist()
    return AnswerScore(tuple(min(0.0, value) for value in logprobs), tuple(int(rank) for rank in ranks))


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, in tensors that have room for more positions.

    The library's own layer copies all that it holds at every step, on long prompts more than a step's matrix products
    take (benchmarks/README.md). This one is full whatever the configuration says: windows mask what they must not see.
    """

    def __init__(self, rooms: tuple[Tensor, Tensor], n_positions: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = rooms[0].dtype, rooms[0].device, True
        self._rooms = rooms
        self.keys, self.values = (room[..., :n_positions, :] for room in rooms)

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the room, >= as many positions."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values


def first(kept: Kept, end: int) -> Kept:
    """The first positions alone, as views."""
    return [(keys[..., :end, :], values[..., :end, :]) for keys, values in kept]


def cut(cache: DynamicCache, row: int, begin: int) -> Kept:
    """Keys and values that a cache holds of a row behind its padding, as views."""
    rows = slice(row, row + 1)
    return [(layer.keys[rows, :, begin:], layer.values[rows, :, begin:]) for layer in cache.layers]


def joined(batch: Sequence[Kept], *, room: int) -> tuple[DynamicCache, list[int]]:
    """One cache of several sequences with room for more positions, and the padding before each; they are given up."""
    lengths = [kept[0][0].shape[-2] for kept in batch]
    longest, cache = max(lengths), DynamicCache()
    padding = [longest - length for length in lengths]
    while batch[0]:
        rooms = []
        for parts in zip(*(kept.pop(0) for kept in batch), strict=True):
            _, heads, _, features = parts[0].shape
            rooms.append(parts[0].new_zeros(len(batch), heads, longest + room, features))
            for row, (begin, part) in enumerate(zip(padding, parts, strict=True)):
                rooms[-1][row, :, begin:longest] = part[0]
        cache.layers.append(GrowingLayer((rooms[0], rooms[1]), longest))
    return cache, padding
