"""`load_prompts`: equally long prompts from the default corpus, a file, or token ids that are ready.

Windows are drawn one after another, so the first 8 of 16 are the 8. Groups, segments and documents take turns; while
any document has room, windows do not overlap; after that, other starts follow.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.progress import track
from posbias.prompts.prompts import (
    Prompts,
    PromptSource,
    TokenModel,
    as_token_ids,
    check_request,
    check_vocabulary,
    shuffled,
    synthetic_prompts,
)
from posbias.prompts.sources import Group, default_corpus, record_file, text_file
from posbias.prompts.tokens import opening, tokenised

Item = TypeVar("Item")
Window = Int64[np.ndarray, "length"]

LEFT = {
    "chat:": 'put what apply_chat_template returns into records, {"token_ids": [...]}',
    "hf:": "load_dataset(NAME, split='train[:2000]').to_json('texts.jsonl') writes a file that is read",
}
"""Sources that posbias had, and what to do instead."""
OPEN_SEGMENTS = 32
"""Segments of one group that take turns at a time."""


@checked
def load_prompts(source: Any, model: Any, *, n_positions: int, count: int, seed: int = 0) -> Prompts:
    """Load equally long prompts for a model.

    From text, prompts are random windows inside documents: distinct even if case and white space are ignored,
    non-overlapping while there is room, spread evenly over files and documents, and independent of the count (the first
    8 of 16 are those of a count of 8). Documents shorter than a window are skipped. If the tokenizer puts special
    tokens before a text by default (BOS), they open every prompt and count as positions (`Prompts.prefix` records
    them); none are added inside. Records of token ids get none.

    Args:
        source: "default" (the corpus in the package; some of its files as "default#austen,jargon_file"); the path of a
            .txt file (UTF-8; a line that holds only a form feed separates documents), or of a .jsonl file (field
            `text`, else `token_ids`; another one as "FILE#FIELD"); "synthetic", uniform random tokens; token ids of
            shape [at least count, n_positions]; or `Prompts`. Of the last two the first `count` are taken. Any of these
            inside a `PromptSource`, for shuffled tokens.
        model: A loaded model, a hub id, a path, "demo" or a model of transformers; it gives `tokenizer`,
            `vocabulary_size` and `max_positions`. Of one that is named, weights are read for "synthetic" alone.
        n_positions: Tokens in each prompt, 2 ... model.max_positions.
        count: How many prompts, >= 1.
        seed: Chooses the windows, >= 0.

    Returns:
        Exactly `count` prompts of exactly `n_positions` token ids, all within the vocabulary.

    Raises:
        UsageError: an argument out of range, a source that cannot be read or is too short, token ids the model lacks.
    """
    request = source if isinstance(source, PromptSource) else PromptSource(source)
    if not isinstance(model, TokenModel):
        opening_models = import_module("posbias.models.loading")  # above this room, which knows no networks
        weights = isinstance(request.source, str | os.PathLike) and os.fspath(request.source) == "synthetic"
        model = opening_models.as_token_model(model, weights=weights)
    check_request(model, n_positions=n_positions, count=count, seed=seed)
    prompts = _unshuffled(request.source, model, n_positions=n_positions, count=count, seed=seed)
    return shuffled(prompts, seed) if request.shuffle else prompts


def _unshuffled(source: Any, model: TokenModel, *, n_positions: int, count: int, seed: int) -> Prompts:
    if isinstance(source, Prompts) or not isinstance(source, str | os.PathLike):
        return _given(source, model, n_positions=n_positions, count=count)
    text = os.fspath(source)
    if text == "synthetic":
        return synthetic_prompts(model, n_positions=n_positions, count=count, seed=seed)
    name, groups = _groups(text, n_positions)
    prefix: tuple[int, ...] = ()
    if any(isinstance(document, str) for group in groups for segment in group.segments for document in segment):
        if model.tokenizer is None:
            why = getattr(model, "no_tokenizer", "the model has no tokenizer")
            raise UsageError(f"{name}: {why}, so prompts must be token ids, not text")
        prefix = opening(model.tokenizer)
        check_vocabulary(np.asarray(prefix, dtype=np.int64), model, "tokenizer")
    if n_positions <= len(prefix):
        raise UsageError(
            f"n_positions must exceed the {len(prefix)} special tokens that open a text, got {n_positions}"
        )
    drawer = WindowDrawer(groups, model, n_positions - len(prefix), seed)
    windows = list(track(islice(drawer.draw(), count), "Prompts", total=count))
    if drawer.longest == 0:
        raise UsageError(f"{name} holds no text")
    if not windows:
        longest = drawer.longest + len(prefix)
        raise UsageError(f"{name}: no document gives {n_positions} tokens; the longest available gives {longest}")
    if len(windows) < count:
        raise UsageError(
            f"{name} gives only {len(windows)} distinct prompts of {n_positions} tokens, {count} were asked for"
        )
    opened = np.tile(np.array(prefix, dtype=np.int64), (count, 1))
    return Prompts(np.hstack((opened, np.stack(windows))), source=name, seed=seed, prefix=prefix)


def _given(source: Any, model: TokenModel, *, n_positions: int, count: int) -> Prompts:
    """The first `count` of prompts that are token ids already."""
    if isinstance(source, Sequence) and any(isinstance(entry, str) for entry in source):
        raise UsageError(
            "prompts must be token ids or a source of text, got a list of texts; give the path of a .jsonl file, "
            'with {"text": ...} on each line'
        )
    given = source if isinstance(source, Prompts) else Prompts(as_token_ids(source, "token ids"))
    if given.n_positions != n_positions:
        fault = "fewer" if given.n_positions < n_positions else "more"
        raise UsageError(f"the given prompts have {given.n_positions} tokens, {fault} than the {n_positions} asked for")
    if given.count < count:
        raise UsageError(f"{count} prompts were asked for, but only {given.count} were given")
    check_vocabulary(given.token_ids[:count], model, "token ids")
    return replace(given, token_ids=given.token_ids[:count])


def _groups(text: str, n_positions: int) -> tuple[str, list[Group]]:
    for scheme, remedy in LEFT.items():
        if text.startswith(scheme):
            raise UsageError(f"prompts {text!r}: {scheme} left posbias after 0.1.0: {remedy}")
    if text.partition("#")[0] == "default":
        return text, default_corpus(text.partition("#")[2])
    path, field = Path(text), None
    if not path.exists() and "#" in text:
        before, _, after = text.rpartition("#")
        path, field = Path(before), after or None
    suffix = path.suffix.lower()
    if suffix == ".txt" and field is None:
        return path.name, [text_file(path, n_positions)]
    if suffix == ".jsonl":
        return text.rpartition(os.sep)[2], [record_file(path, n_positions, field)]
    raise UsageError(f"prompts {text!r}: need 'default', 'synthetic', a .txt file, a .jsonl file[#field], or token ids")


_Long = tuple[Int64[np.ndarray, "_"], int]
"""A document at least one window long, and the begin of the first of its non-overlapping windows."""


@dataclass
class WindowDrawer:
    """Draws windows of checked token ids from groups of documents, no two of them alike.

    Windows are alike if their texts without case and white space are equal, or, without a text, their token ids.
    """

    groups: list[Group]
    model: TokenModel
    length: int
    """Tokens per window, >= 1."""
    seed: int
    longest: int = 0
    """Tokens of the longest document seen so far; all have been seen when the drawing ends."""
    _long: dict[int, list[_Long]] = field(default_factory=dict)

    def draw(self) -> Iterator[Window]:
        """Windows until every distinct one has been drawn."""
        order = np.random.default_rng([self.seed, 0]).permutation(len(self.groups)).tolist()
        tokenizer, digests = self.model.tokenizer, set()
        for window in chain(take_turns(map(self._disjoint, order)), take_turns(map(self._others, order))):
            text = "" if tokenizer is None else tokenizer.decode(window.tolist(), clean_up_tokenization_spaces=False)
            key = "".join(text.split()).casefold().encode() or bytes(window)
            digest = hashlib.blake2b(key, digest_size=16).digest()
            if digest not in digests:
                digests.add(digest)
                yield window

    def _disjoint(self, group: int) -> Iterator[Window]:
        """Non-overlapping windows of one group, its segments in random order."""
        order = np.random.default_rng([self.seed, 1, group]).permutation(len(self.groups[group].segments)).tolist()
        return take_turns((self._segment(group, segment) for segment in order), OPEN_SEGMENTS)

    def _segment(self, group: int, segment: int) -> Iterator[Window]:
        """Non-overlapping windows of one segment, tokenised when the first is asked for."""
        generator, documents = np.random.default_rng([self.seed, 2, group, segment]), []
        for document in self.groups[group].segments[segment]:
            ready = tokenised(document, self.model.tokenizer).token_ids if isinstance(document, str) else document
            documents.append(np.asarray(ready, dtype=np.int64))
            check_vocabulary(documents[-1], self.model, self.groups[group].name)
        self.longest = max([self.longest, *map(len, documents)])
        long = [
            (token_ids, int(generator.integers(len(token_ids) % self.length + 1)))
            for token_ids in documents
            if len(token_ids) >= self.length
        ]
        self._long.setdefault(group, []).extend(long)
        order = generator.permutation(len(long)).tolist()
        blocks = {k: generator.permutation(len(long[k][0]) // self.length) for k in order}
        yield from take_turns(self._cut(long[k][0], long[k][1] + self.length * blocks[k]) for k in order)

    def _others(self, group: int) -> Iterator[Window]:
        """The windows `_disjoint` left out, in random order within each document."""

        def windows(number: int, token_ids: Int64[np.ndarray, "_"], begin: int) -> Iterator[Window]:
            generator = np.random.default_rng([self.seed, 3, group, number])
            every = generator.permutation(len(token_ids) - self.length + 1)
            steps, offsets = np.divmod(every - begin, self.length)
            used = (offsets == 0) & (steps >= 0) & (steps < len(token_ids) // self.length)
            return self._cut(token_ids, every[~used])

        return take_turns(windows(number, *long) for number, long in enumerate(self._long.get(group, [])))

    def _cut(self, token_ids: Int64[np.ndarray, "_"], starts: Int64[np.ndarray, "_"]) -> Iterator[Window]:
        return (token_ids[start : start + self.length] for start in starts.tolist())


def take_turns(sources: Iterable[Iterator[Item]], limit: int | None = None) -> Iterator[Item]:
    """One item from each source in turn until all are exhausted; at most `limit` of them are open at a time."""
    waiting, active = iter(sources), deque[Iterator[Item]]()
    while True:
        source = next(waiting, None) if limit is None or len(active) < limit else None
        if source is None:
            if not active:
                return
            source = active.popleft()
        for item in source:
            yield item
            active.append(source)
            break
