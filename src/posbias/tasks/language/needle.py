"""Needle in text: a fact put between two clauses of running text, at depths counted in the model's own tokens.

Several needles of the same key may all be asked for, and distractors tell other keys' values; both keep their places
while one needle moves through the text.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_size, check_whole
from posbias.errors import UsageError
from posbias.limits import ITEMS, Limit
from posbias.prompts.sources import Group
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask
from posbias.tasks.language.encoding import encode
from posbias.tasks.language.haystack import Haystack, corpus_groups, drawn_haystack
from posbias.tasks.language.published import check_path
from posbias.tasks.language.words import CITIES

OPENING = "Read the text and answer the question that follows it.\n\n"
MERGES = 2
"""Tokens kept free for each needle and end of the text, where joining texts may split tokens anew."""

TOKENS = Limit("POSBIAS_MAX_PROMPT_TOKENS", 10_000_000, "tokens")
"""Of a prompt."""

ATTEMPTS = 20
"""Texts tried until one has a clause border of its own near each depth."""


@LANGUAGE_TASKS.register("needle")
@dataclass(frozen=True)
class Needle(LanguageTask):
    """Find the number of a city that one sentence of a long text tells; that sentence moves through the text."""

    tokens: int = 1024
    """Length of the whole prompt: the text is cut at a word to fill it (tokens, >= 64)."""
    depths: int = 11
    """Places of the needle, evenly spaced from before the first clause to after the last, >= 2."""
    needles: int = 1
    """Numbers of the asked city in the text, all asked for; one moves, the others keep their places (>= 1)."""
    distractors: int = 0
    """Sentences that tell the numbers of other cities, at fixed places; 0 ... 39."""
    corpus: str | None = None
    """A UTF-8 text file; None: the default corpus of the package."""

    scoring: ClassVar[str] = "substring"
    max_tokens: ClassVar[int] = 48

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.name, "corpus", self.corpus)
        check_size(f"{self.name}: tokens", self.tokens, TOKENS, least=64)
        check_whole(f"{self.name}: distractors", self.distractors, least=0)
        for parameter, least in (("depths", 2), ("needles", 1)):
            check_size(f"{self.name}: {parameter}", getattr(self, parameter), ITEMS, least=least)
        if self.distractors >= len(CITIES):
            raise UsageError(f"{self.name}: distractors must be 0 ... {len(CITIES) - 1}, got {self.distractors}")

    @property
    def n_items(self) -> int:
        """One place per depth."""
        return self.depths

    def drafts(self, tokenizer: Any, *, count: int, positions: Sequence[int], seed: int) -> Iterator[list[Draft]]:
        """One content is a text with its needles; see `LanguageTask.drafts`.

        Raises:
            UsageError: no tokenizer, or one without character offsets; a length that leaves no room for text.
        """
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise UsageError(
                f"{self.name} counts depths in tokens, so it needs the model's (fast) tokenizer; of a server's "
                "model give a copy: --tokenizer"
            )
        groups = corpus_groups(self.corpus, self.tokens)
        sources = (random.Random(f"needle {seed} {index}") for index in range(count))
        return (self._content(tokenizer, groups, positions, source) for source in sources)

    def _content(
        self, tokenizer: Any, groups: list[Group], positions: Sequence[int], source: random.Random
    ) -> list[Draft]:
        city, *others = source.sample(CITIES, 1 + self.distractors)
        values = [str(value) for value in source.sample(range(1_000_000, 10_000_000), self.needles + self.distractors)]
        fixed = [(city, value) for value in values[1 : self.needles]]
        fixed += list(zip(others, values[self.needles :], strict=True))
        source.shuffle(fixed)
        article = "One" if self.needles > 1 else "The"
        gold, *facts = (f"{article} number of {name} is {value}." for name, value in [(city, values[0]), *fixed])
        question = f"What {'are all the numbers' if self.needles > 1 else 'is the number'} of {city}?"
        bare = _prompt(" ".join([gold, *facts]), question)
        room = self.tokens - len(encode(self.wrapped(bare), tokenizer).token_ids) - MERGES * (2 + len(values))
        if room < 1:
            raise UsageError(f"{self.name}: tokens={self.tokens} leaves no room for text beside question and needles")
        haystack = self._haystack(groups, room, tokenizer, source)
        borders = [haystack.border_at(place / (self.depths - 1)) for place in positions]
        asked = _Asked(question, tuple(values[: self.needles]))
        return [_draft(haystack, border, gold, facts, asked) for border in borders]

    def _haystack(self, groups: list[Group], room: int, tokenizer: Any, source: random.Random) -> Haystack:
        """A text whose depths fall on different borders; places where they do not are passed over."""
        for _ in range(ATTEMPTS):
            haystack = drawn_haystack(groups, room, tokenizer, source)
            if len({haystack.border_at(place / (self.depths - 1)) for place in range(self.depths)}) == self.depths:
                return haystack
        raise UsageError(
            f"{self.name}: texts of {self.tokens} tokens do not have {self.depths} different depths between clauses; "
            "ask for fewer depths or more tokens"
        )


@dataclass(frozen=True)
class _Asked:
    """The question, the moved needle's value, and those of the other asked needles."""

    question: str
    values: tuple[str, ...]


def _prompt(text: str, question: str) -> str:
    return f"{OPENING}{text}\n\nQuestion: {question}\nAnswer:"


def _draft(haystack: Haystack, border: int, gold: str, facts: list[str], asked: _Asked) -> Draft:
    """The prompt with the gold needle before clause `border` and the other facts evenly spread, always alike."""
    inserted: dict[int, list[str]] = {}
    for number, fact in enumerate(facts, start=1):
        inserted.setdefault(haystack.border_at(number / (len(facts) + 1)), []).append(fact)
    inserted.setdefault(border, []).append(gold)
    inserted.setdefault(len(haystack.clauses), [])
    before = _merged(haystack.clauses[:border], inserted, 0) + inserted[border][:-1]
    after = _merged(haystack.clauses[border:], inserted | {border: []}, border)
    after += inserted[len(haystack.clauses)] if border < len(haystack.clauses) else []
    begin = len(OPENING) + sum(len(part) + 1 for part in before)
    text = _prompt(" ".join([*before, gold, *after]), asked.question)
    return Draft(text, (asked.values[0],), (begin, begin + len(gold)), companions=asked.values[1:])


def _merged(clauses: Sequence[str], inserted: dict[int, list[str]], first: int) -> list[str]:
    """Clauses number `first` ... with what is inserted before each of them."""
    return [part for number, clause in enumerate(clauses, start=first) for part in [*inserted.get(number, []), clause]]
