"""Multiple choice: the letters stay, the right content moves from one to the next, the other options keep their order.

A model without a preference for a letter is right as often whichever letter the right content has. Both ways of asking
are evaluated at once: the letter that is generated, and the probability of the right one by teacher forcing.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from posbias.checks import check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.answers import LETTERS
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    Draft,
    LanguageTask,
    check_path,
    list_field,
    listed,
    published_lines,
    text_field,
)
from posbias.tasks.language.documents import drawn_documents
from posbias.tasks.language.rules import Choice
from posbias.tasks.language.words import CITIES

CLOSING = "\nAnswer with one letter."


@dataclass(frozen=True)
class Question:
    """A question with the right option and the wrong ones."""

    question: str
    right: str
    wrong: tuple[str, ...]


@LANGUAGE_TASKS.register("multiple_choice")
@dataclass(frozen=True)
class MultipleChoice(LanguageTask):
    """Answer a question by the letter of an option; the right content moves over the letters."""

    options: int = 4
    """Options of every question, 2 ... 10; each letter is a position for the right content."""
    file: str | None = None
    """A .jsonl or .jsonl.gz file, one object per line: `question`, `choices` (as many texts as `options`) and `answer`
    (the right one's index, 0 the first, or its letter), as MMLU has them; None: generated questions."""

    max_tokens: ClassVar[int] = 8
    counted: ClassVar[str] = "options"
    fixed_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.name, "file", self.file)
        check_size(f"{self.name}: options", self.options, ITEMS, least=2, numpy=True)
        if self.options > len(LETTERS):
            raise UsageError(f"{self.name}: options must be 2 ... {len(LETTERS)}, got {self.options}")

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Question]:
        """A question with its options, the wrong ones in order."""
        if self.file is None:
            return (_drawn_question(self.options, seed, index) for index in range(count))
        return iter([self._question_of(record, where) for where, record in published_lines(self.file, count)])

    def _question_of(self, record: dict[str, Any], where: str) -> Question:
        question, choices, answer = text_field(record, "question", where), list_field(record, "choices", where), None
        wrong = [choice for choice in choices if not isinstance(choice, str) or not choice.strip()]
        if wrong or len(choices) != self.options or len(set(choices)) < len(choices):
            shown = repr(wrong[0]) if wrong else f"{len(set(choices))} different ones"
            raise UsageError(f"{where}: field 'choices' must hold {self.options} different texts, got {shown:.80}")
        given = record.get("answer")
        if isinstance(given, str) and given in LETTERS[: self.options] and len(given) == 1:
            answer = LETTERS.index(given)
        elif type(given) is int and 0 <= given < self.options:
            answer = given
        if answer is None:
            raise UsageError(
                f"{where}: field 'answer' must be 0 ... {self.options - 1} or A ... {LETTERS[self.options - 1]}, "
                f"got {given!r:.80}"
            )
        return Question(question, choices[answer], tuple(choices[:answer] + choices[answer + 1 :]))

    def draft(self, sample: Question, position: int) -> Draft:
        """The question, its options by letter, and what is asked."""
        listing = listed(
            [*sample.wrong[:position], sample.right, *sample.wrong[position:]],
            head=f"{sample.question}\n",
            between="\n",
            tail=CLOSING if self.chat else "\nAnswer:",
            numbered=lambda slot: f"{LETTERS[slot - 1]}. ",
        )
        return Draft(listing.text, (LETTERS[position],), listing.items[position], passages=listing.passages)

    @cached_property
    def answer_rule(self) -> Choice:
        """The letter of the right content is named, among those of the options."""
        return Choice(self.options)

    def noted(self, text: str | None) -> dict[str, float | None]:
        """`chosen`: index of the letter that is named; None if none is."""
        choice = None if text is None else self.answer_rule.read(text)
        return {"chosen": None if choice is None else float(LETTERS.index(choice))}


def _drawn_question(options: int, seed: int, index: int) -> Question:
    """A text about a person who does not exist, and towns of which one is in it."""
    documents = drawn_documents(1, seed, index)
    source = random.Random(f"multiple_choice {seed} {index}")
    wrong = source.sample([town for town in CITIES if town != documents.answers[0]], options - 1)
    question = f"{documents.question[0].upper()}{documents.question[1:]}?"
    return Question(f"{documents.gold.text}\n{question}", documents.answers[0], tuple(wrong))
