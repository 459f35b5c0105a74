"""Question answering over several documents, of which one holds the answer and is moved (Liu et al. 2024).

Files of one's own and published ones are described in `document_files.py`. Generated documents are about people who do
not exist, so that no model knows an answer: each says five facts of one person, and no two of a set share an answer.
A prompt of one's own may take the place of the published words.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from posbias.checks import check_choice, check_size
from posbias.errors import UsageError
from posbias.limits import ITEMS
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    QUERIES,
    Draft,
    LanguageTask,
    around,
    check_path,
    listed,
)
from posbias.tasks.language.document_files import Document, DocumentSet, noticed, read_questions, read_sets
from posbias.tasks.language.words import CATEGORIES, CITIES

INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
RANDOM_ORDER = " The search results are ordered randomly."
CONDITIONS = ("gold", "oracle", "closed_book")
PLAIN = r"(?:(?!\{(?:number|title|text)\}).)*"
ENTRY = re.compile(rf"{PLAIN}(?:\{{number\}}{PLAIN})?(?:\{{title\}}{PLAIN})?\{{text\}}{PLAIN}", re.DOTALL)
"""The form of an entry of one's own."""
AS_PUBLISHED = "Document [{number}]{published}"
ORDERS = ("given", "shuffled")

GIVEN = ("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba")
FAMILY = ("mar", "vel", "tor", "rin", "sal", "den", "kos", "bel", "nur", "fal", "gor", "pel", "zan", "wick", "hol")
CRAFTS = ("baker", "sailor", "painter", "tailor", "miller", "glazier", "printer", "weaver", "potter", "joiner")
MOST_DOCUMENTS = len(CITIES)
"""Documents in one generated set: as many as there are different answers."""


@LANGUAGE_TASKS.register("documents")
@dataclass(frozen=True)
class Documents(LanguageTask):
    """Answer a question from one of several documents; the gold one moves, the distractors keep their order.

    Source: Liu et al. 2024, arXiv 2307.03172, section 2; 10, 20 and 30 documents, gold at 0, 4, 9 ... 29.
    """

    documents: int = 10
    """Documents in the prompt, >= 1, at most 40 generated ones; the gold one and the first others of a line."""
    file: str | None = None
    """A .jsonl or .jsonl.gz file of one's own questions with passages, or a published one (both schemas:
    `tasks/language/document_files.py`); None: the generated corpus."""
    setting: str = "gold"
    """`gold`: all documents; `oracle`: only the gold one; `closed_book`: none. The last two have one position."""
    order: str = "given"
    """Order of the distractors: as `given` (published: by relevance) or `shuffled`, the same at all positions."""
    mention_order: bool = False
    """Say in the prompt that the documents are ordered randomly (published wording)."""
    query: str = "after"
    """Place of the question: `after` the documents (as published), `before`, or `both` (query-aware)."""
    template: str | None = None
    """A text file with one's own prompt, `{documents}` once and `{question}` at least once; None: as published."""
    entry: str | None = None
    """How each document is listed: `{text}`, and before it, if wanted, `{number}` and then `{title}` (empty if there
    is none); None: as published."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.name, "file", self.file)
        check_size(f"{self.name}: documents", self.documents, ITEMS, numpy=True)
        check_choice(f"{self.name}: setting", self.setting, CONDITIONS)
        check_choice(f"{self.name}: order", self.order, ORDERS)
        check_choice(f"{self.name}: query", self.query, QUERIES)
        if not isinstance(self.mention_order, bool):
            raise UsageError(f"{self.name}: mention_order must be True or False, got {self.mention_order!r}")
        check_path(self.name, "template", self.template)
        if self.template is not None and (self.query != "after" or self.mention_order):
            raise UsageError(f"{self.name}: query and mention_order are for the published prompt, not for a template")
        if self.entry is not None and not (isinstance(self.entry, str) and ENTRY.fullmatch(self.entry)):
            raise UsageError(
                f"{self.name}: entry must hold {{text}} once, and at most {{number}} and then {{title}} before it, "
                f"got {self.entry!r}"
            )
        if self.file is None and self.documents > MOST_DOCUMENTS:
            raise UsageError(
                f"{self.name}: the generated corpus has at most {MOST_DOCUMENTS} documents, got {self.documents}"
            )

    @property
    def n_items(self) -> int:
        """One position per document; a single one without distractors."""
        return super().n_items if self.setting == "gold" else 1

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """The gold document alone, and no document."""
        return tuple(replace(self, setting=setting) for setting in CONDITIONS[1:]) if self.setting == "gold" else ()

    @property
    def condition(self) -> str:
        """The setting."""
        return self.setting

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[DocumentSet]:
        """A question with its documents, the distractors in the order in which they stand around the gold one."""
        sets: Iterable[DocumentSet]
        if self.file is None:
            sets = (drawn_documents(self.documents, seed, index) for index in range(count))
        elif self.setting == "closed_book":
            sets = read_questions(self.file, count=count)
        else:
            sets = read_sets(self.file, count=count, documents=self.n_items)
        return (
            self._ordered(document_set, random.Random(f"order {seed} {index}"))
            for index, document_set in enumerate(sets)
        )

    def _ordered(self, document_set: DocumentSet, source: random.Random) -> DocumentSet:
        ordered = list(document_set.distractors) if self.setting == "gold" else []
        if self.order == "shuffled":
            source.shuffle(ordered)
        document_set = replace(document_set, distractors=tuple(ordered))
        return document_set if self.file is None or self.setting == "closed_book" else noticed(document_set)

    @cached_property
    def _own_words(self) -> tuple[str, str]:
        """Texts before and after the documents in one's own prompt."""
        return around(self.name, str(self.template), "documents")

    def _around(self, question: str) -> tuple[str, str]:
        """Texts before and after the documents."""
        if self.template is not None:
            before, after = (part.replace("{question}", question) for part in self._own_words)
            return before, after
        question_line = f"Question: {question}\n"
        if self.setting == "closed_book":
            return "", f"{question_line}Answer:"
        head = f"{INSTRUCTION}{RANDOM_ORDER if self.mention_order else ''}\n\n"
        head += f"{question_line}\n" if self.query != "after" else ""
        return head, "\n\n" + (question_line if self.query != "before" else "") + "Answer:"

    def draft(self, sample: DocumentSet, position: int) -> Draft:
        """The published wording, or one's own."""
        head, tail = self._around(sample.question)
        template = "".join(self._own_words) if self.template is not None else ""
        if self.setting == "closed_book":
            return Draft(head + tail, sample.answers, None, template=template)
        documents = [*sample.distractors[:position], sample.gold, *sample.distractors[position:]]
        entries = [
            {
                "title": document.title or "",
                "text": document.text,
                "published": ("" if document.title is None else f"(Title: {document.title})") + f" {document.text}",
            }
            for document in documents
        ]
        listing = listed(entries, head=head, between="\n", tail=tail, form=self.entry or AS_PUBLISHED)
        place, passages = listing.items[position], listing.passages
        return Draft(listing.text, sample.answers, place, passages=passages, template=template, notices=sample.notices)


def drawn_documents(documents: int, seed: int, index: int) -> DocumentSet:
    """A generated sample: `documents` people (1 ... 40), of whom one is asked for."""
    source = random.Random(f"documents {seed} {index}")
    towns = source.sample(CITIES, documents)
    names: dict[str, None] = {}
    while len(names) < documents:
        names[f"{source.choice(GIVEN)} {''.join(source.sample(FAMILY, 2)).capitalize()}"] = None
    people = [_person(name, town, source) for name, town in zip(names, towns, strict=True)]
    question = f"in which city was {next(iter(names))} born"
    return DocumentSet(question, (towns[0],), people[0], tuple(people[1:]))


def _person(name: str, town: str, source: random.Random) -> Document:
    """Facts in the same words for all, so that only names and values tell the documents apart."""
    craft, animal, instrument = (
        source.choice(words) for words in (CRAFTS, CATEGORIES["animal"], CATEGORIES["instrument"])
    )
    year = source.randrange(1820, 1960)
    text = (
        f"{name} (born {year}) worked as a {craft} for {source.randrange(11, 49)} years. {name} was born in {town} and "
        f"grew up there with {source.randrange(2, 9)} siblings. After work {name} played the {instrument} and kept "
        f"a {animal}."
    )
    return Document(name, text)
