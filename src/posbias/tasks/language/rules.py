"""Rules of scoring, for every task: is a generated text right, given the accepted answers?

A rule is spelled as a literal call such as `number(tolerance=0.5)`.
"""

import ast
import importlib.util
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from posbias.errors import RunError, UsageError
from posbias.registry import Registry
from posbias.tasks.language.answers import LETTERS, checked_answers, choice_of, first_line, normalise_answer
from posbias.tasks.language.calls import Called, calls_in
from posbias.tasks.language.verdict_parsing import check_own, first_ranked, search_own, verdict_of

RULES: Registry["Rule"] = Registry("rule")
NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
"""A number as people write it, with commas between thousands."""
LABELLED = re.compile(
    rf"(?:\\boxed\{{|####|\b(?:answer|total|result)\s*(?:is|:|=)+|=)\s*[^\w\n+−-]{{0,3}}({NUMBER})", re.IGNORECASE
)
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DATE_FORMS = ("%B %d, %Y", "%B %d %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y", "%Y-%m-%d")
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d|[A-Z][a-z]+ {_DAY},? \d{{4}}|{_DAY} [A-Z][a-z]+ \d{{4}}")


@dataclass(frozen=True)
class Rule(ABC):
    """A rule by which a generated text is right or wrong."""

    name: ClassVar[str]
    text: ClassVar[bool] = True
    """True if an accepted answer is a text that a model may say: it is scored by teacher forcing, too."""
    begins: ClassVar[bool] = True
    """True if a right answer may be expected to begin with an accepted one, which is measured beside."""
    one_line: ClassVar[bool] = False
    """True if the first line alone is judged."""
    objects: ClassVar[bool] = False
    """True if an accepted answer may be an object of JSON."""
    of_place: ClassVar[bool] = False
    """True if the answer is the letter of the moved unit's place, which a file of items does not say."""

    @property
    def own_code(self) -> str | None:
        """The Python code of one's own that it runs."""
        return None

    def check(self, answer: str) -> None:
        """Refuse an accepted answer that cannot be judged by this rule."""

    def readable(self, text: str) -> bool:
        """True if a text holds what is judged, such as a number; what does not is wrong."""
        return True

    def settled(self, text: str) -> bool:
        """True if nothing that might follow a text, which was cut off, belongs to what is judged."""
        return self.one_line and "\n" in text.lstrip()

    @abstractmethod
    def right(self, text: str, answers: Sequence[str]) -> float:
        """The score of a text, 0 ... 1."""


@dataclass(frozen=True)
class LineRule(Rule):
    """A rule that holds the first line that is not blank against every accepted answer."""

    one_line: ClassVar[bool] = True

    @abstractmethod
    def accepts(self, line: str, answer: str) -> bool:
        """True if a line says an accepted answer."""

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 if the line says one of the answers, else 0."""
        line = first_line(text)
        return float(any(self.accepts(line, answer) for answer in checked_answers(answers)))


@dataclass(frozen=True)
class NamingRule(Rule):
    """A rule that reads out of a text which letter it names."""

    @abstractmethod
    def named(self, text: str) -> str | None:
        """The letter, `TIE` if there may be one, or None: nothing that can be read."""

    def readable(self, text: str) -> bool:
        """True if a letter, or a tie, is named."""
        return self.named(text) is not None

    def settled(self, text: str) -> bool:
        """True if a letter, or a tie, is named."""
        return self.readable(text)

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 if the accepted letter is named; a tie, or what cannot be read, is wrong."""
        return float(self.named(text) in checked_answers(answers))


@RULES.register("contains")
@dataclass(frozen=True)
class Contains(Rule):
    """An accepted answer occurs anywhere in the text, ignoring case.

    Source: Liu et al. 2024, section 3.1, key-value retrieval.
    """

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        return float(any(answer.lower() in text.lower() for answer in checked_answers(answers)))


@RULES.register("best_subspan_em")
@dataclass(frozen=True)
class BestSubspan(LineRule):
    """An accepted answer occurs in the first line that is not blank, both normalised (`normalise_answer`).

    Only the text before that line's end counts: the answer stands in the context, so that a model which copies
    the context on and on would otherwise be right.

    Source: Liu et al. 2024, section 2.2. As published but for empty answers, which there are always right, and for
    blank lines before an answer, with which it is always wrong there.
    """

    def check(self, answer: str) -> None:
        """Refuse an answer that normalises to nothing and so would occur everywhere."""
        if not normalise_answer(answer):
            raise UsageError(f"answer {answer!r} holds nothing but articles and punctuation, so it cannot be scored")

    def accepts(self, line: str, answer: str) -> bool:
        """True if the answer is a span of the line."""
        self.check(answer)
        return normalise_answer(answer) in normalise_answer(line)


@RULES.register("whole_words")
@dataclass(frozen=True)
class WholeWords(LineRule):
    """The first sentence of the first line holds an accepted answer as whole words, both normalised."""

    def accepts(self, line: str, answer: str) -> bool:
        """True if the answer's words stand together in the sentence."""
        sentence = re.split(r"(?<=[.!?]) ", line)[0]
        return f" {normalise_answer(answer)} " in f" {normalise_answer(sentence)} "


@RULES.register("equals")
@dataclass(frozen=True)
class Equals(LineRule):
    """The first line that is not blank is an accepted answer, but for case, and quotes or a full stop around it."""

    def accepts(self, line: str, answer: str) -> bool:
        """True if they are the same."""
        bare, accepted = (" ".join(text.split()).strip("\"'`*“”.").casefold() for text in (line, answer))
        return bare == accepted


@RULES.register("date")
@dataclass(frozen=True)
class Date(LineRule):
    """The first date of the first line is the accepted one, whatever its form."""

    def check(self, answer: str) -> None:
        """Refuse what is no date."""
        if _date(answer) is None:
            raise UsageError(f"the answer must be a date such as 3 March 1921 or 1921-03-03, got {answer!r:.80}")

    def accepts(self, line: str, answer: str) -> bool:
        """True if it is the same day."""
        told = _DATE.search(line)
        return told is not None and _date(told[0]) == _date(answer)


def _date(text: str) -> date | None:
    bare = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    for form in DATE_FORMS:
        with suppress(ValueError):
            return datetime.strptime(bare, form).date()
    return None


@RULES.register("json_value")
@dataclass(frozen=True)
class JsonValue(LineRule):
    """The first line begins with the accepted JSON value, or is that text without quotes."""

    objects: ClassVar[bool] = True

    def check(self, answer: str) -> None:
        """Refuse what is no JSON."""
        try:
            json.loads(answer)
        except ValueError:
            raise UsageError(f"the answer must be a JSON value, got {answer!r:.80}") from None

    def accepts(self, line: str, answer: str) -> bool:
        """True if the values are equal."""
        accepted = json.loads(answer)
        with suppress(ValueError):
            return bool(json.JSONDecoder().raw_decode(line)[0] == accepted)
        return normalise_answer(line) == normalise_answer(str(accepted))


@RULES.register("literal")
@dataclass(frozen=True)
class Literal(LineRule):
    """The first line is a Python literal that equals the accepted one, a comment apart."""

    def accepts(self, line: str, answer: str) -> bool:
        """True if the values are equal."""
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return bool(ast.literal_eval(line) == ast.literal_eval(answer))
        return False


@RULES.register("regex")
@dataclass(frozen=True)
class Matches(Rule):
    """An accepted answer is a regular expression that is found anywhere in the text."""

    text: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    def check(self, answer: str) -> None:
        """Refuse what is no regular expression."""
        check_own("the answer", answer)

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        return float(any(search_own(answer, text) for answer in answers))


@RULES.register("number")
@dataclass(frozen=True)
class Number(Rule):
    """The number that a text gives is an accepted one: the last behind a label ("answer: 42", "= 42"), or the first."""

    tolerance: float = 0.0
    """Largest difference that still counts as right, >= 0."""
    first: bool = False
    """True if the first number of the first line counts, labels or not, in digits or as a word up to ten."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"number: tolerance must be at least 0 and finite, got {self.tolerance!r}")

    def check(self, answer: str) -> None:
        """Refuse what is no number."""
        if not re.fullmatch(NUMBER, answer.strip()):
            raise UsageError(f"the answer must be a number, got {answer!r:.80}")

    def readable(self, text: str) -> bool:
        """True if there is a number."""
        return bool(self._stated(text))

    def settled(self, text: str) -> bool:
        """True if the first line has ended, if that is read, or if a labelled number is there."""
        return "\n" in text.lstrip() if self.first else bool(LABELLED.search(text))

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        slack = self.tolerance * (1 + 1e-12)
        given, accepted = self._stated(text), [_value(answer) for answer in checked_answers(answers)]
        return float(any(abs(_value(number) - value) <= slack for number in given for value in accepted))

    def _stated(self, text: str) -> list[str]:
        """The number that a text gives; none or one."""
        if self.first:
            words = rf"(?<![\w.]){NUMBER}|\b(?:{'|'.join(NUMBER_WORDS)})\b"
            return re.findall(words, first_line(text), re.IGNORECASE)[:1]
        return LABELLED.findall(text)[-1:] or re.findall(rf"(?<![\w.]){NUMBER}", text)[:1]


def _value(text: str) -> float:
    bare = text.strip().lower()
    return float(NUMBER_WORDS.index(bare) if bare in NUMBER_WORDS else bare.replace(",", "").replace("−", "-"))


@RULES.register("call")
@dataclass(frozen=True)
class Call(Rule):
    """The first tool that is called is the accepted one: a name or, as JSON, a name and the arguments that must be so.

    Calls are those that a server tells of, or what the text holds in the forms of `calls_in`.
    """

    text: ClassVar[bool] = False
    begins: ClassVar[bool] = False
    objects: ClassVar[bool] = True

    def readable(self, text: str) -> bool:
        """True if there is a call."""
        return bool(calls_in(text))

    def settled(self, text: str) -> bool:
        """True if there is a call: the first one counts."""
        return self.readable(text)

    def check(self, answer: str) -> None:
        """Refuse an object that is no call."""
        if answer.lstrip().startswith("{") and not calls_in(answer):
            raise UsageError(
                f"the answer must be a tool's name, or an object with name and arguments, got {answer!r:.80}"
            )

    def right(self, text: str, answers: Sequence[str]) -> float:
        """1 or 0."""
        called = calls_in(text)[:1]
        accepted = [(calls_in(answer) or [Called(answer, {})])[0] for answer in checked_answers(answers)]
        return float(any(call.meets(right.name, right.arguments) for call in called for right in accepted))


@RULES.register("choice")
@dataclass(frozen=True)
class Choice(NamingRule):
    """The text names the letter of the moved unit, which units are listed with."""

    options: int = len(LETTERS)
    """Options among which one is named."""

    of_place: ClassVar[bool] = True

    def named(self, text: str) -> str | None:
        """The letter of an option (`choice_of`)."""
        return choice_of(text, LETTERS[: self.options])


@RULES.register("verdict")
@dataclass(frozen=True)
class Verdict(NamingRule):
    """The text says which of two responses, A or B, is better (`verdict_of`)."""

    pattern: str | None = None
    """A regular expression of one's own with one group, which holds the verdict."""

    begins: ClassVar[bool] = False

    def named(self, text: str) -> str | None:
        """A, B, `TIE`, or None."""
        return verdict_of(text, self.pattern)


@RULES.register("first_ranked")
@dataclass(frozen=True)
class FirstRanked(NamingRule):
    """The text ranks one of several responses first (`first_ranked`)."""

    responses: int
    """Responses that are ranked, A, B, C ..."""
    pattern: str | None = None
    """A regular expression of one's own with one group, whose first letter is the best one's."""

    begins: ClassVar[bool] = False

    def named(self, text: str) -> str | None:
        """A letter, `TIE`, or None."""
        return first_ranked(text, LETTERS[: self.responses], self.pattern)


@RULES.register("python")
@dataclass(frozen=True)
class Python(Rule):
    """A function of one's own scores the text: `function(text, answers)` gives 0 ... 1."""

    function: str
    """`package.module:function`, or `file.py:function`."""

    text: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", self.function):
            raise UsageError(f"python: function must be module:function or file.py:function, got {self.function!r}")

    @property
    def own_code(self) -> str:
        """The function."""
        return self.function

    def right(self, text: str, answers: Sequence[str]) -> float:
        """What the function returns."""
        function = _imported(self.function)
        try:
            score = float(function(text, list(answers)))
        except Exception as error:  # whatever one's own code raises
            raise RunError(f"{self.function} failed: {type(error).__name__}: {error}") from error
        if not 0 <= score <= 1:
            raise RunError(f"{self.function} must return 0 ... 1, got {score!r}")
        return score


@cache
def _imported(path: str) -> Callable[[str, list[str]], Any]:
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"no module in {place!r}")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
            spec.loader.exec_module(module)
        else:
            module = import_module(place)
        function = getattr(module, name)
    except Exception as error:  # whatever a module raises while it is imported
        raise UsageError(f"cannot import {path!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{path!r} is no function")
    return function  # type: ignore[no-any-return]
