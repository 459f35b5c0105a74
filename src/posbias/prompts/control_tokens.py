"""Control tokens that a text spells out, such as "<|im_end|>" in a passage: they stay the ordinary text they are there.

A tokenizer takes the spelling of a control token for the token, wherever it stands, so that a passage could end a turn
or a text. Here only what the tokenizer or a chat template writes itself is one. What a text spells is tokenised by
itself, by the tokenizer's normaliser, pre-tokeniser and model alone; all other text is tokenised as ever.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from posbias.errors import UsageError

Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""

USUAL = re.compile(
    r"<\|[\w./ -]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|mask)>|<(?:start|end)_of_(?:turn|image|audio)>|\[/?INST\]"
    r"|<</?SYS>>|<｜[\w▁ ]{1,40}｜>|\[(?:CLS|SEP|PAD|MASK|UNK)\]"
)
"""The usual spellings of control tokens, for a model on a server, whose tokenizer is not known."""
LEAD = "\n"
"""Put before a piece of a text while it is tokenised: some tokenizers put a space before the first word."""
PRIVATE = range(0xE000, 0xF900)
"""Characters that mean nothing to anyone: two of them mark in a message what it spells, until it is rendered."""

_KNOWN: "WeakKeyDictionary[Any, tuple[tuple[int, str], re.Pattern[str]]]" = WeakKeyDictionary()
"""Patterns by tokenizer, with the data that each was made from: making one takes milliseconds, every prompt asks."""


class Tokenised(NamedTuple):
    """A text in tokens."""

    token_ids: list[int]
    offsets: list[Span]
    """Begin and end of every token in the text; empty for a tokenizer that does not say."""


def control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """A pattern that finds the control tokens a text spells; without a tokenizer those in usual spellings.

    They are the tokenizer's special tokens, and the added ones that its chat template spells; blanks and words are not.
    """
    if tokenizer is None:
        return USUAL
    template = str(getattr(tokenizer, "chat_template", None) or "")
    made_from = len(tokenizer) if hasattr(tokenizer, "__len__") else 0, template
    entry = _KNOWN.get(tokenizer) if isinstance(tokenizer, Hashable) else None
    if entry is not None and entry[0] == made_from:
        return entry[1]
    pattern = re.compile("|".join(_spellings(tokenizer, template)) or r"(?!)")
    if isinstance(tokenizer, Hashable):
        _KNOWN[tokenizer] = made_from, pattern
    return pattern


def special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """A pattern that finds special tokens alone, without the added ones that a template may look for in messages."""
    return re.compile("|".join(_spellings(tokenizer, "")) or r"(?!)")


def _spellings(tokenizer: Any, template: str) -> list[str]:
    """Spellings of control tokens as patterns, longer ones first."""
    special = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        written = token.content in template and not token.content.isspace() and not token.content.isalnum()
        if token.special or written:
            special.add(token.content)
    return [re.escape(spelling) for spelling in sorted(special - {""}, key=len, reverse=True)]


def spelled_in(text: str, tokenizer: Any) -> tuple[Span, ...]:
    """Spans in which a text spells control tokens."""
    return tuple(match.span() for match in control_pattern(tokenizer).finditer(text))


def tokenised(text: str, tokenizer: Any, ordinary: Sequence[Span] = (), *, offsets: bool = False) -> Tokenised:
    """Tokenise a text, without special tokens around it; control tokens spelled in `ordinary` spans are ordinary text.

    Only a tokenizer that knows `offsets` may be asked for them.
    """
    token_ids: list[int] = []
    places: list[Span] = []
    borders = [0, *(border for span in ordinary for border in span), len(text)]
    for number, (begin, end) in enumerate(pairwise(borders)):
        if begin == end and len(borders) > 2:
            continue
        read = _ordinary if number % 2 else _read
        piece = read(text[begin:end], tokenizer, behind=begin > 0, offsets=offsets)
        token_ids += piece.token_ids
        places += [(first + begin, last + begin) for first, last in piece.offsets]
    return Tokenised(token_ids, places)


def _read(piece: str, tokenizer: Any, *, behind: bool, offsets: bool) -> Tokenised:
    """A piece of a text as the tokenizer reads it `behind` other text."""

    def read(text: str) -> Tokenised:
        options = {"return_offsets_mapping": True} if offsets else {}
        encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
        return Tokenised(
            list(encoded["input_ids"]), [tuple(place) for place in encoded["offset_mapping"]] if options else []
        )

    if not behind:
        return read(piece)
    lead, whole = read(LEAD), read(LEAD + piece)
    count = len(lead.token_ids)
    if whole.token_ids[:count] != lead.token_ids:
        return read(piece)  # the lead joins what follows, as a line break does another
    return Tokenised(
        whole.token_ids[count:],
        [(max(0, first - len(LEAD)), last - len(LEAD)) for first, last in whole.offsets[count:]],
    )


def _ordinary(piece: str, tokenizer: Any, *, behind: bool, offsets: bool) -> Tokenised:
    """Tokenise the spelling of a control token as text; each of its tokens is placed over all of it."""
    if getattr(tokenizer, "is_fast", False):
        backend = tokenizer.backend_tokenizer

        def read(text: str) -> list[int]:
            normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
            parts = (
                [(normal, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(normal)
            )
            return [token.id for part, _ in parts for token in backend.model.tokenize(part)]
    else:

        def read(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def read_behind(text: str) -> list[int]:
        lead, whole = read(LEAD), read(LEAD + text)
        return whole[len(lead) :] if whole[: len(lead)] == lead else read(text)

    token_ids = read_behind(piece) if behind else read(piece)
    if tokenizer.convert_tokens_to_ids(piece) in token_ids:  # its model has the token as a word, as unigram ones do
        token_ids = [token for letter in piece for token in read_behind(letter)]
    return Tokenised(token_ids, [(0, len(piece))] * len(token_ids) if offsets else [])


class Marks:
    """Marks what messages spell, so that in a rendered conversation it is told from what the template wrote."""

    def __init__(self, messages: Sequence[Any], pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        texts = list(_texts(messages))
        self.needed = any(map(self._pattern.search, texts))
        """Set if any message spells a control token."""
        free = (chr(code) for code in PRIVATE if not any(chr(code) in text for text in texts))
        self._open, self._close = next(free, ""), next(free, "")
        if self.needed and not self._close:
            raise UsageError("a conversation that spells control tokens holds every private-use character as well")

    def marked(self, value: Any) -> Any:
        """Mark messages, or any part of one."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{self._open}{match[0]}{self._close}", value)
        if isinstance(value, dict):
            return {name: self.marked(part) for name, part in value.items()}
        return [self.marked(part) for part in value] if isinstance(value, list | tuple) else value

    def unmarked(self, text: str) -> tuple[str, tuple[Span, ...]]:
        """Take the marks off a rendered text, and return the spans of the control tokens that messages spelled."""

        def bare(text: str) -> str:  # a template may have taken a marked token apart
            return text.replace(self._open, "").replace(self._close, "")

        spans, plain, end = [], "", 0
        for match in re.finditer(f"{self._open}({self._pattern.pattern}){self._close}", text):
            plain += bare(text[end : match.start()])
            spans.append((len(plain), len(plain) + len(match[1])))
            plain, end = plain + match[1], match.end()
        return plain + bare(text[end:]), tuple(spans)


def _texts(value: Any) -> Iterable[str]:
    """Every text among messages and their parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
