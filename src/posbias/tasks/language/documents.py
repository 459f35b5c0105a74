"""Both tasks of "Lost in the middle" (Liu et al. 2024): question answering over documents, and key-value retrieval.

One document holds the answer and is moved. A file has one JSON object per line, in one of two schemas, which the lines'
own fields tell apart; other fields are passed over. Of one's own:

    {"question": "...", "answers": ["...", ...], "documents": [{"text": "...", "title": "...", "is_gold": true}, ...]}

where `title` may be left out and documents stand in the order of retrieval; or as published with "Lost in the middle":
`question`, `answers`, `ctxs` [{`title`, `text`, `isgold`}]. Fits with a teacher take lines without `answers`
and `question`.

Generated documents are about people who do not exist, so that no model knows an answer: each says five facts of one
person, and no two of a set share an answer. A prompt of one's own may take the place of the published words.

Key-value pairs of random UUIDs are generated as the published ones were.
"""

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, MinLen
from pydantic import AfterValidator, AliasChoices, Field

from posbias.checks import Count, FileName, OneOf
from posbias.errors import UsageError
from posbias.tasks.language.base import (
    AS_GIVEN,
    LANGUAGE_TASKS,
    QUERIES,
    QUESTION_FIRST,
    UNASKED,
    Asked,
    LanguageTask,
    Line,
    Order,
    Text,
    check_form,
    check_order,
    line_of,
    published_lines,
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


def _scorable(answer: str) -> str:
    if not normalise_answer(answer):
        raise ValueError("holds nothing but articles and punctuation")
    return answer


class Document(Line):
    """A passage with its title."""

    text: Text
    title: str | None = None
    """Title; None if the file gives none, and then the prompt shows none."""
    is_gold: bool = Field(default=False, validation_alias=AliasChoices("is_gold", "isgold"))

    @property
    def entry(self) -> dict[str, str]:
        """What a form may hold."""
        published = ("" if self.title is None else f"(Title: {self.title})") + f" {self.text}"
        return {"title": self.title or "", "text": self.text, "published": published}


class Question(Line):
    """A line of a file; for `closed_book` it may go without documents."""

    question: Text = UNASKED
    answers: Annotated[list[Annotated[Text, AfterValidator(_scorable)]], MinLen(1)] = Field(default=[""])
    documents: list[Document] = Field(default=[], validation_alias=AliasChoices("documents", "ctxs"))

    def asked(self, moved: Document | None, others: Sequence[Document] = ()) -> Asked:
        """The question with its documents."""
        entries = tuple(document.entry for document in others)
        return Asked(self.question, tuple(self.answers), moved and moved.entry, entries)


INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant)."
)
CONDITIONS = ("gold", "oracle", "closed_book")
FORMS = ("text", "number text", "title text", "number title text")

GIVEN = ("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba")
FAMILY = ("mar", "vel", "tor", "rin", "sal", "den", "kos", "bel", "nur", "fal", "gor", "pel", "zan", "wick", "hol")
ANIMALS = ("dog", "horse", "rabbit", "tiger", "wolf", "bear", "lion", "mouse", "goat", "duck")
INSTRUMENTS = ("piano", "guitar", "violin", "drum", "flute", "trumpet", "harp", "cello", "organ", "banjo")
CRAFTS = ("baker", "sailor", "painter", "tailor", "miller", "glazier", "printer", "weaver", "potter", "joiner")


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
    schemas: docs/evaluate.md); None: the generated corpus."""
    setting: Annotated[str, OneOf(*CONDITIONS)] = "gold"
    """`gold`: all documents; `oracle`: only the gold one; `closed_book`: none. The last two have one position."""
    query: Annotated[str, OneOf(*QUERIES)] = "after"
    """Place of the question: `after` the documents (as published), `before`, or `both` (query-aware)."""
    template: FileName | None = None
    """A text file with one's own prompt, `{documents}` once and `{question}` at least once; None: as published."""
    entry: str | None = None
    """How each document is listed: `{text}`, and before it, if wanted, `{number}` and then `{title}` (empty if there
    is none); None: as published."""
    order: Order | None = None
    """None: the gold document moves. Else all stand in one order: as retrieved (`given`), `question_first` (it
    stands behind them, too), the most relevant at both `ends`, `reversed`, `shuffled`, or a list of indices."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "documents"
    published: ClassVar[frozenset[str]] = frozenset({"ctxs"})
    slot: ClassVar[str] = "documents"
    usual_form: ClassVar[str] = "Document [{number}]{published}"
    wording: ClassVar[tuple[str, ...]] = ("order",)

    def __post_init__(self) -> None:
        if self.template is not None and self.query != "after":
            raise UsageError(f"{self.name}: query is for the published prompt, not for a template")
        check_form(self.name, self.entry, *FORMS)
        why_not = "" if self.setting == "gold" else f"setting {self.setting!r} has no others"
        if self.file is None and self.order not in (None, AS_GIVEN, QUESTION_FIRST):
            why_not = f"of generated documents {AS_GIVEN}, {QUESTION_FIRST}; others need a file=... of retrieved ones"
        check_order(self, why_not)
        if self.documents is None:
            # Resolved at once, so that a record says how many they were.
            numbers = [10]
            if self.file is not None and self.setting != "closed_book":
                numbers = [len(_read(*line).documents) for line in published_lines(self.file)]
            if not numbers:
                raise UsageError(f"{self.file!r} holds no question")
            object.__setattr__(self, "documents", min(numbers))
        most = len(CITIES)  # different answers
        if self.file is None and self._n_documents > most:
            raise UsageError(f"{self.name}: the generated corpus has at most {most} documents, got {self.documents}")

    @property
    def _n_documents(self) -> int:
        """Documents that are asked for, resolved at once."""
        return int(self.documents or 0)

    @property
    def n_items(self) -> int:
        """One position per document; a single one without distractors, or in an order."""
        return self._n_documents if self.setting == "gold" and self.order is None else 1

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """The gold document alone, and no document."""
        return tuple(replace(self, setting=setting) for setting in CONDITIONS[1:]) if self.setting == "gold" else ()

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """A question with its documents, the distractors in the order in which they stand around the gold one."""
        asked: Iterator[Asked]
        if self.file is None:
            asked = (drawn_documents(self._n_documents, seed, index) for index in range(count))
        else:
            asked = iter([self._cut(where, record) for where, record in published_lines(self.file, count)])
        if (order := self.order) is not None:
            orders = (random.Random(f"order {seed} {index}") for index in range(count))
            return (one.ordered(order, source) for one, source in zip(asked, orders, strict=True))
        if self.setting == "gold":
            return asked
        return (replace(one, others=(), moved=one.moved if self.setting == "oracle" else None) for one in asked)

    def _cut(self, where: str, record: dict[str, Any]) -> Asked:
        """A line's question with the first of its documents, the gold one among them, and what is odd about them."""
        if self.setting == "closed_book":
            return line_of(Question, record, where).asked(None)
        line, wanted = _read(where, record), self._n_documents if self.setting == "gold" else 1
        if len(line.documents) < wanted:
            raise UsageError(
                f"{where} has {len(line.documents)} documents; {wanted} were asked "
                f"(documents={len(line.documents)} takes all)"
            )
        gold = next(document for document in line.documents if document.is_gold)
        asked = line.asked(gold, [one for one in line.documents if one is not gold][: wanted - 1])
        return noticed(replace(asked, rank=min(line.documents.index(gold), wanted - 1)))

    @property
    def plain(self) -> tuple[str, str]:
        """The published wording."""
        if self.setting == "closed_book":
            return "", "Question: {question}\nAnswer:"
        query = "both" if self.order == QUESTION_FIRST else self.query
        before = "Question: {question}\n\n" if query != "after" else ""
        after = "Question: {question}\n" if query != "before" else ""
        return f"{INSTRUCTION}\n\n{before}", f"\n\n{after}Answer:"


def drawn_documents(documents: int, seed: int, index: int) -> Asked:
    """A generated sample: `documents` people (1 ... 40), of whom one is asked for."""
    source = random.Random(f"documents {seed} {index}")
    towns = source.sample(CITIES, documents)
    names: dict[str, None] = {}
    while len(names) < documents:
        names[f"{source.choice(GIVEN)} {''.join(source.sample(FAMILY, 2)).capitalize()}"] = None
    people: list[Document] = []
    for name, town in zip(names, towns, strict=True):  # the same words for all: names and values tell them apart
        craft, animal, instrument = (source.choice(words) for words in (CRAFTS, ANIMALS, INSTRUMENTS))
        year = source.randrange(1820, 1960)
        text = (
            f"{name} (born {year}) worked as a {craft} for {source.randrange(11, 49)} years. {name} was born in {town} "
            f"and grew up there with {source.randrange(2, 9)} siblings. After work {name} played the {instrument} and "
            f"kept a {animal}."
        )
        people.append(Document(title=name, text=text))
    line = Question(question=f"in which city was {people[0].title} born", answers=[towns[0]])
    return replace(line.asked(people[0], people[1:]), rank=source.randrange(documents))


def noticed(asked: Asked) -> Asked:
    """A question with its documents, and what is odd about them.

    That the gold document has an answer is decided as the published scoring rule finds answers; another document only
    has it where it stands there as words of its own, not as part of another one.
    """
    answers = [normalise_answer(answer) for answer in asked.answers]
    alone = re.compile("|".join(f"{APART[0]}{re.escape(answer)}{APART[1]}" for answer in answers))
    gold, *others = [normalise_answer(f"{one['title']} {one['text']}") for one in (asked.moved, *asked.others)]
    odd = {
        "gold_without_answer": not any(answer in gold for answer in answers),
        "gold_repeated": normalise_answer(asked.moved["text"]) in [normalise_answer(o["text"]) for o in asked.others],
        "answer_elsewhere": any(answers) and any(map(alone.search, others)),
    }
    return replace(asked, notices=tuple(name for name, holds in odd.items() if holds))


def _read(where: str, record: dict[str, Any]) -> Question:
    """A line with all its documents, one of which is gold."""
    if ("documents" in record) == ("ctxs" in record):
        raise UsageError(f"{where}: need one of the fields 'documents' and, as published, 'ctxs'")
    line = line_of(Question, record, where)
    gold = sum(document.is_gold for document in line.documents)
    if gold != 1:
        raise UsageError(f"{where}: {gold or 'no'} documents are gold (is_gold true, as published isgold); need 1")
    return line


EXTRACT = "Extract the value corresponding to the specified key in the JSON object below."


@LANGUAGE_TASKS.register("key_value")
@dataclass(frozen=True)
class KeyValue(LanguageTask):
    """Find the value of one key among many; the asked pair moves, all others keep their order.

    Source: Liu et al. 2024, arXiv 2307.03172, section 3; 75, 140 and 300 pairs, 500 examples each.
    """

    pairs: Annotated[Count, Ge(2)] = 75
    """Pairs in the object, >= 2; each is a position for the asked one."""
    query: Annotated[str, OneOf(*QUERIES)] = "after"
    """Place of the key: `after` the object (as published), `before` it, or `both` (query-aware, as published)."""

    scoring: ClassVar[str] = "contains"
    max_tokens: ClassVar[int] = 100
    counted: ClassVar[str] = "pairs"
    between: ClassVar[str] = ",\n "

    @property
    def plain(self) -> tuple[str, str]:
        """The published wording, in which the question is a key."""
        before = 'Key: "{question}"\n\n' if self.query != "after" else ""
        after = 'Key: "{question}"\n' if self.query != "before" else ""
        return f"{EXTRACT}\n\n{before}JSON data:\n{{", f"}}\n\n{after}Corresponding value:"

    @property
    def short_forms(self) -> tuple[LanguageTask, ...]:
        """Two pairs."""
        return (replace(self, pairs=2),) if self.pairs > 2 else ()

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """The asked pair and the others: version-4 UUIDs, keys all different."""
        for index in range(count):
            source = random.Random(f"key_value {seed} {index}")
            values: dict[str, str] = {}
            while len(values) < self.pairs:
                value, key = (str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(2))
                values[key] = value
            moved, *others = [f'"{key}": "{value}"' for key, value in values.items()]
            key, value = next(iter(values.items()))
            yield Asked(key, (value,), moved, tuple(others))
