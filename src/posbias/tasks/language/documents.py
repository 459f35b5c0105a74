"""Both tasks of "Lost in the middle" (Liu et al. 2024): question answering over documents, and key-value retrieval.

One document holds the answer and is moved. A file has one JSON object per line, in one of two schemas, which the lines'
own fields tell apart; other fields are passed over. Of one's own:

    {"question": "...", "answers": ["...", ...], "documents": [{"text": "...", "title": "...", "is_gold": true}, ...]}

where `title` may be left out and documents stand in the order of retrieval; or as published with "Lost in the middle":
`question`, `answers`, `ctxs` [{`title`, `text`, `isgold`}].

Generated documents are about people who do not exist, so that no model knows an answer: each says five facts of one
person, and no two of a set share an answer. A prompt of one's own may take the place of the published words.

Key-value pairs of random UUIDs are generated, or read from the published files (`ordered_kv_records`, `key`, `value`).
"""

import random
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from posbias.checks import Count, FileName, OneOf
from posbias.errors import UsageError
from posbias.tasks.language.base import (
    LANGUAGE_TASKS,
    QUERIES,
    Draft,
    LanguageTask,
    around,
    list_field,
    listed,
    published_lines,
    text_field,
)
from posbias.tasks.language.rules import normalise_answer

CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Vienna", "Athens", "Nairobi", "Quito", "Havana"),
    *("Madrid", "Prague", "Warsaw", "Boston", "Denver", "Sydney", "Manila", "Kyoto", "Hanoi", "Dakar"),
    *("Geneva", "Naples", "Bergen", "Porto", "Seville", "Austin", "Toronto", "Bogota", "Accra", "Tunis"),
    *("Riga", "Turin", "Lyon", "Bremen", "Krakow", "Zagreb", "Sofia", "Malaga", "Perth", "Osaka"),
)
"""Names of places, all different."""
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts that set no blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
APART = rf"(?<![^\W{UNSPACED}])", rf"(?![^\W{UNSPACED}])"
"""Before and behind words that are no part of a longer one."""


@dataclass(frozen=True)
class Document:
    """A passage with its title."""

    title: str | None
    """Title; None if the file gives none, and then the prompt shows none."""
    text: str


@dataclass(frozen=True)
class DocumentSet:
    """A question, the document that answers it, and documents that do not."""

    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]
    """Other documents in their given order (of a file: by relevance)."""
    notices: tuple[str, ...] = ()
    """Oddities, keys of `NOTICES`."""


INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
CONDITIONS = ("gold", "oracle", "closed_book")
AS_PUBLISHED = "Document [{number}]{published}"

GIVEN = ("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba")
FAMILY = ("mar", "vel", "tor", "rin", "sal", "den", "kos", "bel", "nur", "fal", "gor", "pel", "zan", "wick", "hol")
ANIMALS = ("dog", "horse", "rabbit", "tiger", "wolf", "bear", "lion", "mouse", "goat", "duck")
INSTRUMENTS = ("piano", "guitar", "violin", "drum", "flute", "trumpet", "harp", "cello", "organ", "banjo")
CRAFTS = ("baker", "sailor", "painter", "tailor", "miller", "glazier", "printer", "weaver", "potter", "joiner")
GENERATED = 10
"""Documents in a generated set, if no number is given."""
MOST_DOCUMENTS = len(CITIES)
"""Documents in one generated set: as many as there are different answers."""


@LANGUAGE_TASKS.register("documents")
@dataclass(frozen=True)
class Documents(LanguageTask):
    """Answer a question from one of several documents; the gold one moves, the distractors keep their order.

    Source: Liu et al. 2024, arXiv 2307.03172, section 2; 10, 20 and 30 documents, gold at 0, 4, 9 ... 29.
    """

    documents: Count | None = None
    """Documents in the prompt, >= 1, at most 40 generated ones; the gold one and the first others of a line. None: as
    many as every line of the file has, or 10 generated ones."""
    file: FileName | None = None
    """A .jsonl or .jsonl.gz file of one's own questions with passages, or a published one (both
    schemas: above); None: the generated corpus."""
    setting: Annotated[str, OneOf(*CONDITIONS)] = "gold"
    """`gold`: all documents; `oracle`: only the gold one; `closed_book`: none. The last two have one position."""
    query: Annotated[str, OneOf(*QUERIES)] = "after"
    """Place of the question: `after` the documents (as published), `before`, or `both` (query-aware)."""
    template: FileName | None = None
    """A text file with one's own prompt, `{documents}` once and `{question}` at least once; None: as published."""
    entry: str | None = None
    """How each document is listed: `{text}`, and before it, if wanted, `{number}` and then `{title}` (empty if there
    is none); None: as published."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "documents"

    def __post_init__(self) -> None:
        if self.template is not None and self.query != "after":
            raise UsageError(f"{self.name}: query is for the published prompt, not for a template")
        fields = re.findall(r"\{(number|title|text)\}", "{text}" if self.entry is None else self.entry)
        if fields not in (["text"], ["number", "text"], ["title", "text"], ["number", "title", "text"]):
            raise UsageError(
                f"{self.name}: entry must hold {{text}} once, and at most {{number}} and then {{title}} before it, "
                f"got {self.entry!r}"
            )
        if self.documents is None:
            # Resolved at once, so that a record says how many they were.
            numbers = [GENERATED]
            if self.file is not None and self.setting != "closed_book":
                numbers = [1 + len(_set_of(*line).distractors) for line in published_lines(self.file)]
            if not numbers:
                raise UsageError(f"{self.file!r} holds no question")
            object.__setattr__(self, "documents", min(numbers))
        if self.file is None and super().n_items > MOST_DOCUMENTS:
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

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[DocumentSet]:
        """A question with its documents, the distractors in the order in which they stand around the gold one."""
        if self.file is None:
            documents = super().n_items
            return (drawn_documents(documents, seed, index) for index in range(count))
        lines = list(published_lines(self.file, count))
        if self.setting == "closed_book":  # lines need not have documents
            return iter([DocumentSet(*_question_of(*line), Document(None, ""), ()) for line in lines])
        return iter([self._cut(_set_of(*line), line[0]) for line in lines])

    def _cut(self, found: DocumentSet, where: str) -> DocumentSet:
        """A line's question with the first of its documents, the gold one among them, and what is odd about them."""
        there = 1 + len(found.distractors)
        if there < self.n_items:
            raise UsageError(f"{where} has {there} documents; {self.n_items} were asked (documents={there} takes all)")
        return noticed(replace(found, distractors=found.distractors[: self.n_items - 1]))

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
        head = f"{INSTRUCTION}\n\n"
        head += f"{question_line}\n" if self.query != "after" else ""
        return head, "\n\n" + (question_line if self.query != "before" else "") + "Answer:"

    def draft(self, sample: DocumentSet, position: int) -> Draft:
        """The published wording, or one's own."""
        head, tail = self._around(sample.question)
        template = "".join(self._own_words) if self.template is not None else ""
        if self.setting == "closed_book":
            return Draft(head + tail, sample.answers, None, template=template)
        others = sample.distractors if self.setting == "gold" else ()
        documents = [*others[:position], sample.gold, *others[position:]]
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
    people = []
    for name, town in zip(names, towns, strict=True):  # the same words for all: names and values tell them apart
        craft, animal, instrument = (source.choice(words) for words in (CRAFTS, ANIMALS, INSTRUMENTS))
        year = source.randrange(1820, 1960)
        text = (
            f"{name} (born {year}) worked as a {craft} for {source.randrange(11, 49)} years. {name} was born in {town} "
            f"and grew up there with {source.randrange(2, 9)} siblings. After work {name} played the {instrument} and "
            f"kept a {animal}."
        )
        people.append(Document(name, text))
    question = f"in which city was {people[0].title} born"
    return DocumentSet(question, (towns[0],), people[0], tuple(people[1:]))


OWN, PUBLISHED = "documents", "ctxs"
"""Fields that list the documents, of which a line has one."""
FLAGS = {OWN: "is_gold", PUBLISHED: "isgold"}
"""Field of a document that is true for the gold one; published lines may leave it out of others."""
LINES = {
    OWN: "question, answers [text ...], documents [{text, title (may be left out), is_gold (true or false)} ...]",
    PUBLISHED: "question, answers [text ...], ctxs [{title, text, isgold} ...]",
}
"""What a line holds, for messages."""


def _question_of(where: str, record: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """A question and its accepted answers."""
    question = text_field(record, "question", where)
    answers = list_field(record, "answers", where)
    if not all(isinstance(answer, str) and answer for answer in answers):
        raise UsageError(f"{where}: field 'answers' must hold texts, got {answers!r:.80}")
    empty = [answer for answer in answers if not normalise_answer(answer)]
    if empty:
        raise UsageError(f"{where}: answer {empty[0]!r:.80} holds nothing but articles and punctuation")
    return question, tuple(answers)


def noticed(document_set: DocumentSet) -> DocumentSet:
    """A question with its documents, and what is odd about them.

    That the gold document has an answer is decided as the published scoring rule finds answers; another document only
    has it where it stands there as words of its own, not as part of another one.
    """
    answers = [normalise_answer(answer) for answer in document_set.answers]
    alone = re.compile("|".join(f"{APART[0]}{re.escape(answer)}{APART[1]}" for answer in answers))
    documents = (document_set.gold, *document_set.distractors)
    gold, *others = [normalise_answer(f"{document.title or ''} {document.text}") for document in documents]
    text, *texts = [normalise_answer(document.text) for document in documents]
    odd = {
        "gold_without_answer": not any(answer in gold for answer in answers),
        "gold_repeated": text in texts,
        "answer_elsewhere": any(map(alone.search, others)),
    }
    return replace(document_set, notices=tuple(name for name, holds in odd.items() if holds))


def _set_of(where: str, record: dict[str, Any]) -> DocumentSet:
    """A line with all its documents; messages end with the schema that it was read by."""
    there = [schema for schema in LINES if schema in record]
    if len(there) != 1:
        fields = "both 'documents' and 'ctxs'" if there else "neither 'documents' nor 'ctxs'"
        raise UsageError(f"{where} has {fields}; a line holds either {LINES[OWN]}, or as published {LINES[PUBLISHED]}")
    schema, gold, distractors = there[0], list[Document](), list[Document]()
    try:
        question, answers = _question_of(where, record)
        for number, entry in enumerate(list_field(record, schema, where), start=1):
            of_document = f"{where}, document {number}"
            if not isinstance(entry, dict):
                raise UsageError(f"{of_document}: an entry of {schema!r} must be an object, got {entry!r:.80}")
            flag = entry.get(FLAGS[schema])
            if schema == OWN and not isinstance(flag, bool):
                raise UsageError(f"{of_document}: field {FLAGS[schema]!r} must be true or false, got {flag!r:.80}")
            titled = schema == PUBLISHED or entry.get("title") is not None
            title = text_field(entry, "title", of_document, empty=True) if titled else None
            (gold if flag is True else distractors).append(Document(title, text_field(entry, "text", of_document)))
        if len(gold) != 1:
            raise UsageError(
                f"{where}: {len(gold) or 'no'} documents are gold ({FLAGS[schema]} true); exactly 1 is needed"
            )
    except UsageError as error:
        raise UsageError(f"{error}; a line holds {LINES[schema]}") from None
    return DocumentSet(question, answers, gold[0], tuple(distractors))


EXTRACT = "Extract the value corresponding to the specified key in the JSON object below."

Pair = tuple[str, str]


@LANGUAGE_TASKS.register("key_value")
@dataclass(frozen=True)
class KeyValue(LanguageTask):
    """Find the value of one key among many; the asked pair moves, all others keep their order.

    Source: Liu et al. 2024, arXiv 2307.03172, section 3; 75, 140 and 300 pairs, 500 examples each.
    """

    pairs: Annotated[Count, Ge(2)] = 75
    """Pairs in the object, >= 2; each is a position for the asked one."""
    file: FileName | None = None
    """A published .jsonl or .jsonl.gz file; None: generated pairs. Its lines must have exactly `pairs` pairs."""
    query: Annotated[str, OneOf(*QUERIES)] = "after"
    """Place of the key: `after` the object (as published), `before` it, or `both` (query-aware, as published)."""

    scoring: ClassVar[str] = "contains"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "pairs"

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """Two pairs, if they are generated."""
        return (replace(self, pairs=2),) if self.file is None and self.pairs > 2 else ()

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[tuple[Pair, list[Pair]]]:
        """The asked pair and the others."""
        if self.file is None:
            return (_drawn_pairs(self.pairs, seed, index) for index in range(count))
        return iter([self._pairs_of(record, where) for where, record in published_lines(self.file, count)])

    def _pairs_of(self, record: dict[str, Any], where: str) -> tuple[Pair, list[Pair]]:
        records = list_field(record, "ordered_kv_records", where)
        key, value = text_field(record, "key", where), text_field(record, "value", where)
        for entry in records:
            if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
                raise UsageError(
                    f"{where}: an entry of 'ordered_kv_records' must be a [key, value] pair, got {entry!r}"
                )
        if len(records) != self.pairs:
            raise UsageError(f"{where} has {len(records)} pairs; {self.name}(pairs={self.pairs}) was asked")
        if len({entry[0] for entry in records}) < len(records):
            raise UsageError(f"{where}: a key occurs twice")
        if [key, value] not in records:
            raise UsageError(f"{where}: no gold: the asked key {key!r} with its value is not among the pairs")
        return (key, value), [(entry[0], entry[1]) for entry in records if entry[0] != key]

    def draft(self, sample: tuple[Pair, list[Pair]], position: int) -> Draft:
        """The published wording."""
        gold, distractors = sample
        entries = [f'"{key}": "{value}"' for key, value in [*distractors[:position], gold, *distractors[position:]]]
        key_line = f'Key: "{gold[0]}"\n'
        head = f"{EXTRACT}\n\n" + (f"{key_line}\n" if self.query != "after" else "") + "JSON data:\n{"
        tail = "}\n\n" + (key_line if self.query != "before" else "") + "Corresponding value:"
        listing = listed(entries, head=head, between=",\n ", tail=tail)
        twice = self.file is not None and any(gold[1].lower() in value.lower() for _, value in distractors)
        notices = ("answer_elsewhere",) if twice else ()
        return Draft(listing.text, (gold[1],), listing.items[position], passages=listing.passages, notices=notices)


def _drawn_pairs(pairs: int, seed: int, index: int) -> tuple[Pair, list[Pair]]:
    """The asked pair and the other ones of a generated sample: version-4 UUIDs, keys all different."""
    source = random.Random(f"key_value {seed} {index}")
    values: dict[str, str] = {}
    while len(values) < pairs:
        value, key = (str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(2))
        values[key] = value
    gold, *distractors = values.items()
    return gold, distractors
