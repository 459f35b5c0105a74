"""Tasks on lists of single words: in-context example order, and position copy in natural tokens.

Example order: words of several categories are paired with arbitrary labels. All demonstrations but one are of other
categories, so that the answer can be known from that one alone: accuracy by its position says which demonstrations
count. Position copy: the counterpart, for finished models, of position copy on random tokens (Liu 2026).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_choice, check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, listed
from posbias.tasks.language.words import CATEGORIES, COMMON, LABELS

ASKED = ("category", "same")
CUES = ("counted", "numbered", "repeated")


Shot = tuple[str, str]
"""Word and label."""


@LANGUAGE_TASKS.register("example_order")
@dataclass(frozen=True)
class ExampleOrder(LanguageTask):
    """Label a word from demonstrations of which only the moved one is informative."""

    shots: int = 8
    """Demonstrations, >= 2; each is a position for the informative one."""
    classes: int = 4
    """Categories and labels, 2 ... 8, at most `shots`; guessing is right in one of so many."""
    ask: str = "category"
    """`category`: another word of the informative demonstration's category; `same`: its own word, to be copied."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 32
    counted: ClassVar[str] = "shots"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: shots", self.shots, ITEMS, least=2, numpy=True)
        check_size(f"{self.name}: classes", self.classes, ITEMS, least=2, numpy=True)
        check_choice(f"{self.name}: ask", self.ask, ASKED)
        most = min(self.shots, len(LABELS))
        if self.classes > most:
            raise UsageError(f"{self.name}: classes must be 2 ... {most} for {self.shots} shots, got {self.classes}")
        room = 1 + (self.classes - 1) * min(len(words) for words in CATEGORIES.values())
        if self.shots > room:
            raise UsageError(f"{self.name}: {self.classes} classes have words for {room} shots, got {self.shots}")

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[tuple[Shot, list[Shot], str]]:
        """The informative demonstration, the others in order, and the word that is asked for."""
        return (self._demonstrations(random.Random(f"example_order {seed} {index}")) for index in range(count))

    def _demonstrations(self, source: random.Random) -> tuple[Shot, list[Shot], str]:
        categories = source.sample(sorted(CATEGORIES), self.classes)
        labels = source.sample(LABELS, self.classes)
        gold_word, other_word = source.sample(CATEGORIES[categories[0]], 2)
        decks = [source.sample(CATEGORIES[category], len(CATEGORIES[category])) for category in categories]
        kinds = [1 + number % (self.classes - 1) for number in range(self.shots - 1)]
        distractors = [(decks[kind].pop(), labels[kind]) for kind in kinds]
        source.shuffle(distractors)
        return (gold_word, labels[0]), distractors, gold_word if self.ask == "same" else other_word

    def draft(self, sample: tuple[Shot, list[Shot], str], position: int) -> Draft:
        """Demonstrations, then the word without its label."""
        gold, distractors, word = sample
        pairs = [*distractors[:position], gold, *distractors[position:]]
        entries = [f"Word: {word}\nLabel: {label}" for word, label in pairs]
        listing = listed(entries, head="", between="\n\n", tail=f"\n\nWord: {word}\nLabel:")
        return Draft(listing.text, (gold[1],), listing.items[position], passages=listing.passages)


@LANGUAGE_TASKS.register("token_copy")
@dataclass(frozen=True)
class TokenCopy(LanguageTask):
    """Say again the word at a given place of a list; the asked word moves, all others keep their order.

    How the place is given: `counted` asks for "word number k" of a plain list, `numbered` writes the numbers into the
    list, `repeated` repeats the list up to the asked word (so that longer prompts go with later positions). With a
    tokenizer only words that are one token (with their leading space) are used, so that a position is a token.
    """

    length: int = 10
    """Words in the list, >= 2; each is a position for the asked one."""
    cue: str = "counted"
    """`counted`, `numbered` or `repeated`."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 32
    counted: ClassVar[str] = "length"
    fixed_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: length", self.length, ITEMS, least=2)
        check_choice(f"{self.name}: cue", self.cue, CUES)
        if self.length > len(COMMON):
            raise UsageError(f"{self.name}: length must be 2 ... {len(COMMON)} words, got {self.length}")

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[list[str]]:
        """The asked word, then the others of the list."""
        vocabulary: Sequence[str] = COMMON
        if tokenizer is not None:
            encoded = tokenizer([f" {word}" for word in COMMON], add_special_tokens=False)["input_ids"]
            vocabulary = [word for word, token_ids in zip(COMMON, encoded, strict=True) if len(token_ids) == 1]
        if len(vocabulary) < self.length:
            raise UsageError(
                f"{self.name}: only {len(vocabulary)} of {len(COMMON)} words are one token of this tokenizer; "
                f"{self.length} are asked"
            )
        return (random.Random(f"token_copy {seed} {index}").sample(vocabulary, self.length) for index in range(count))

    def draft(self, sample: list[str], position: int) -> Draft:
        """The list, then the cue."""
        gold, *distractors = sample
        words = [*distractors[:position], gold, *distractors[position:]]
        numbered = self.cue == "numbered"
        tail = f"\nWord number {position + 1} of the list is:"
        if self.cue == "repeated":
            tail = "\nWords:" + "".join(f" {word}" for word in words[:position])
        if numbered:
            listing = listed(words, head="Words:\n", between="\n", tail=f"\n{tail}", numbered=lambda slot: f"{slot}. ")
        else:
            listing = listed([f" {word}" for word in words], head="Words:", between="", tail=tail)
        return Draft(listing.text, (gold,), listing.items[position], passages=listing.passages)
