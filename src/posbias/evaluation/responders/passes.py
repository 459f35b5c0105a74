"""Token sequences through a network: whole, from where they are new, or several together, padded on the left.

What goes together or goes on from a cache is held first against the sequence run alone (`Runner.trusted`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from posbias.errors import RunError
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.encoding import EncodedRequest, TokenIds
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.layout import AngleLengths

SHORT_PROBE = 32
"""Tokens on which a cache is tried if no layer has a window; two windows and a half otherwise."""
NOT_FINITE = "the model's logits are not finite numbers after {} tokens; try dtype float32"
COMPARED = 16
"""Last tokens whose logits are compared at most: a vocabulary is large."""
FIXED, FIXED_ACCELERATED = 32, 2048
"""Tokens that take as long as a pass does at least: on a processor, reading the weights; on an accelerator, launching
the kernels of some thirty layers (benchmarks/README.md)."""
FULL, FULL_ACCELERATED = 512, 1 << 13
"""Most tokens of a pass with several sequences: there a device is full, and memory is what more of them cost."""
Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of a sequence's first positions, one entry per layer, each [1, head, position, feature]."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Tokens that a model is to read for a request: its prompt, with its answer if that is scored."""

    index: int
    request: Request
    encoded: EncodedRequest
    scored: bool
    alike: int
    """First tokens that read the same in every sequence that begins with them."""
    angles: tuple[int, ...] = ()
    """Name of the rotary angles in all its passes, from the prompt's to the longest; empty: they change on the way."""

    @cached_property
    def token_ids(self) -> TokenIds:
        """All tokens that are read: the last one of an answer predicts nothing."""
        return np.concatenate([self.encoded.prompt, self.encoded.answer[: -1 if self.scored else 0]])

    @cached_property
    def order(self) -> tuple[tuple[int, ...], bytes]:
        """What sorts readings lexicographically, so that each stands behind the one that it shares most with."""
        return self.angles, self.token_ids.astype(">i8").tobytes()

    @property
    def rows(self) -> int:
        """The last tokens, >= 1, whose logits are wanted."""
        return len(self.token_ids) - len(self.encoded.prompt) + 1

    @property
    def room(self) -> int:
        """Positions that it takes at most."""
        return len(self.encoded.prompt) + max(self.request.max_tokens, len(self.encoded.answer))

    def shared(self, other: "Reading") -> int:
        """First tokens whose keys and values another one can go on from."""
        shorter = min(self.alike, other.alike, len(self.token_ids), len(other.token_ids) - other.rows)
        different = np.flatnonzero(self.token_ids[:shorter] != other.token_ids[:shorter])
        return int(different[0]) if len(different) else shorter


def passes_of(readings: Sequence[Reading], *, together: bool, accelerated: bool) -> Iterator[tuple[list[Reading], int]]:
    """Readings, by `Reading.order`, of each pass, and how many tokens a lone one goes on from of the pass before.

    Going on from the one before it pays only beyond the tokens that a pass of its own costs
    whatever it runs; nor may padding cost more than that.
    """
    fixed, most = (FIXED_ACCELERATED, FULL_ACCELERATED) if accelerated else (FIXED, FULL)
    chains: list[list[tuple[Reading, int]]] = []
    for place, reading in enumerate(readings):
        shared = readings[place - 1].shared(reading) if place else 0
        if shared > fixed:
            chains[-1].append((reading, shared))
        else:
            chains.append([(reading, 0)])
    for chain in chains:
        if len(chain) > 1:
            yield from (([reading], shared) for reading, shared in chain)
    group: list[Reading] = []
    lone = [chain[0][0] for chain in chains if len(chain) == 1]
    for reading in sorted(lone, key=lambda reading: -len(reading.token_ids)):
        longest = len(group[0].token_ids) if group else 0
        full = not together or (len(group) + 1) * longest > most
        if group and (full or longest - len(reading.token_ids) > fixed):
            yield group, 0
            group = []
        group.append(reading)
    if group:
        yield group, 0


@dataclass(frozen=True)
class Trust:
    """What proved right of a network: nothing but whole sequences alone, if neither."""

    cached: bool = False
    """Sequences may go on from keys and values that were kept."""
    together: bool = False
    """Sequences of any lengths may go together."""
    position_bytes: float = 0.0
    """Bytes of one position's keys and values in all layers."""


class Runner:
    """Runs token sequences through a model, and counts their tokens."""

    def __init__(self, model: HuggingFaceModel) -> None:
        self.model = model
        self.processed = 0
        """Tokens run through the network so far, padding left out."""
        self.reading: tuple[int, ...] = ()
        """Numbers of the requests in the rows that the network now reads; empty: of none."""

    def read(
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
        logits = self._logits(padded, rows, cache, padding, sum(map(len, sequences)) - begin)
        if not logits.amax(dim=-1).isfinite().all():
            raise RunError(NOT_FINITE.format(longest - begin))
        return logits, [cut(cache, row, begins) for row, begins in enumerate(padding)] if keep else []

    def step(
        self, token_ids: Sequence[int], cache: DynamicCache, padding: Sequence[int], *, wanted: int
    ) -> Float[Tensor, "row vocabulary"]:
        """Logits after one more token of every row of a cache, of which so many count."""
        return self._logits([np.array([token]) for token in token_ids], 1, cache, padding, wanted)[:, 0]

    def _logits(
        self, padded: Sequence[TokenIds], rows: int, cache: Any, padding: Sequence[int], read: int
    ) -> Float[Tensor, "row rows vocabulary"]:
        tokens, new = self.model.token_tensor([row.tolist() for row in padded]), len(padded[0])
        slots = torch.tensor(padding, device=tokens.device) if any(padding) else None
        self.processed += read
        return self.model.logits(tokens, list(range(new - rows, new)), cache=cache, padding=slots)

    def trusted(self, token_ids: TokenIds) -> Trust:
        """What gives the logits of each sequence run alone; the trial takes as long as a few short prompts.

        The tokens are run, cut back to the half and continued with the second half reversed, one token at the last
        step; then both as a batch with the second half alone, and each a token further.
        """
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        # Long enough that every sliding window has left positions behind, before the cut and after it.
        probe = token_ids[: max(SHORT_PROBE, 5 * window // 2) if isinstance(window, int) else SHORT_PROBE]
        angles = AngleLengths.of(self.model.network)
        turns = [*angles.switches, *([] if angles.moving_from is None else [angles.moving_from])]
        probe = probe[: min(turns, default=len(probe))]  # beyond, a pass of another length is another one
        length, half = len(probe), len(probe) // 2
        turned, tail = np.concatenate([probe[:half], probe[half:][::-1]]), probe[half - 1 :]
        near = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5

        def compare(logits: Tensor, sequence: TokenIds) -> None:
            alone = self.read([sequence], rows=len(logits))[0][0]
            if not float((logits - alone).abs().max()) <= near * float(alone.abs().max()):
                raise RunError("the logits are others than those of the sequence alone")

        def continued(sequences: Sequence[TokenIds], past: Kept | None) -> list[Kept]:
            rows = min(COMPARED, min(map(len, sequences)) - 1 - (0 if past is None else half))
            logits, kept = self.read([sequence[:-1] for sequence in sequences], past, rows=max(rows, 1), keep=True)
            cache, padding = joined([list(each) for each in kept], room=1)
            last = self.step([int(row[-1]) for row in sequences], cache, padding, wanted=len(sequences))
            for sequence, before, behind in zip(sequences, logits, last, strict=True):
                compare(before, sequence[:-1])
                compare(behind[None], sequence)
            return kept

        try:
            if length < 4 or looks_ahead(self.model, self.model.embed(self.model.token_tensor([probe.tolist()]))):
                return Trust()
            (kept,) = continued([probe], None)
            position_bytes = sum(part.nbytes for layer in kept for part in layer) / (length - 1)
            continued([turned], first(kept, half))
        except Exception:  # whatever an architecture without such a cache may raise; it is run whole then
            return Trust()
        try:
            continued([turned, tail], None)
        except Exception:
            return Trust(cached=True, position_bytes=position_bytes)
        return Trust(cached=True, together=True, position_bytes=position_bytes)


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
