"""`LocalResponder`: a model in this process, which reads and answers as many prompts together as its memory takes.

A prompt goes on from what it shares with the one before it in lexicographic order; those that share next to nothing go
together with others of about their length, so that nearly nothing is read for padding. Then all of them are decoded as
one batch, whatever the lengths (parts timed: benchmarks/README.md). Where a trial on the first prompt finds other
logits with padding, prompts go one at a time; where it finds others with a cache, they are read whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
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
from posbias.evaluation.responders.encoding import CANNOT_READ, WITHIN_THOUGHTS, EncodedRequest, Ending, encode_requests
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
Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of a sequence's first positions by layer, or of a layer by sequence; [1, head, position, feature]."""


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
    tokens: list[int] = field(default_factory=list)
    """Those of the prompt, and those generated so far."""
    kept: Kept = field(default_factory=list)
    """What is kept of the prompt from its reading until it is continued."""

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens that are read: the last one of an answer predicts nothing."""
        return [*self.encoded.prompt.tolist(), *self.encoded.answer[: -1 if self.scored else 0].tolist()]

    @property
    def generated(self) -> list[int]:
        """The tokens behind the prompt's."""
        return self.tokens[len(self.encoded.prompt) :]

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
        most = min(self.alike, other.alike, len(other.encoded.prompt) - 1)
        pairs = zip(self.token_ids[:most], other.token_ids, strict=False)
        return next((place for place, (own, others) in enumerate(pairs) if own != others), most)


def passes_of(readings: Sequence[Reading], *, fixed: float, most: int) -> Iterator[tuple[list[Reading], int]]:
    """Readings, given in lexicographic order, of each pass, and the tokens that it goes on from of the pass before.

    Args:
        readings: In the order of their tokens.
        fixed: Tokens that a pass costs whatever it runs: what is shared must save more, and padding not cost more.
        most: Tokens of a pass with several readings, padding included; 0: each has a pass of its own.
    """
    alike = [one.shared(other) for one, other in pairwise(readings)]
    shared = [0, *(length if length > fixed else 0 for length in alike), 0]
    lone: list[Reading] = []
    for reading, before, behind in zip(readings, shared, shared[1:], strict=False):
        if before or behind:
            yield [reading], before
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
        """Numbers of the requests in the rows that the network now reads; empty until it reads the first."""
        self._at_once: int | None = None
        """Most prompts at a time; 1: padding would change logits, 0: a cache would, too; None: neither was tried."""
        self._slots = inf
        """Positions whose keys and values in all layers memory has room for; a state needs none."""
        self._apart = 0
        self._unscored = False
        """True once an answer was to be scored although the prompt ends within thoughts."""
        ends: set[int] = set()
        for settings in (getattr(model.network, "generation_config", None), model.tokenizer):
            named = getattr(settings, "eos_token_id", None)
            named = checked_value("eos_token_id of the model", named, Natural | Sequence[Natural] | None)
            ends |= {named} if isinstance(named, int) else set(named or ())
        self._ending = Ending(model.tokenizer, ends)
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
        for portion in track(list(self._portions(asked)), "answers"):
            self._answer(portion, generate=generate)
        return [Reply(each.response, each.score) for each in readings]

    def _portions(self, readings: Sequence[Reading]) -> Iterator[list[Reading]]:
        """Readings in lexicographic order, at a time as many as memory has room for their keys and values."""
        if not readings:
            return
        self.tried(max((reading.encoded.prompt for reading in readings), key=len))
        portion: list[Reading] = []
        for reading in sorted(readings, key=lambda each: (each.angles, each.token_ids)):
            room = (len(portion) + 1) * max(each.room for each in (*portion, reading))
            full = len(portion) >= (self.options.batch or MOST_ROWS) or room > self._slots
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
        at_once = self.tried(portion[0].encoded.prompt) if portion[0].angles else 0
        try:
            self._begin(portion, at_once, generate=generate)
            for batch in [portion] if at_once > 1 else [[each] for each in portion]:
                if generate:
                    self._continue(batch, whole=at_once == 0)
            return
        except RuntimeError as error:
            full = should_reduce_batch_size(error)
            if full and len(portion) == 1:
                raise RunError(
                    "the memory of the device does not hold one prompt; try fewer tokens, --dtype bfloat16, or another "
                    "--device"
                ) from None
            if len(portion) == 1 or not (full or isinstance(error, RunError)):
                raise
        for each in portion:
            each.kept, each.response = [], None
        middle = len(portion) // 2
        self._answer(portion[:middle], generate=generate)
        self._answer(portion[middle:], generate=generate)

    def _begin(self, portion: Sequence[Reading], at_once: int, *, generate: bool) -> None:
        """Score requests, and find the first token of their answers; what a pass keeps serves the next ones."""
        fixed, most = (FIXED, FULL) if self.model.device.type == "cpu" else (FIXED_ACCELERATED, FULL_ACCELERATED)
        cache = DynamicCache()
        for group, shared in passes_of(portion, fixed=fixed if at_once else inf, most=most * (at_once > 1)):
            self.reading = tuple(reading.index for reading in group)
            cache = DynamicCache(cut(cache, 0, cache.get_seq_length(), shared) if shared else ())
            rows = max(reading.rows for reading in group)
            logits = self._read([reading.token_ids for reading in group], cache if at_once else None, rows=rows)
            for row, reading in enumerate(group):
                wanted, length = logits[row, -reading.rows :], len(reading.encoded.prompt)
                if reading.scored:
                    reading.score = score_answer(wanted, reading.encoded.answer)
                reading.tokens = [*reading.token_ids[:length], int(wanted[0].argmax())]
                if at_once and generate:
                    reading.kept = cut(cache, row, len(reading.token_ids), length)

    def _continue(self, batch: Sequence[Reading], *, whole: bool) -> None:
        """Continue requests together, greedily, from what was kept of them and is given up; `whole`: read anew."""
        rows, cache = batch, None
        while True:
            for each in rows:
                if each.response is None and self._ending.reached(each.generated, each.encoded):
                    each.response, each.kept = self._ending.response(each.generated, each.encoded), []
            active = [each for each in rows if each.response is None]
            if not active:
                return
            if not whole and (cache is None or len(active) < SPARE_ROWS * len(rows)):
                parts = [
                    each.kept if cache is None else cut(cache, row, len(each.tokens) - 1, len(each.tokens) - 1)
                    for row, each in enumerate(rows)
                    if each.response is None
                ]
                rows, cache = active, joined(parts, room=max(each.room - len(each.tokens) for each in active))
            self.reading = tuple(each.index for each in rows)
            choices = self._read([each.tokens for each in rows], cache)[:, -1].argmax(dim=-1).tolist()
            # One that has ended goes on unread until it is dropped: as long as before, rows of one length need no mask.
            for each, choice in zip(rows, choices, strict=True):
                each.tokens.append(choice)

    def tried(self, prompt: Int64[np.ndarray, "_"]) -> int:
        """How many prompts may go together; tried on the first prompt, in the time of a few short ones.

        Its first tokens are read, cut back to the half and continued with the second half reversed; then that goes
        together with the second half alone. Each time, one token more is a step of its own.
        """
        if self._at_once is not None:
            return self._at_once
        window, angles = getattr(self.model.config, "sliding_window", None), self._lengths.angles
        # Long enough that every sliding window has left positions behind, before the cut and after it.
        longest = min(len(prompt), max(PROBE, 5 * window // 2) if isinstance(window, int) else PROBE)
        # Beyond a length where angles turn otherwise, a pass of another length is another one.
        probe = prompt[: sum(angles(length) == angles(1) for length in range(1, longest + 1))].tolist()
        half, near = len(probe) // 2, max(torch.finfo(of).eps for of in (self.model.dtype, torch.float32)) ** 0.5
        turned = probe[:half] + probe[half:][::-1]
        self._at_once = 0
        with suppress(Exception):  # whatever an architecture without such a cache may raise; it is run whole then
            if len(probe) < 4 or looks_ahead(self.model, self.model.embed(self.model.token_tensor([probe]))):
                return 0
            cache = DynamicCache()
            self._read([probe], cache)
            kept = cut(cache, 0, len(probe), half)
            free = None if self.model.device.type == "cpu" else free_bytes(self.model.device)
            held = sum(part.nbytes for layer in kept for part in layer)
            self._slots = (CACHE_BYTES if free is None else free // 2) * half / held
            for at_once, sequences, cache in (
                (1, [turned], DynamicCache(kept)),
                (MOST_ROWS, [turned, probe[half - 1 :]], DynamicCache()),
            ):
                new = min(map(len, sequences)) - 1 - cache.get_seq_length()
                before = self._read([row[:-1] for row in sequences], cache, rows=min(COMPARED, new))
                together = torch.cat([before, self._read(sequences, cache)], dim=1)
                for sequence, found in zip(sequences, together, strict=True):
                    (alone,) = self._read([sequence], None, rows=len(found))
                    if not torch.allclose(found, alone, rtol=0, atol=near * float(alone.abs().max())):
                        return self._at_once
                self._at_once = at_once
        return self._at_once

    def _read(
        self, sequences: Sequence[list[int]], cache: DynamicCache | None, *, rows: int = 1
    ) -> Float[Tensor, "sequence rows vocabulary"]:
        """Logits of the last `rows` positions of sequences that end together; what the cache holds is not run again.

        Raises:
            RunError: logits are not finite.
        """
        longest, begin = max(map(len, sequences)), 0 if cache is None else cache.get_seq_length()
        padding = [longest - len(sequence) for sequence in sequences]
        tokens = self.model.token_tensor(
            [row[:1] * (pad - begin) + row[max(0, begin - pad) :] for row, pad in zip(sequences, padding, strict=True)]
        )
        wanted = list(range(longest - begin - rows, longest - begin))
        slots = torch.tensor(padding, device=tokens.device) if any(padding) else None
        logits = self.model.logits(tokens, wanted, cache=cache, padding=slots)
        if not logits.amax(dim=-1).isfinite().all():
            raise RunError(f"the model's logits are not finite numbers after {longest} tokens; try dtype float32")
        return logits

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
    """One layer's keys and values of several sequences that end together, in tensors with room for more positions.

    The library's own layer copies all that it holds at every step, on long prompts more than a step's matrix products
    take (benchmarks/README.md). This one is full whatever the configuration says: windows mask what they must not see.
    """

    def __init__(self, rows: Kept, longest: int, *, room: int) -> None:
        super().__init__()
        self._rooms = []
        for parts in zip(*rows, strict=True):
            _, heads, _, features = parts[0].shape
            self._rooms.append(parts[0].new_zeros(len(rows), heads, longest + room, features))
            for row, part in zip(self._rooms[-1], parts, strict=True):
                row[:, longest - part.shape[-2] : longest] = part[0]
        self.keys, self.values = (whole[..., :longest, :] for whole in self._rooms)
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the room, >= as many positions."""
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values


def cut(cache: DynamicCache, row: int, length: int, end: int) -> Kept:
    """Keys and values that a cache holds of the first `end` of a row's last `length` positions, as views."""
    begin = cache.get_seq_length() - length
    place = (slice(row, row + 1), slice(None), slice(begin, begin + end))
    return [(layer.keys[place], layer.values[place]) for layer in cache.layers]


def joined(batch: Sequence[Kept], *, room: int) -> DynamicCache:
    """One cache of several sequences, which are given up: layer by layer, so that memory holds them but once."""
    longest, cache = max(kept[0][0].shape[-2] for kept in batch), DynamicCache()
    while batch[0]:
        cache.layers.append(GrowingLayer([kept.pop(0) for kept in batch], longest, room=room))
    return cache
