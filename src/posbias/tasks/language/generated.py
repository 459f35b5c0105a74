"""What tasks on short generated entries share: a context that lists entries of one form, one of which is asked for.

Entries of a sample differ in what is asked for, so that the answer is known from the moved entry alone.
"""

import random
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.base import Draft, LanguageTask, listed


@dataclass(frozen=True)
class Asked:
    """A drawn sample: entries, and a question that the first of them answers."""

    entries: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Entries(LanguageTask):
    """A task on short generated entries of one form; the asked one moves, the others keep their order."""

    entries: int = 8
    """Entries in the context, >= 2; each is a position for the asked one."""

    max_tokens: ClassVar[int] = 24
    counted: ClassVar[str] = "entries"
    most: ClassVar[int]
    """The most entries that differ."""
    head: ClassVar[str] = ""
    """Text before the entries."""
    between: ClassVar[str] = "\n"
    closing: ClassVar[str] = ""
    """Text after the last entry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: entries", self.entries, ITEMS, least=2, numpy=True)
        if self.entries > self.most:
            raise UsageError(f"{self.name}: entries must be 2 ... {self.most}, got {self.entries}")

    @property
    def stop(self) -> tuple[str, ...]:
        """An answer is in the first line of a text; a message may have it in a fence."""
        return () if self.chat else ("\n",)

    @abstractmethod
    def asked(self, source: random.Random) -> Asked:
        """One sample, from a generator of its own."""

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """Samples with the asked entry first."""
        return (self.asked(random.Random(f"{self.name} {seed} {index}")) for index in range(count))

    def draft(self, sample: Asked, position: int) -> Draft:
        """The entries, then the question."""
        gold, *others = sample.entries
        entries = [*others[:position], gold, *others[position:]]
        listing = listed(entries, head=self.head, between=self.between, tail=f"{self.closing}\n\n{sample.question}")
        return Draft(listing.text, (sample.answer,), listing.items[position], passages=listing.passages)
