"""Families of tasks that adapters are fitted to: short entries of one form, one of which is asked for and moves.

Importing this module registers them, so that `pb.evaluate` and `pb.fit` take them by name. Entries of a sample differ
in what is asked for, so that the answer is known from the moved entry alone. Results are of a commit whose rules read
JSON and days in any form.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, ClassVar

from posbias import UsageError
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, listed
from posbias.tasks.language.documents import CITIES

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": ("dog", "horse", "rabbit", "tiger", "wolf", "bear", "lion", "mouse", "goat", "duck"),
    "fruit": ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum"),
    "tool": ("hammer", "saw", "drill", "wrench", "shovel", "axe", "pliers", "chisel", "rake", "screwdriver"),
    "body": ("hand", "foot", "nose", "elbow", "knee", "shoulder", "finger", "chin", "ankle", "wrist"),
    "furniture": ("chair", "table", "sofa", "desk", "shelf", "bed", "bench", "stool", "cabinet", "wardrobe"),
    "vehicle": ("car", "truck", "bus", "train", "boat", "bicycle", "plane", "tractor", "ship", "van"),
    "clothing": ("shirt", "coat", "hat", "glove", "sock", "dress", "scarf", "belt", "jacket", "shoe"),
    "instrument": ("piano", "guitar", "violin", "drum", "flute", "trumpet", "harp", "cello", "organ", "banjo"),
}
"""Members of categories that no word shares with another."""
LABELS = ("red", "blue", "green", "black", "white", "gold", "silver", "brown")
COMMON = (
    *("river", "stone", "paper", "window", "garden", "letter", "market", "bridge", "forest", "kitchen"),
    *("doctor", "winter", "summer", "island", "mountain", "village", "station", "machine", "engine", "bottle"),
    *("mirror", "candle", "basket", "pocket", "ticket", "hammer", "silver", "copper", "cotton", "leather"),
    *("coffee", "sugar", "butter", "bread", "cheese", "pepper", "water", "fire", "snow", "rain"),
    *("storm", "cloud", "moon", "star", "sun", "earth", "ocean", "beach", "valley", "desert"),
    *("school", "church", "hotel", "office", "factory", "library", "museum", "theater", "hospital", "prison"),
    *("king", "queen", "soldier", "teacher", "student", "farmer", "writer", "artist", "pilot", "lawyer"),
    *("music", "dance", "story", "poem", "picture", "camera", "phone", "clock", "watch", "radio"),
    *("apple", "orange", "lemon", "tree", "flower", "grass", "leaf", "root", "seed", "corn"),
    *("dog", "horse", "bird", "fish", "mouse", "tiger", "rabbit", "snake", "wolf", "bear"),
    *("red", "blue", "green", "black", "white", "brown", "yellow", "pink", "purple", "gray"),
    *("house", "door", "wall", "floor", "roof", "chair", "table", "bed", "lamp", "box"),
)
NAMES = (
    *("Yuki", "Stuart", "Katie", "Veronica", "Gary", "Megan", "Calvin", "Mandy", "Diana", "Caleb"),
    *("Nadia", "Omar", "Ingrid", "Hugo", "Priya", "Felix", "Leila", "Marek", "Tessa", "Viktor"),
    *("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba"),
    *("Anton", "Beata", "Cyril", "Elena", "Frida", "Greta", "Henrik", "Irena", "Jonas", "Karin", "Lukas", "Mirjam"),
    *("Nils", "Olga", "Pavel", "Rosa"),
)
ROLES = (
    *("director", "treasurer", "secretary", "accountant", "librarian", "electrician", "carpenter", "plumber"),
    *("driver", "cook", "gardener", "translator", "editor", "designer", "photographer", "guard", "nurse", "surgeon"),
    *("chemist", "geologist", "archivist", "trainer", "referee", "auditor", "inspector", "interpreter", "mechanic"),
    *("clerk", "cashier", "courier", "mayor", "judge"),
)
FRUITS = ("apples", "bananas", "cherries", "grapes", "lemons", "mangos", "oranges", "peaches", "pears", "plums")
GOODS = tuple(word for word in COMMON if word not in LABELS)
FIRST_DAY, DAYS, THREE_DIGITS = date(1850, 1, 1), 50_000, range(100, 1000)

Asked = tuple[list[str], str, str]
"""Entries, a question that the first of them answers, and the answer."""
Sampler = Callable[[random.Random, int], Asked]
"""A sample with so many entries, from a generator of its own."""


@dataclass(frozen=True)
class Entries(LanguageTask):
    """A family of tasks; the asked entry moves, the others keep their order."""

    entries: int = 8
    """Entries in the context, >= 2; each is a position for the asked one."""

    max_tokens: ClassVar[int] = 24
    counted: ClassVar[str] = "entries"
    most: ClassVar[int]
    asked: ClassVar[Sampler]
    around: ClassVar[tuple[str, str, str]]
    """Text before, between and after the entries."""

    def __post_init__(self) -> None:
        if type(self.entries) is not int or not 2 <= self.entries <= self.most:
            raise UsageError(f"{self.name}: entries must be 2 ... {self.most}, got {self.entries!r}")

    @property
    def stop(self) -> tuple[str, ...]:
        """An answer is in the first line of a text; a message may have it in a fence."""
        return () if self.chat else ("\n",)

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Asked]:
        """Samples with the asked entry first."""
        sources = (random.Random(f"{self.name} {seed} {index}") for index in range(count))
        return (self.asked(source, self.entries) for source in sources)

    def draft(self, sample: Asked, position: int) -> Draft:
        """The entries, then the question."""
        (gold, *others), question, answer = sample
        head, between, closing = self.around
        entries = [*others[:position], gold, *others[position:]]
        return listed(entries, position, (answer,), around=(head, f"{closing}\n\n{question}"), between=between)


def family(rule: str, most: int, around: tuple[str, str, str] = ("", "\n", "")) -> Callable[[Sampler], type[Entries]]:
    """Register a sampler as a family of tasks under its name."""

    def made(sampler: Sampler) -> type[Entries]:
        fields = {"scoring": rule, "most": most, "around": around, "asked": staticmethod(sampler)}
        fields |= {"__doc__": sampler.__doc__, "__module__": __name__}
        task: type[Entries] = dataclass(frozen=True)(type(sampler.__name__, (Entries,), fields))
        return LANGUAGE_TASKS.register(sampler.__name__)(task)

    return made


@family("number", len(GOODS), ("| item | colour | price |\n|---|---|---|\n", "\n", ""))
def table(source: random.Random, count: int) -> Asked:
    """Read one cell of a table of goods; the row that holds it moves."""
    goods, prices = source.sample(GOODS, count), source.sample(THREE_DIGITS, count)
    rows = [f"| {item} | {source.choice(LABELS)} | {price} |" for item, price in zip(goods, prices, strict=True)]
    return rows, f"Question: What is the price of the {goods[0]}?\nAnswer:", str(prices[0])


@family("equals", min(len(NAMES), len(CITIES)), ("[", ",\n ", "]"))
def json_fields(source: random.Random, count: int) -> Asked:
    """Read one field of one object in a JSON array; that object moves."""
    names, towns = (source.sample(words, count) for words in (NAMES, CITIES))
    pairs = zip(names, towns, strict=True)
    people = [json.dumps({"name": name, "age": source.randrange(20, 80), "city": town}) for name, town in pairs]
    question = f'Question: What is the "city" of {json.dumps(names[0])} in this JSON array?\nAnswer:'
    return people, question, json.dumps(towns[0])


@family("number", len(COMMON), ("```python\n", "\n", ""))
def code_variables(source: random.Random, count: int) -> Asked:
    """Tell the value of one variable of a Python program; the line that sets it moves."""
    names, values = source.sample(COMMON, count), source.sample(THREE_DIGITS, count)
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    return lines, f"print({names[0]})\n```\nOutput:", str(values[0])


@family("number", len(NAMES))
def counts(source: random.Random, count: int) -> Asked:
    """Tell how many fruits of a sort are in one of several baskets, each a list with counts; that list moves."""
    names = source.sample(NAMES, count)
    baskets = [list(zip(source.sample(range(2, 10), 3), source.sample(FRUITS, 3), strict=True)) for _ in names]
    told = [", ".join(f"{number} {fruit}" for number, fruit in basket) for basket in baskets]
    lines = [f"Basket of {name}: {basket}." for name, basket in zip(names, told, strict=True)]
    number, fruit = source.choice(baskets[0])
    return lines, f"Question: How many {fruit} are in the basket of {names[0]}?\nAnswer:", str(number)


@family("whole_words", len(NAMES))
def dialogue(source: random.Random, count: int) -> Asked:
    """Tell who said something in a conversation of several people; that turn moves."""
    names, things = (source.sample(words, count) for words in (NAMES, COMMON))
    pairs = zip(names, things, strict=True)
    turns = [f"{name}: I dreamt of a {thing} in {source.choice(CITIES)}." for name, thing in pairs]
    return turns, f"Question: Who dreamt of a {things[0]}?\nAnswer:", names[0]


@family("equals", len(CITIES))
def dates(source: random.Random, count: int) -> Asked:
    """Tell on which day something happened, from a list of dated events; that event moves."""
    towns = source.sample(CITIES, count)
    days = [FIRST_DAY + timedelta(days=day) for day in source.sample(range(DAYS), count)]
    told = [f"{day:%B} {day.day}, {day.year}" for day in days]
    pairs = zip(told, towns, strict=True)
    events = [f"{when}: a {source.choice(COMMON)} was found in {town}." for when, town in pairs]
    return events, f"Question: On which date was something found in {towns[0]}?\nAnswer:", told[0]


@family("whole_words", min(len(NAMES), len(ROLES)))
def roles(source: random.Random, count: int) -> Asked:
    """Tell who has a role, from statements about people; the statement about that person moves."""
    names, has = (source.sample(words, count) for words in (NAMES, ROLES))
    pairs = zip(names, has, strict=True)
    told = [f"{name} came from {source.choice(CITIES)} and is the {role}." for name, role in pairs]
    return told, f"Question: Who is the {has[0]}?\nAnswer:", names[0]


@family("equals", len(COMMON) // 2)
def instructions(source: random.Random, count: int) -> Asked:
    """Follow the one of several instructions that applies; it moves. Nothing but the word it asks for is right."""
    words = source.sample(COMMON, 2 * count)
    heard, said = words[:count], words[count:]
    told = [f"If you hear the word {one}, say {other}." for one, other in zip(heard, said, strict=True)]
    return told, f"You hear the word {heard[0]}. You say:", said[0]


@LANGUAGE_TASKS.register("example_order")
@dataclass(frozen=True)
class ExampleOrder(LanguageTask):
    """Label a word from demonstrations, of which only the moved one has a word of its category."""

    shots: int = 8
    """Demonstrations; each is a position for the informative one."""
    classes: int = 4
    """Categories and labels, 2 ... 8, at most `shots`; guessing is right in one of so many."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 32
    counted: ClassVar[str] = "shots"

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Any]:
        """The informative demonstration, the others in order, and the word that is asked for."""
        for index in range(count):
            source = random.Random(f"example_order {seed} {index}")
            categories, labels = source.sample(sorted(CATEGORIES), self.classes), source.sample(LABELS, self.classes)
            gold, asked = source.sample(CATEGORIES[categories[0]], 2)
            decks = [source.sample(CATEGORIES[category], len(CATEGORIES[category])) for category in categories]
            kinds = [1 + number % (self.classes - 1) for number in range(self.shots - 1)]
            others = [(decks[kind].pop(), labels[kind]) for kind in kinds]
            source.shuffle(others)
            yield (gold, labels[0]), others, asked

    def draft(self, sample: Any, position: int) -> Draft:
        """Demonstrations, then the word without its label."""
        gold, others, asked = sample
        pairs = [*others[:position], gold, *others[position:]]
        entries = [f"Word: {word}\nLabel: {label}" for word, label in pairs]
        around = "", f"\n\nWord: {asked}\nLabel:"
        return listed(entries, position, (gold[1],), around=around, between="\n\n")


@LANGUAGE_TASKS.register("token_copy")
@dataclass(frozen=True)
class TokenCopy(LanguageTask):
    """Say again the word at a given place of a numbered list, each one token; the asked word moves."""

    length: int = 10
    """Words in the list; each is a position for the asked one."""

    scoring: ClassVar[str] = "best_subspan_em"
    max_tokens: ClassVar[int] = 32
    counted: ClassVar[str] = "length"
    fixed_order: ClassVar[bool] = True

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[list[str]]:
        """The asked word, then the others of the list."""
        encoded = tokenizer([f" {word}" for word in COMMON], add_special_tokens=False)["input_ids"]
        words = [word for word, tokens in zip(COMMON, encoded, strict=True) if len(tokens) == 1]
        return (random.Random(f"token_copy {seed} {index}").sample(words, self.length) for index in range(count))

    def draft(self, sample: list[str], position: int) -> Draft:
        """The list, then the number of the asked word."""
        gold, *others = sample
        words = [*others[:position], gold, *others[position:]]
        around = "Words:\n", f"\n\nWord number {position + 1} of the list is:"
        return listed(words, position, (gold,), around=around, form="{number}. {text}")
