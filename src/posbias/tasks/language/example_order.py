"""In-context example order: one demonstration tells the label of the asked word's category, and is moved.

Words of several categories are paired with arbitrary labels. All demonstrations but one are of other categories, so
that the answer can be known from that one alone: accuracy by its place says which demonstrations count.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, check_choice
from posbias.tasks.language.words import CATEGORIES, LABELS

ASKED = ("category", "same")


@LANGUAGE_TASKS.register("example_order")
@dataclass(frozen=True)
class ExampleOrder(LanguageTask):
    """Label a word from demonstrations of which only the moved one is informative."""

    shots: int = 8
    """Demonstrations, >= 2; each is a place for the informative one."""
    classes: int = 4
    """Categories and labels, 2 ... 8, at most `shots`; guessing is right in one of so many."""
    ask: str = "category"
    """`category`: another word of the informative demonstration's category; `same`: its own word, to be copied."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: shots", self.shots, ITEMS, least=2)
        check_size(f"{self.name}: classes", self.classes, ITEMS, least=2)
        check_choice(self.name, "ask", self.ask, ASKED)
        most = min(self.shots, len(LABELS))
        if self.classes > most:
            raise UsageError(f"{self.name}: classes must be 2 ... {most} for {self.shots} shots, got {self.classes}")
        room = 1 + (self.classes - 1) * min(len(words) for words in CATEGORIES.values())
        if self.shots > room:
            raise UsageError(f"{self.name}: {self.classes} classes have words for {room} shots, got {self.shots}")

    @property
    def n_items(self) -> int:
        """One place per demonstration."""
        return self.shots

    def drafts(self, tokenizer: Any, *, count: int, positions: Sequence[int], seed: int) -> Iterator[list[Draft]]:
        """One content is a set of demonstrations with a question; see `LanguageTask.drafts`."""
        return (self._content(positions, random.Random(f"example_order {seed} {index}")) for index in range(count))

    def _content(self, positions: Sequence[int], source: random.Random) -> list[Draft]:
        categories = source.sample(sorted(CATEGORIES), self.classes)
        labels = source.sample(LABELS, self.classes)
        gold_word, other_word = source.sample(CATEGORIES[categories[0]], 2)
        decks = [source.sample(CATEGORIES[category], len(CATEGORIES[category])) for category in categories]
        kinds = [1 + number % (self.classes - 1) for number in range(self.shots - 1)]
        others = [(decks[kind].pop(), labels[kind]) for kind in kinds]
        source.shuffle(others)
        gold, asked = (gold_word, labels[0]), gold_word if self.ask == "same" else other_word
        return [_draft(gold, others, place, asked, tuple(sorted(labels))) for place in positions]


def _draft(
    gold: tuple[str, str], others: list[tuple[str, str]], place: int, asked: str, choices: tuple[str, ...]
) -> Draft:
    entries = [f"Word: {word}\nLabel: {label}" for word, label in [*others[:place], gold, *others[place:]]]
    begin = sum(len(entry) + 2 for entry in entries[:place])
    text = "\n\n".join([*entries, f"Word: {asked}\nLabel:"])
    return Draft(text, (gold[1],), (begin, begin + len(entries[place])), choices=choices)
