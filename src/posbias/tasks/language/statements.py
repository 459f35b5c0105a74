"""Tasks on statements: a dialogue, dated events, people in roles, instructions. One of them answers the question."""

import random
from dataclasses import dataclass
from datetime import date, timedelta
from typing import ClassVar

from posbias.tasks.language.base import LANGUAGE_TASKS
from posbias.tasks.language.generated import Asked, Entries
from posbias.tasks.language.words import CITIES, COMMON, NAMES

FIRST_DAY, DAYS = date(1850, 1, 1), 50_000
ROLES = (
    *("director", "treasurer", "secretary", "accountant", "librarian", "electrician", "carpenter", "plumber"),
    *("driver", "cook", "gardener", "translator", "editor", "designer", "photographer", "guard", "nurse", "surgeon"),
    *("chemist", "geologist", "archivist", "trainer", "referee", "auditor", "inspector", "interpreter", "mechanic"),
    *("clerk", "cashier", "courier", "mayor", "judge"),
)
"""Roles in a project, all different."""


@LANGUAGE_TASKS.register("dialogue")
@dataclass(frozen=True)
class Dialogue(Entries):
    """Tell who said something in a conversation of several people; that turn moves."""

    scoring: ClassVar[str] = "whole_words"
    most: ClassVar[int] = len(NAMES)

    def asked(self, source: random.Random) -> Asked:
        """Turns of different speakers about different things."""
        names, things = (source.sample(words, self.entries) for words in (NAMES, COMMON))
        turns = [
            f"{name}: I dreamt of a {thing} in {source.choice(CITIES)}."
            for name, thing in zip(names, things, strict=True)
        ]
        return Asked(tuple(turns), f"Question: Who dreamt of a {things[0]}?\nAnswer:", names[0])


@LANGUAGE_TASKS.register("dates")
@dataclass(frozen=True)
class Dates(Entries):
    """Tell on which day something happened, from a list of dated events; that event moves."""

    scoring: ClassVar[str] = "date"
    most: ClassVar[int] = len(CITIES)

    def asked(self, source: random.Random) -> Asked:
        """Events in different towns on different days."""
        towns = source.sample(CITIES, self.entries)
        days = [FIRST_DAY + timedelta(days=day) for day in source.sample(range(DAYS), self.entries)]
        told = [f"{day:%B} {day.day}, {day.year}" for day in days]
        events = [
            f"{when}: a {source.choice(COMMON)} was found in {town}." for when, town in zip(told, towns, strict=True)
        ]
        return Asked(tuple(events), f"Question: On which date was something found in {towns[0]}?\nAnswer:", told[0])


@LANGUAGE_TASKS.register("roles")
@dataclass(frozen=True)
class Roles(Entries):
    """Tell who has a role, from statements about people; the statement about that person moves."""

    scoring: ClassVar[str] = "whole_words"
    most: ClassVar[int] = min(len(NAMES), len(ROLES))

    def asked(self, source: random.Random) -> Asked:
        """Different people in different roles."""
        names, roles = (source.sample(words, self.entries) for words in (NAMES, ROLES))
        told = [
            f"{name} came from {source.choice(CITIES)} and is the {role}."
            for name, role in zip(names, roles, strict=True)
        ]
        return Asked(tuple(told), f"Question: Who is the {roles[0]}?\nAnswer:", names[0])


@LANGUAGE_TASKS.register("instructions")
@dataclass(frozen=True)
class Instructions(Entries):
    """Follow the one of several instructions that applies; it moves. Nothing but the word it asks for is right."""

    scoring: ClassVar[str] = "equals"
    most: ClassVar[int] = len(COMMON) // 2

    def asked(self, source: random.Random) -> Asked:
        """Different words to hear, and different ones to say."""
        words = source.sample(COMMON, 2 * self.entries)
        heard, said = words[: self.entries], words[self.entries :]
        told = [f"If you hear the word {one}, say {other}." for one, other in zip(heard, said, strict=True)]
        return Asked(tuple(told), f"You hear the word {heard[0]}. You say:", said[0])
