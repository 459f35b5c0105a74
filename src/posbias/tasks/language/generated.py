"""What tasks on short generated entries share: a context that lists entries of one form, one of which is asked for.

And the rules by which their answers are right: a number, a date, a value in JSON or Python, whole words, nothing else.
Entries of a sample differ in what is asked for, so that the answer is known from the moved entry alone.
"""

import ast
import json
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, ClassVar

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.answers import SCORERS, first_line, normalise_answer
from posbias.tasks.language.base import Draft, LanguageTask, listed

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DATE_FORMS = ("%B %d, %Y", "%B %d %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y", "%Y-%m-%d")
_NUMBER = re.compile(rf"-?\d+(?:,\d{{3}})*(?:\.\d+)?|\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d|[A-Z][a-z]+ {_DAY},? \d{{4}}|{_DAY} [A-Z][a-z]+ \d{{4}}")


@SCORERS.register("number")
def number_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first number of the first line is the accepted one, in digits or as a word up to ten; else 0."""
    told = _NUMBER.search(first_line(prediction))
    if told is None:
        return 0.0
    word = told[0].lower()
    value = float(NUMBER_WORDS.index(word) if word in NUMBER_WORDS else word.replace(",", ""))
    return float(value in [float(answer) for answer in answers])


@SCORERS.register("date")
def date_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first date of the first line is the accepted one, whatever its form; else 0."""
    told = _DATE.search(first_line(prediction))
    return float(told is not None and _date(told[0]) in [_date(answer) for answer in answers])


def _date(text: str) -> date | None:
    bare = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    for form in DATE_FORMS:
        with suppress(ValueError):
            return datetime.strptime(bare, form).date()
    return None


@SCORERS.register("json_value")
def json_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the text begins with the accepted JSON value, or its first line is that text without quotes; else 0."""
    accepted = [json.loads(answer) for answer in answers]
    with suppress(ValueError):
        value, _ = json.JSONDecoder().raw_decode(prediction.lstrip())
        return float(value in accepted)
    return float(normalise_answer(first_line(prediction)) in [normalise_answer(str(value)) for value in accepted])


@SCORERS.register("literal")
def literal_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first line is a Python literal that equals the accepted one, a comment apart; else 0."""
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return float(ast.literal_eval(first_line(prediction)) in [ast.literal_eval(answer) for answer in answers])
    return 0.0


@SCORERS.register("whole_words")
def words_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first sentence of the first line holds an accepted answer as whole words, both normalised; else 0."""
    sentence = re.split(r"(?<=[.!?]) ", first_line(prediction))[0]
    told = f" {normalise_answer(sentence)} "
    return float(any(f" {normalise_answer(answer)} " in told for answer in answers))


@SCORERS.register("nothing_else")
def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first line is an accepted answer and nothing else, both normalised; else 0."""
    return float(normalise_answer(first_line(prediction)) in [normalise_answer(answer) for answer in answers])


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
        """No rule reads on after the first line."""
        return ("\n",)

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
