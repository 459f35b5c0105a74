"""A small generated corpus of short documents about people who do not exist, so that no model knows an answer.

Each document tells five facts of one person; the question asks for one of them, and no two documents of a set share
its answer. The wording is the same in all, so that only names and values tell the documents apart.
"""

import random
from dataclasses import dataclass

from posbias.tasks.language.words import CATEGORIES, CITIES

GIVEN = ("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba")
FAMILY = ("mar", "vel", "tor", "rin", "sal", "den", "kos", "bel", "nur", "fal", "gor", "pel", "zan", "wick", "hol")
CRAFTS = ("baker", "sailor", "painter", "tailor", "miller", "glazier", "printer", "weaver", "potter", "joiner")
MOST_DOCUMENTS = len(CITIES)
"""Documents in one set: as many as there are different answers."""


@dataclass(frozen=True)
class Document:
    """A passage with its title."""

    title: str
    text: str


@dataclass(frozen=True)
class DocumentSet:
    """A question, the document that answers it, and documents that do not."""

    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]
    """In their given order (published: by relevance)."""


def drawn_documents(documents: int, seed: int, index: int) -> DocumentSet:
    """A generated content: `documents` people, of whom one is asked for.

    Args:
        documents: 1 ... 40.
        seed: Chooses the contents.
        index: Number of the content.
    """
    source = random.Random(f"documents {seed} {index}")
    towns = source.sample(CITIES, documents)
    names: dict[str, None] = {}
    while len(names) < documents:
        names[f"{source.choice(GIVEN)} {''.join(source.sample(FAMILY, 2)).capitalize()}"] = None
    people = [_person(name, town, source) for name, town in zip(names, towns, strict=True)]
    question = f"in which city was {next(iter(names))} born"
    return DocumentSet(question, (towns[0],), people[0], tuple(people[1:]))


def _person(name: str, town: str, source: random.Random) -> Document:
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
