"""Tasks on records: a table, JSON objects, variables of a program, lists with counts. One field of one is asked for."""

import json
import random
from dataclasses import dataclass
from typing import ClassVar

from posbias.tasks.language.base import LANGUAGE_TASKS
from posbias.tasks.language.generated import Asked, Entries
from posbias.tasks.language.words import CITIES, COMMON, LABELS, NAMES

FRUITS = ("apples", "bananas", "cherries", "grapes", "lemons", "mangos", "oranges", "peaches", "pears", "plums")
GOODS = tuple(word for word in COMMON if word not in LABELS)
"""Words that name no colour."""
THREE_DIGITS = range(100, 1000)


@LANGUAGE_TASKS.register("table")
@dataclass(frozen=True)
class Table(Entries):
    """Read one cell of a table of goods; the row that holds it moves."""

    scoring: ClassVar[str] = "number"
    most: ClassVar[int] = len(GOODS)
    head: ClassVar[str] = "| item | colour | price |\n|---|---|---|\n"

    def asked(self, source: random.Random) -> Asked:
        """Goods of different names and prices."""
        goods = source.sample(GOODS, self.entries)
        prices = source.sample(THREE_DIGITS, self.entries)
        rows = [f"| {item} | {source.choice(LABELS)} | {price} |" for item, price in zip(goods, prices, strict=True)]
        return Asked(tuple(rows), f"Question: What is the price of the {goods[0]}?\nAnswer:", str(prices[0]))


@LANGUAGE_TASKS.register("json_fields")
@dataclass(frozen=True)
class JsonFields(Entries):
    """Read one field of one object in a JSON array; that object moves."""

    scoring: ClassVar[str] = "json_value"
    most: ClassVar[int] = min(len(NAMES), len(CITIES))
    head: ClassVar[str] = "["
    between: ClassVar[str] = ",\n "
    closing: ClassVar[str] = "]"

    def asked(self, source: random.Random) -> Asked:
        """People of different names and towns."""
        names, towns = (source.sample(words, self.entries) for words in (NAMES, CITIES))
        people = [
            json.dumps({"name": name, "age": source.randrange(20, 80), "city": town})
            for name, town in zip(names, towns, strict=True)
        ]
        question = f'Question: What is the "city" of {json.dumps(names[0])} in this JSON array?\nAnswer:'
        return Asked(tuple(people), question, json.dumps(towns[0]))


@LANGUAGE_TASKS.register("code_variables")
@dataclass(frozen=True)
class CodeVariables(Entries):
    """Tell the value of one variable of a Python program; the line that sets it moves."""

    scoring: ClassVar[str] = "json_value"
    most: ClassVar[int] = len(COMMON)
    head: ClassVar[str] = "```python\n"

    def asked(self, source: random.Random) -> Asked:
        """Assignments of different numbers to different names."""
        names, values = source.sample(COMMON, self.entries), source.sample(THREE_DIGITS, self.entries)
        lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
        return Asked(tuple(lines), f"print({names[0]})\n```\nOutput:", str(values[0]))


@LANGUAGE_TASKS.register("counts")
@dataclass(frozen=True)
class Counts(Entries):
    """Tell how many fruits of a sort are in one of several baskets, each a list with counts; that list moves."""

    scoring: ClassVar[str] = "number"
    most: ClassVar[int] = len(NAMES)

    def asked(self, source: random.Random) -> Asked:
        """Baskets of different people, each with three sorts of fruit in different numbers."""
        names = source.sample(NAMES, self.entries)
        baskets = [list(zip(source.sample(range(2, 10), 3), source.sample(FRUITS, 3), strict=True)) for _ in names]
        lines = [
            f"Basket of {name}: {', '.join(f'{count} {fruit}' for count, fruit in basket)}."
            for name, basket in zip(names, baskets, strict=True)
        ]
        count, fruit = source.choice(baskets[0])
        return Asked(tuple(lines), f"Question: How many {fruit} are in the basket of {names[0]}?\nAnswer:", str(count))
